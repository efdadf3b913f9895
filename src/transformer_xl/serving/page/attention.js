// Where one head of one layer looked, from a chosen token back over its segment and the memory.

import { ask } from "./server.js";
import { endsLine, gap, tokenSpan } from "./tokens.js";
import { count, percent, quoted, tokens as tokenCount } from "./wording.js";

const TERMS = {
  total: ["All", "The four terms together: the weights the model used."],
  a: ["(a)", "Term (a) alone, through a softmax of its own: what the query looks for, in what the key holds."],
  b: ["(b)", "Term (b) alone, through a softmax of its own: what the query looks for, in how far away the key is."],
  c: ["(c)", "Term (c) alone, through a softmax of its own: what the key holds, whoever asks."],
  d: ["(d)", "Term (d) alone, through a softmax of its own: how far away the key is, whoever asks."],
};
const TOP_SHARE = 0.2;
const LISTED = 8;

const byId = (id) => document.getElementById(id);

export class Attention {
  // `problem(failure)` shows an error; `changed(choice)` is told the layer, head and term to remember.
  constructor({ problem, changed, choice }) {
    Object.assign(this, { problem, changed });
    this.choice = { layer: 0, head: 0, term: "total", ...choice };
    this.about = null;
    for (const name of ["layer", "head"]) {
      byId(name).addEventListener("change", (event) => this.#switch({ [name]: Number(event.target.value) }));
    }
    for (const [term, [name]] of Object.entries(TERMS)) {
      const input = Object.assign(document.createElement("input"), { type: "radio", name: "term", value: term });
      input.addEventListener("change", () => this.#switch({ term }));
      const label = document.createElement("label");
      const text = document.createElement("span");
      text.textContent = name;
      label.append(input, text);
      byId("term").append(label);
    }
  }

  // Another run: its layers, heads and terms; nothing is chosen in it yet.
  setRun(about) {
    this.about = about;
    const most = { layer: about.layers, head: about.heads };
    for (const name of ["layer", "head"]) {
      byId(name).replaceChildren(...Array.from({ length: most[name] }, (_, place) => new Option(String(place + 1), String(place))));
      this.choice[name] = Math.max(0, Math.min(this.choice[name], most[name] - 1));
      byId(name).value = String(this.choice[name]);
    }
    for (const input of document.getElementsByName("term")) input.disabled = input.value !== "total" && !about.terms.includes(input.value);
    if (this.choice.term !== "total" && !about.terms.includes(this.choice.term)) this.choice.term = "total";
    for (const input of document.getElementsByName("term")) input.checked = input.value === this.choice.term;
    this.clear();
  }

  clear() {
    this.running?.abort();
    this.asked = this.answer = null;
    byId("attention").hidden = true;
  }

  // asked: {model, tokens, place, memory}. Without memory nothing before the segment is seen, so nothing before it is sent.
  async look(asked) {
    this.asked = asked;
    this.running?.abort();
    this.running = new AbortController();
    const { signal } = this.running;
    const from = asked.memory === "off" ? asked.place - (asked.place % this.about.segment) : 0;
    const ids = asked.tokens.slice(from, asked.place + 2).map(({ id }) => id); // and the next: the server wants two at least
    const { layer, head } = this.choice;
    byId("attention").ariaBusy = "true";
    try {
      const answer = await ask("/v1/attention", { model: asked.model, tokens: ids, position: asked.place - from, layer, head }, signal);
      answer.first += from;
      answer.segment_start = Math.max(answer.segment_start + from, answer.first);
      this.answer = answer;
      this.#show();
    } catch (failure) {
      if (!signal.aborted) this.problem(failure);
    } finally {
      if (!signal.aborted) byId("attention").ariaBusy = "false";
    }
  }

  #switch(change) {
    Object.assign(this.choice, change);
    this.changed(this.choice);
    if (!this.asked) return;
    if (change.term && this.answer) this.#show();
    else this.look(this.asked);
  }

  #show() {
    const { asked, answer } = this;
    const { term } = this.choice;
    const whole = term === "total";
    const share = whole ? answer.weights : softmax(answer.terms[term]);
    const marked = whole ? answer.marked : topFifth(share);
    byId("attention").hidden = false;
    byId("term-said").textContent = TERMS[term][1];
    const most = Math.max(...share) || 1;
    const box = byId("looked");
    box.classList.toggle("letters", this.about.unit === "byte" || this.about.unit === "character");
    const parts = [];
    share.forEach((value, key) => {
      const place = answer.first + key;
      const token = asked.tokens[place];
      if (place === answer.segment_start && key > 0) parts.push(boundary());
      const span = tokenSpan(token);
      span.style.setProperty("--share", (value / most).toFixed(3));
      if (marked[key]) span.classList.add("top");
      if (place === asked.place) span.classList.add("asking");
      span.title = `${quoted(token.text)}: ${percent(value)}, ${tokenCount(asked.place - place)} back`;
      if (!whole) span.title += `, score ${answer.terms[term][key].toFixed(2)}`;
      if (token.before && key > 0 && !endsLine(asked.tokens[place - 1])) parts.push(gap(token));
      parts.push(span);
      if (endsLine(token)) parts.push(document.createElement("br"));
    });
    box.replaceChildren(...parts);
    box.scrollTop = box.scrollHeight;
    this.#list(share);
  }

  #sentence(most) {
    const { asked, answer } = this;
    const following = asked.tokens[asked.place + 1];
    const next = following ? `, before ${quoted(following.text)}` : ", the last";
    const inMemory = Math.min(answer.segment_start, asked.place + 1) - answer.first;
    const inSegment = asked.place + 1 - answer.first - inMemory;
    const memory = asked.memory === "off" ? "memory is off" : `${count(inMemory)} of them in memory`;
    return (
      `From token ${count(asked.place + 1)}, ${quoted(asked.tokens[asked.place].text)}${next}, it could look at ` +
      `${tokenCount(inMemory + inSegment)}: ${memory}, ${count(inSegment)} in its own segment. ` +
      `Most of all at ${quoted(asked.tokens[most].text)}, ${count(asked.place - most)} back.`
    );
  }

  #list(share) {
    const { asked, answer } = this;
    const order = share.map((_, key) => key).sort((one, other) => share[other] - share[one]);
    byId("attention-said").textContent = this.#sentence(answer.first + order[0]);
    const rows = order.slice(0, LISTED).map((key) => {
      const place = answer.first + key;
      const row = document.createElement("tr");
      const cells = [quoted(asked.tokens[place].text), count(asked.place - place), percent(share[key]), place < answer.segment_start ? "memory" : "segment"];
      for (const text of cells) row.insertCell().textContent = text;
      return row;
    });
    byId("most").tBodies[0].replaceChildren(...rows);
  }
}

function boundary() {
  const mark = document.createElement("span");
  mark.className = "boundary";
  mark.textContent = "◂ memory │ segment ▸";
  return mark;
}

function softmax(scores) {
  const most = Math.max(...scores);
  const powers = scores.map((score) => Math.exp(score - most));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}

// The paper's marks: the fifth of the tokens that is looked at most. The server marks the total by the same rule.
function topFifth(share) {
  const order = share.map((_, key) => key).sort((one, other) => share[other] - share[one]);
  const top = new Set(order.slice(0, Math.ceil(TOP_SHARE * share.length)));
  return share.map((value, key) => top.has(key) && value > 0);
}
