// One reading of the text, with memory or without: its tokens, its figures, and how full the memory is.

import { TokenView } from "./tokens.js";
import { count, nats, tokens as tokenCount } from "./wording.js";

const NAMES = { on: "Memory on", off: "Memory off", learn: "Learning while it reads" };
const UNITS = { byte: "byte", character: "character", word: "word", piece: "piece" };

// Mean loss in nats over the tokens that have one.
function meanLoss(tokens) {
  const losses = tokens.filter(({ logprob }) => logprob !== null).map(({ logprob }) => -logprob);
  return losses.length ? losses.reduce((sum, loss) => sum + loss, 0) / losses.length : null;
}

export class Pane {
  constructor(memory, { about, choose, keep, point }) {
    const part = (name) => this.element.querySelector(name);
    this.element = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    Object.assign(this, { memory, about, part });
    this.written = "";
    part("h3").textContent = NAMES[memory];
    part(".tokens").classList.toggle("letters", about.unit === "byte" || about.unit === "character");
    part(".tokens").ariaLabel = "Tokens";
    part(".keep").addEventListener("click", () => keep(this));
    this.view = new TokenView(part(".tokens"), {
      more: part(".more"),
      detail: part(".detail"),
      choose: (place) => choose(this, place),
      point: (place) => point(this, place),
    });
    const looks = memory === "learn" ? "" : "; click it, or press Enter, to see where the model looked";
    part(".detail").textContent = `Point at a token for its surprise${looks}.`;
  }

  get tokens() {
    return this.view.tokens;
  }

  // `memory`: {used, length} as the server says after reading.
  async show(tokens, memory) {
    this.fill(memory.used, memory.length);
    await this.view.show(tokens);
    this.figures();
  }

  write(tokens) {
    this.view.append(tokens);
    this.fill(Math.min(this.length, this.used + tokens.length), this.length);
    this.figures();
  }

  finish() {
    this.part(".keep").hidden = !this.written;
  }

  figures() {
    const loss = meanLoss(this.tokens);
    const unit = UNITS[this.about.unit];
    const told = unit === "byte" || unit === "character" ? `${(loss / Math.LN2).toFixed(2)} bits per ${unit}` : `perplexity ${Math.exp(loss).toFixed(1)}`;
    this.part(".figures").textContent = tokenCount(this.tokens.length) + (loss === null ? "" : ` · ${nats(loss)} per token · ${told}`);
  }

  fill(used, length) {
    Object.assign(this, { used, length });
    const track = this.part(".track");
    track.ariaValueMax = String(length);
    track.ariaValueNow = String(used);
    track.style.setProperty("--full", length ? used / length : 0);
    const said = this.about.recurrent
      ? "One state of fixed size"
      : this.memory === "off"
        ? `Forgets every ${tokenCount(this.about.segment)}`
        : `Memory holds ${count(used)} of ${tokenCount(length)}${used === length ? ": full, the oldest go" : ""}`;
    this.part(".memory-said").textContent = said;
    track.ariaValueText = said;
  }
}
