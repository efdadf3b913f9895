// The page's doings, top to bottom: what is remembered, runs to choose from, reading, generating, and looking back from a token.

import { Attention } from "./attention.js";
import { learned } from "./learning.js";
import { LossCharts } from "./losses.js";
import { Pane } from "./pane.js";
import { ask, Refusal, streamed, useKey } from "./server.js";
import { remember, remembered, startTheme } from "./settings.js";
import { LEVELS, readTokens, writtenTokens } from "./tokens.js";
import { count, tokens as tokenCount } from "./wording.js";

const byId = (id) => document.getElementById(id);
const FIELDS = ["max_tokens", "temperature", "top_p", "top_k", "seed"];
const DRAW_EVERY_MS = 60;

const nothing = byId("nothing");

let runs = [];
let panes = [];
let running = null;

const attention = new Attention({ problem, changed: (choice) => remember({ choice }), choice: remembered().choice });
const charts = new LossCharts({ choose: chooseInFirst });

// What is remembered

function restore() {
  const kept = remembered();
  byId("text").value = kept.text ?? "";
  for (const name of FIELDS) if (kept[name] !== undefined) byId(name).value = kept[name];
  byId("settings").open = kept.settings ?? matchMedia("(min-width: 60rem)").matches;
  for (const input of document.getElementsByName("memory")) input.checked = input.value === (kept.memory ?? "on");
}

function store() {
  const settings = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]));
  const kept = remember({ text: byId("text").value, run: byId("run").value, memory: memoryChoice(), ...settings });
  if (!kept) say("This browser cannot keep the text over a reload.");
}

function memoryChoice() {
  return document.querySelector("[name=memory]:checked").value;
}

// Saying things: one live region for what happens, one alert for what fails, and a count that is seen but not read out

function say(sentence) {
  byId("status").textContent = sentence;
}

