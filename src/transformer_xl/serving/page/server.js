// The one door to the server: JSON in and out, streamed answers, and every failure as one sentence. Knows nothing of the page.

const KEY = "txl-api-key";

export class Refusal extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

// The key lives as long as the tab does.
export function useKey(key) {
  if (!/^[\x21-\x7e]+$/.test(key)) throw new Refusal("An API key has no spaces and only ASCII characters.", 401);
  sessionStorage.setItem(KEY, key);
}

async function send(path, body, signal, method = body ? "POST" : "GET") {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, keepalive: method === "DELETE" });
  } catch (failure) {
    throw failure.name === "AbortError" ? failure : new Refusal("The server does not answer; is txl serve still running?", 0);
  }
  if (!answer.ok) throw new Refusal(await sentenceOf(answer), answer.status);
  return answer;
}

async function sentenceOf(answer) {
  let sentence = "";
  try {
    sentence = (await answer.json()).error.message;
  } catch {
    // No JSON came with the status: the status has to do.
  }
  const wait = answer.headers.get("Retry-After");
  return (sentence || `The server answered with status ${answer.status}.`) + (wait ? ` Try again in ${wait} s.` : "");
}

export async function ask(path, body, signal) {
  return (await send(path, body, signal)).json();
}

// Something that the server keeps for us goes, also while the page is being left. If it is gone already, nobody minds.
export function forget(path) {
  send(path, null, undefined, "DELETE").catch(() => {});
}

// The chunks of a streamed answer. Leaving the loop early closes the connection, which frees the server's slot.
export async function* streamed(path, body, signal) {
  const answer = await send(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((failure) => {
        throw failure.name === "AbortError" ? failure : broken();
      });
      if (done) throw broken();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue;
        if (event === "data: [DONE]") return;
        const chunk = JSON.parse(event.slice(6));
        if (chunk.error) throw new Refusal(chunk.error.message, 500);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function broken() {
  return new Refusal("The server broke off before the text was done.", 0);
}
