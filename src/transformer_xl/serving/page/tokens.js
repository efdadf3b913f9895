// A text shown token by token: coloured by surprise, walked with the arrow keys, one chosen at a time.
//
// A token is {id, text, before, source, logprob, written}: `before` is text that belongs to no token (a space between words),
// `source` what stands in the text where the model reads `text`, `written` whether the model wrote it.

import { count, described, visible } from "./wording.js";

// More elements than this make a browser slow; figures and charts still count every token.
const MOST_SHOWN = 20000;
const AT_ONCE = 1000;
const LINE_END = "<eos>";

// Levels of surprise by probability: at least a half, a fifth, ... and less than all of these.
export const LEVELS = [0.5, 0.2, 0.05, 0.01, 0.001, 0.0001];

function level(logprob) {
  const place = LEVELS.findIndex((least) => logprob >= Math.log(least));
  return place < 0 ? LEVELS.length : place;
}

// What the server says of a text, as tokens of that text. Offsets count characters as Python does, so the text is cut by code points.
export function readTokens(text, scored) {
  const letters = Array.from(text);
  let end = 0;
  return scored.map(({ id, text: name, start, end: stop, logprob }) => {
    const before = letters.slice(end, start).join("");
    end = Math.max(end, stop);
    return { id, text: name, before, source: letters.slice(start, stop).join(""), logprob, written: false };
  });
}

// A piece of a streamed text, as the tokens that made it. Several tokens may make one character, and then stand by their names alone.
export function writtenTokens(text, { tokens, token_ids, token_logprobs }) {
  return tokens.map((name, place) => {
    const alone = tokens.length === 1 && text !== "";
    const before = alone && text.length > name.length && text.endsWith(name) ? text.slice(0, -name.length) : "";
    const source = alone ? text.slice(before.length) : name;
    return { id: token_ids[place], text: name, before, source, logprob: token_logprobs[place], written: true };
  });
}

export function tokenSpan(token) {
  const span = document.createElement("span");
  span.textContent = token.text === LINE_END ? "⏎" : visible(token.text);
  if (token.text === "\t") span.textContent += "\t";
  return span;
}

// What stands between a token and the one before it, on one line.
export function gap(token) {
  return visible(token.before.replace(/\s+/g, " "));
}

export function endsLine(token) {
  return token.text.endsWith("\n") || token.text === LINE_END;
}

export class TokenView {
  constructor(box, { more, detail, choose, point }) {
    Object.assign(this, { box, more, detail, choose, point });
    this.clear();
    box.addEventListener("click", (event) => this.#at(event, (place) => this.#chosen(place)));
    box.addEventListener("pointerover", (event) => this.#at(event, (place) => this.#pointed(place)));
    box.addEventListener("focusin", (event) => this.#at(event, (place) => this.#pointed(place)));
    box.addEventListener("keydown", (event) => this.#key(event));
  }

  clear() {
    this.box.replaceChildren();
    this.tokens = [];
    this.spans = [];
    this.first = 0;
    this.active = 0;
    this.line = null;
    this.more.hidden = true;
  }

  // Replaces everything, keeping the place of the keyboard; gives the browser a breath after each batch.
  async show(tokens) {
    const focused = this.box.contains(document.activeElement);
    const { active, box } = this;
    this.clear();
    this.drawing = tokens;
    this.first = Math.max(0, tokens.length - MOST_SHOWN);
    this.more.hidden = this.first === 0;
    this.more.textContent = `The first ${count(this.first)} tokens are read but not shown, to keep the page quick; figures and charts count them.`;
    this.tokens = tokens.slice(0, this.first);
    for (let from = this.first; from < tokens.length; from += AT_ONCE) {
      this.append(tokens.slice(from, from + AT_ONCE));
      if (from + AT_ONCE < tokens.length) await new Promise((done) => setTimeout(done));
      if (this.drawing !== tokens) return;
    }
    box.setAttribute("aria-label", `${count(tokens.length)} tokens; arrow keys walk, Enter shows where the model looked`);
    this.#activate(Math.min(Math.max(active, this.first), tokens.length - 1), focused);
  }

  append(tokens) {
    const follow = this.box.scrollTop + this.box.clientHeight > this.box.scrollHeight - 40;
    for (const token of tokens) {
      if (!this.line) {
        this.line = document.createElement("div");
        this.line.role = "presentation";
        this.box.append(this.line);
      }
      const span = tokenSpan(token);
      span.role = "option";
      span.tabIndex = this.spans.length === 0 ? 0 : -1;
      span.className = token.logprob === null ? "unscored" : `s${level(token.logprob)}`;
      if (token.written) span.classList.add("written");
      span.ariaSelected = "false";
      span.ariaLabel = described(token, this.tokens.length);
      span.dataset.place = this.tokens.length;
      if (token.before && this.line.hasChildNodes()) this.line.append(gap(token));
      this.line.append(span);
      if (endsLine(token)) this.line = null;
      this.tokens.push(token);
      this.spans.push(span);
    }
    if (follow && tokens.some((token) => token.written)) this.toEnd();
  }

  toEnd() {
    this.box.scrollTop = this.box.scrollHeight;
  }

  select(place) {
    this.box.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
    this.#span(place)?.setAttribute("aria-selected", "true");
  }

  // Says a token's surprise under the text, and rings the token.
  tell(place) {
    this.detail.textContent = described(this.tokens[place], place);
    this.box.querySelector(".told")?.classList.remove("told");
    this.#span(place)?.classList.add("told");
  }

  #span(place) {
    return this.spans[place - this.first];
  }

  #at(event, act) {
    const span = event.target.closest("[data-place]");
    if (span) act(Number(span.dataset.place));
  }

  #chosen(place) {
    this.#activate(place, true);
    this.choose(place);
  }

  #activate(place, focus) {
    const span = this.#span(place);
    if (!span) return;
    const before = this.#span(this.active);
    if (before) before.tabIndex = -1;
    this.active = place;
    span.tabIndex = 0;
    if (focus) span.focus({ preventScroll: false });
  }

  #pointed(place) {
    this.tell(place);
    this.#span(place).title = this.detail.textContent;
    this.point(place);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.spans.length === 0) return;
    const last = this.tokens.length - 1;
    const places = {
      ArrowRight: () => this.active + 1,
      ArrowLeft: () => this.active - 1,
      ArrowDown: () => this.#lineAway(1),
      ArrowUp: () => this.#lineAway(-1),
      PageDown: () => this.active + 100,
      PageUp: () => this.active - 100,
      Home: () => this.first,
      End: () => last,
    };
    if (event.key === "Enter" || event.key === " ") this.#chosen(this.active);
    else if (places[event.key]) this.#activate(Math.min(last, Math.max(this.first, places[event.key]())), true);
    else return;
    event.preventDefault();
  }

  // The token above or below: of the first line that differs, the one nearest to where the keyboard is.
  #lineAway(step) {
    const here = this.#span(this.active).getBoundingClientRect();
    let best = this.active;
    let distance = Infinity;
    let top = null;
    for (let place = this.active + step; this.#span(place); place += step) {
      const there = this.#span(place).getBoundingClientRect();
      if (Math.abs(there.top - here.top) < here.height / 2) continue;
      if (top !== null && Math.abs(there.top - top) > here.height / 2) break;
      top ??= there.top;
      if (Math.abs(there.left - here.left) < distance) [best, distance] = [place, Math.abs(there.left - here.left)];
    }
    return best;
  }
}