function problem(failure) {
  if (!(failure instanceof Refusal)) console.error(failure);
  if (failure.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  byId("problem").hidden = false;
  byId("problem").textContent = failure instanceof Refusal ? failure.message : "The page made a mistake; reload it.";
  say("");
}

function legends() {
  const swatch = (className, text) => {
    const item = document.createElement("span");
    const colour = document.createElement("i");
    colour.className = className;
    item.append(colour, text);
    return item;
  };
  const names = [...LEVELS.map((least) => `${100 * least} %+`), "less"];
  byId("surprise-legend").append(
    "Probability",
    ...names.map((name, level) => swatch(`s${level}`, name)),
    swatch("written", "written by the model"),
  );
  byId("attention-legend").append(
    swatch("scale", "none to most"),
    swatch("top", "top 20 %"),
    swatch("asking", "the token that looks"),
  );
}

// Runs

async function loadRuns() {
  try {
    runs = (await ask("/v1/models")).data;
  } catch (failure) {
    problem(failure);
    return;
  }
  byId("key-form").hidden = byId("problem").hidden = true;
  byId("run").replaceChildren(...runs.map(({ id }) => new Option(id, id)));
  const kept = remembered().run;
  byId("run").value = runs.some(({ id }) => id === kept) ? kept : runs[0].id;
  showRun();
}

function about() {
  return runs.find(({ id }) => id === byId("run").value).transformer_xl;
}

function showRun() {
  const run = about();
  const parts = run.recurrent
    ? [`${count(run.layers)} recurrent layers`]
    : [`${count(run.layers)} layers of ${count(run.heads)} heads`, `remembers ${tokenCount(run.memory)}`, `segments of ${count(run.segment)}`];
  const million = (run.parameters / 1e6).toPrecision(3);
  byId("facts").textContent = [...parts, `${count(run.vocabulary)} ${run.unit}s`, `${million} M parameters`].join(" · ");
  attention.setRun(run);
  clearPanes();
}

// Reading and generating

function clearPanes() {
  panes = [];
  byId("panes").replaceChildren(nothing);
  charts.hide();
  attention.clear();
}

function makePanes(ways = { on: ["on"], off: ["off"], both: ["on", "off"] }[memoryChoice()]) {
  clearPanes();
  if (byId("results").getBoundingClientRect().top > 0.6 * innerHeight) byId("results").scrollIntoView({ behavior: "smooth" });
  panes = ways.map((memory) => new Pane(memory, { about: about(), choose, keep, point: pointAtTwin }));
  byId("panes").replaceChildren(...panes.map(({ element }) => element));
  return panes;
}

// Runs one job at a time. Stop ends it; what was read or written until then stays.
async function job(doing, work) {
  if (running || runs.length === 0) return;
  running = new AbortController();
  byId("problem").hidden = true;
  setBusy(true);
  say(doing);
  try {
    say(await work(running.signal));
  } catch (failure) {
    running.abort(); // where two readings run side by side, the failure of one ends the other
    if (failure.name === "AbortError") say("Stopped.");
    else problem(failure);
  } finally {
    running = null;
    byId("count").textContent = "";
    setBusy(false);
    charts.show(panes);
  }
}

function setBusy(busy) {
  byId("stop").disabled = !busy;
  for (const id of ["generate", "read", "learn", "run"]) byId(id).disabled = busy;
  byId("panes").ariaBusy = String(busy);
}

async function score(pane, text, signal) {
  const answer = await ask("/v1/score", { model: byId("run").value, text, memory: pane.memory }, signal);
  await pane.show(readTokens(text, answer.tokens), answer.memory);
}

function read() {
  const text = byId("text").value;
  if (!text) return problem(new Refusal("There is no text to read; write some first.", 0));
  return job("Reading…", async (signal) => {
    await Promise.all(makePanes().map((pane) => score(pane, text, signal)));
    return `Read ${tokenCount(panes[0].tokens.length)}.`;
  });
}

// The text's very tokens go to a session that learns; the picture grows with every piece.
function learn() {
  const text = byId("text").value;
  if (!text) return problem(new Refusal("There is no text to learn from; write some first.", 0));
  return job("Learning…", async (signal) => {
    const model = byId("run").value;
    const [pane] = makePanes(["learn"]);
    const scored = await ask("/v1/score", { model, text }, signal);
    const tokens = readTokens(text, scored.tokens);
    pane.fill(0, scored.memory.length);
    let how = "";
    for await (const { first, logprobs, static_logprobs, adapt } of learned(model, tokens.map(({ id }) => id), signal)) {
      how = adapt.in_words;
      pane.write(logprobs.map((logprob, place) => ({ ...tokens[first + place], logprob, still: static_logprobs[place] })));
      byId("count").textContent = `${tokenCount(pane.tokens.length)} so far`;
      charts.show(panes);
    }
    return `${signal.aborted ? "Stopped after" : "Learned from"} ${tokenCount(pane.tokens.length)}: ${how}.`;
  });
}

function generate() {
  const wrong = FIELDS.map(byId).find((input) => !input.checkValidity());
  if (wrong) {
    byId("settings").open = true;
    wrong.focus();
    return problem(new Refusal(`${wrong.labels[0].firstChild.textContent.trim()}: ${wrong.validationMessage}`, 0));
  }
  const text = byId("text").value;
  const seed = byId("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number(byId("seed").value);
  const [length, temperature, top_p, top_k] = FIELDS.map((name) => Number(byId(name).value));
  const settings = { max_tokens: length, temperature, top_p, top_k, seed };
  return job("Writing…", async (signal) => {
    const numbers = await Promise.all(makePanes().map((pane) => write(pane, text, settings, signal)));
    const stopped = signal.aborted ? "Stopped after" : "Wrote";
    return `${stopped} ${numbers.slice(0, -1).map((number) => `${count(number)} and `)}${tokenCount(numbers.at(-1))} with seed ${seed}.`;
  });
}

// A text has to begin somewhere: an empty one at the beginning of a line, or after a space where the run knows no lines.
async function begin(pane, text, signal) {
  try {
    await score(pane, text || "\n", signal);
  } catch (failure) {
    if (text || failure.status !== 422) throw failure;
    await score(pane, " ", signal);
  }
}

// Reads the text, goes on from its very tokens, and shows new ones as they come, several at a time.
async function write(pane, text, settings, signal) {
  await begin(pane, text, signal);
  const prompt = pane.tokens.map(({ id }) => id);
  const body = { ...settings, model: byId("run").value, memory: pane.memory, prompt, logprobs: 0, stream: true };
  pane.view.toEnd();
  const waiting = [];
  let number = 0;
  const draw = () => {
    pane.write(waiting.splice(0));
    if (pane === panes[0]) byId("count").textContent = `${tokenCount(number)} so far`;
  };
  const drawing = setInterval(() => waiting.length && draw(), DRAW_EVERY_MS);
  try {
    for await (const chunk of streamed("/v1/completions", body, signal)) {
      const [{ text: piece, logprobs }] = chunk.choices;
      const fresh = logprobs ? writtenTokens(piece, logprobs) : [];
      pane.written += piece;
      number += fresh.length;
      waiting.push(...fresh);
    }
  } catch (failure) {
    if (failure.name !== "AbortError") throw failure;
  } finally {
    clearInterval(drawing);
    draw();
    pane.finish();
  }
  return number;
}

function keep(pane) {
  byId("text").value += pane.written;
  pane.written = "";
  pane.part(".keep").hidden = true;
  store();
  say("Added to your text.");
  byId("text").focus();
}

// Looking back from a token

// Side by side, a token of the text is pointed at in both readings.
function pointAtTwin(pane, place) {
  for (const other of panes) {
    if (other !== pane && place < other.tokens.length && !pane.tokens[place].written) other.view.tell(place);
  }
}

function choose(pane, place) {
  if (!about().attention) return say("This run is recurrent: it has no attention to look at.");
  if (pane.memory === "learn") return say("Where it looked is shown for weights that stand still: press Read.");
  for (const other of panes) other.view.select(other === pane ? place : -1);
  return attention.look({ model: byId("run").value, tokens: pane.tokens, place, memory: pane.memory });
}

function chooseInFirst(place) {
  choose(panes[0], Math.min(place, panes[0].tokens.length - 1));
}

// Start

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
});
byId("ask").noValidate = true;
byId("ask").addEventListener("input", store);
byId("settings").addEventListener("toggle", () => remember({ settings: byId("settings").open }));
byId("read").addEventListener("click", read);
byId("learn").addEventListener("click", learn);
byId("stop").addEventListener("click", () => running?.abort());
byId("run").addEventListener("change", () => {
  store();
  showRun();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  try {
    useKey(byId("key").value);
    byId("key").value = "";
    loadRuns();
  } catch (failure) {
    problem(failure);
  }
});

startTheme(byId("theme"));
legends();
restore();
loadRuns();
