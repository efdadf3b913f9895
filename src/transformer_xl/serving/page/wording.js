// How numbers and tokens are said. Everything here makes strings; whoever shows them uses textContent.

const NAMES = { "\n": "⏎", "\t": "⇥", "\r": "␍" };

// A token's text for a line of running text: spaces stay spaces, what would show nothing or move its neighbours is named.
export function visible(text) {
  return text.replace(/[\p{C}\p{Zl}\p{Zp}\u00a0]/gu, (letter) => NAMES[letter] ?? `\\u${letter.codePointAt(0).toString(16).padStart(4, "0")}`);
}

// The same between quotation marks, where a space has to show.
export function quoted(text) {
  return `“${visible(text).replaceAll(" ", "␣")}”`;
}

export function count(number) {
  return number.toLocaleString("en");
}

export function tokens(number) {
  return number === 1 ? "1 token" : `${count(number)} tokens`;
}

export function chance(probability) {
  const share = 100 * probability;
  if (share >= 10) return `${share.toFixed(0)} %`;
  if (share >= 0.1) return `${share.toPrecision(2)} %`;
  return probability > 1e-9 ? `1 in ${count(Number((1 / probability).toPrecision(2)))}` : "less than 1 in 1,000,000,000";
}

// A part of a whole: of attention, which is never expected of anything.
export function percent(share) {
  return share >= 0.0005 ? `${(100 * share).toFixed(share >= 0.0995 ? 0 : 1)} %` : "< 0.1 %";
}

export function nats(loss) {
  return `${loss.toFixed(2)} nats`;
}

export function surprise(token) {
  if (token.logprob === null) return "nothing before it to expect it from";
  return `surprise ${nats(-token.logprob)}, probability ${chance(Math.exp(token.logprob))}`;
}

export function described(token, place) {
  const standing = token.source !== undefined && token.source.trim() && token.source !== token.text && !token.text.startsWith("\\x");
  const stands = standing ? ` for ${quoted(token.source)}` : "";
  return `${quoted(token.text)}${stands}: ${surprise(token)}; token ${count(place + 1)}${token.written ? ", written by the model" : ""}`;
}
