// A chart along the tokens, drawn as SVG: bars or lines over positions, axes with their names, and a cursor for pointer and keyboard.

import { count } from "./wording.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const EDGE = { top: 10, right: 12, bottom: 40, left: 52 };
const PAGE_STEP = 32;

function draw(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// Round steps so that about `wanted` of them cover the span.
function ticks(least, most, wanted) {
  const rough = (most - least) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough);
  const found = [];
  for (let value = Math.ceil(least / step) * step; value <= most + step / 1e6; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

export class Chart {
  // `tell(place)` gives the sentence for a position; `choose(place)` is called on click and Enter.
  constructor(host, { name, hint, choose }) {
    Object.assign(this, { hint, choose });
    this.host = host;
    host.className = "chart";
    this.key = document.createElement("p");
    this.key.className = "key small";
    this.plot = document.createElement("div");
    this.plot.className = "plot";
    this.plot.tabIndex = 0;
    this.plot.role = "slider";
    this.plot.ariaLabel = name;
    this.said = document.createElement("p");
    this.said.className = "detail small";
    this.said.ariaHidden = "true";
    host.append(this.key, this.plot, this.said);
    this.plot.addEventListener("pointermove", (event) => this.#point(this.#placeAt(event)));
    this.plot.addEventListener("click", (event) => this.choose(this.#placeAt(event)));
    this.plot.addEventListener("focus", () => this.#point(this.place));
    this.plot.addEventListener("keydown", (event) => this.#keyed(event));
    new ResizeObserver(() => this.#draw()).observe(this.plot);
  }

  // series: [{kind: "bars" | "line", values, className, name}]; marks: [{place, name}] are upright lines.
  show({ series, marks = [], yName, tell }) {
    Object.assign(this, { series, marks, yName, tell });
    this.length = Math.max(...series.map(({ values }) => values.length));
    this.place = Math.min(this.place ?? 0, this.length - 1);
    this.plot.ariaValueMin = "1";
    this.plot.ariaValueMax = String(this.length);
    this.key.replaceChildren(
      ...series.map(({ className, name }) => {
        const item = document.createElement("span");
        const swatch = document.createElement("i");
        swatch.className = className;
        item.append(swatch, name);
        return item;
      }),
    );
    this.#draw();
    this.#point(this.place, true);
  }

  #x(place) {
    return EDGE.left + ((place + 0.5) / this.length) * (this.width - EDGE.left - EDGE.right);
  }

  #y(value) {
    return EDGE.top + ((this.most - value) / (this.most - this.least)) * (HEIGHT - EDGE.top - EDGE.bottom);
  }

  #draw() {
    this.width = this.plot.clientWidth;
    if (!this.series || this.width < EDGE.left + EDGE.right + 20) return;
    let [least, most] = [0, 0];
    for (const { values } of this.series) {
      for (const value of values) if (value !== null) [least, most] = [Math.min(least, value), Math.max(most, value)];
    }
    [this.least, this.most] = [least, most > least ? most : least + 1];
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    svg.setAttribute("aria-hidden", "true");
    this.#axes(svg);
    for (const { kind, values, className } of this.series) {
      draw(svg, "path", { class: className, d: kind === "bars" ? this.#bars(values) : this.#line(values) });
    }
    for (const { place, name } of this.marks) {
      const x = this.#x(place - 0.5);
      draw(svg, "line", { class: "mark", x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
      const left = x > this.width - 200;
      draw(svg, "text", { class: "mark-name", x: left ? x - 5 : x + 5, y: EDGE.top + 9, "text-anchor": left ? "end" : "start" }, name);
    }
    this.cursor = draw(svg, "line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
    this.plot.replaceChildren(svg);
    this.#moveCursor();
  }

  #axes(svg) {
    const bottom = HEIGHT - EDGE.bottom;
    for (const value of ticks(this.least, this.most, 4)) {
      draw(svg, "line", { class: value === 0 ? "axis" : "grid", x1: EDGE.left, x2: this.width - EDGE.right, y1: this.#y(value), y2: this.#y(value) });
      draw(svg, "text", { x: EDGE.left - 7, y: this.#y(value) + 4, "text-anchor": "end" }, String(value));
    }
    for (const value of ticks(1, this.length, Math.max(4, Math.floor(this.width / 110)))) {
      const x = this.#x(value - 1);
      const anchor = x > this.width - 30 ? "end" : "middle"; // the last one would be cut off
      if (Number.isInteger(value)) draw(svg, "text", { x, y: bottom + 16, "text-anchor": anchor }, count(value));
    }
    draw(svg, "text", { class: "axis-name", x: (EDGE.left + this.width - EDGE.right) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, "token");
    const middle = (EDGE.top + bottom) / 2;
    draw(svg, "text", { class: "axis-name", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, this.yName);
  }

  // Where several tokens share a pixel, the highest and the lowest of them are drawn.
  #bars(values) {
    const extremes = new Map();
    values.forEach((value, place) => {
      if (value === null) return;
      const x = this.length > this.width ? Math.round(this.#x(place)) : this.#x(place);
      const [low, high] = extremes.get(x) ?? [0, 0];
      extremes.set(x, [Math.min(low, value), Math.max(high, value)]);
    });
    const half = Math.max(0.5, Math.min(4, (0.36 * this.width) / this.length));
    let path = "";
    for (const [x, [low, high]] of extremes) {
      path += `M${(x - half).toFixed(2)} ${this.#y(low).toFixed(1)}H${(x + half).toFixed(2)}V${this.#y(high).toFixed(1)}H${(x - half).toFixed(2)}z`;
    }
    return path;
  }

  #line(values) {
    const every = Math.max(1, Math.floor(values.length / (2 * this.width)));
    let path = "";
    values.forEach((value, place) => {
      if (value === null || (place % every && place < values.length - 1)) return;
      path += `${path ? "L" : "M"}${this.#x(place).toFixed(1)} ${this.#y(value).toFixed(1)}`;
    });
    return path;
  }

  #placeAt(event) {
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    const share = (x - EDGE.left) / (this.width - EDGE.left - EDGE.right);
    return Math.min(this.length - 1, Math.max(0, Math.floor(share * this.length)));
  }

  #point(place, quietly = false) {
    this.place = place;
    const words = this.tell(place);
    this.plot.ariaValueNow = String(place + 1);
    this.plot.ariaValueText = words;
    this.said.textContent = quietly ? this.hint : words;
    this.pointed = !quietly;
    this.#moveCursor();
  }

  #moveCursor() {
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", this.pointed ? "visible" : "hidden");
    this.cursor.setAttribute("x1", this.#x(this.place));
    this.cursor.setAttribute("x2", this.#x(this.place));
  }

  #keyed(event) {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: PAGE_STEP, PageDown: -PAGE_STEP, Home: -Infinity, End: Infinity };
    if (event.key === "Enter") this.choose(this.place);
    else if (event.key in steps) this.#point(Math.min(this.length - 1, Math.max(0, this.place + steps[event.key])));
    else return;
    event.preventDefault();
  }
}
