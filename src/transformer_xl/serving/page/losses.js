// Loss along the text: one reading with its running mean, or two side by side and what memory saved.

import { Chart } from "./chart.js";
import { count, described, nats, quoted, tokens as tokenCount } from "./wording.js";

const WINDOW = 32;
const MEAN_NAME = `running mean of ${WINDOW}`;

const byId = (id) => document.getElementById(id);
const losses = (tokens) => tokens.map(({ logprob }) => (logprob === null ? null : -logprob));
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// The mean of the last WINDOW values, or of as many as there are; null stays out of it.
function runningMean(values) {
  let sum = 0;
  const recent = [];
  return values.map((value) => {
    if (value !== null) {
      recent.push(value);
      sum += value;
      if (recent.length > WINDOW) sum -= recent.shift();
    }
    return recent.length ? sum / recent.length : null;
  });
}

function markWhereItWrote(tokens, name) {
  const place = tokens.findIndex(({ written }) => written);
  return place > 0 ? [{ place, name }] : [];
}

export class LossCharts {
  constructor({ choose }) {
    const hint = "Point at the chart, or walk it with the arrow keys; a click or Enter shows where the model looked.";
    this.loss = new Chart(byId("loss-chart"), { name: "Loss of each token", hint, choose });
    this.difference = new Chart(byId("difference-chart"), { name: "What memory saved at each token", hint: "", choose });
  }

  hide() {
    byId("charts").hidden = byId("difference").hidden = true;
  }

  show(panes) {
    if (panes.length === 0 || panes.some((pane) => pane.tokens.length < 2)) return;
    byId("charts").hidden = false;
    byId("difference").hidden = byId("difference-chart").hidden = panes.length < 2;
    if (panes.length === 2) this.#compare(...panes);
    else this.#one(panes[0]);
  }

  #one({ tokens }) {
    const means = runningMean(losses(tokens));
    this.loss.show({
      series: [
        { kind: "bars", values: losses(tokens), className: "loss", name: "each token" },
        { kind: "line", values: means, className: "with", name: MEAN_NAME },
      ],
      marks: markWhereItWrote(tokens, "from here the model wrote"),
      yName: "loss, nats",
      tell: (place) => described(tokens[place], place) + (means[place] === null ? "" : `; ${MEAN_NAME}: ${nats(means[place])}`),
    });
  }

  #compare(on, off) {
    const longer = on.tokens.length >= off.tokens.length ? on.tokens : off.tokens;
    const [withMemory, without] = [on, off].map(({ tokens }) => runningMean(losses(tokens)));
    const part = (name, value) => (value == null ? "" : `; ${name} ${nats(value)}`);
    const named = (place) => `Token ${count(place + 1)}${longer[place].written ? "" : `, ${quoted(longer[place].text)}`}`;
    this.loss.show({
      series: [
        { kind: "line", values: withMemory, className: "with", name: `memory on, ${MEAN_NAME}` },
        { kind: "line", values: without, className: "without", name: `memory off, ${MEAN_NAME}` },
      ],
      marks: markWhereItWrote(on.tokens, "from here each wrote its own"),
      yName: "loss, nats",
      tell: (place) => `${named(place)}${part("running mean with memory", withMemory[place])}${part("without", without[place])}`,
    });

    // Only what both have read can be compared: the text, not what each wrote after it.
    const pairs = longer.map((_, place) => [on, off].map(({ tokens }) => (tokens[place]?.written ? null : (tokens[place]?.logprob ?? null))));
    const saved = pairs.map(([one, other]) => (one === null || other === null ? null : one - other));
    const known = pairs.filter((_, place) => saved[place] !== null);
    byId("difference").hidden = byId("difference-chart").hidden = known.length === 0;
    if (known.length === 0) return;
    const name = `loss without memory less loss with it: above zero, memory helped (without it, each ${tokenCount(on.about.segment)} start anew)`;
    this.difference.show({
      series: [{ kind: "bars", values: saved, className: "saved", name }],
      yName: "saved, nats",
      tell: (place) => named(place) + (saved[place] === null ? ": nothing to compare" : `: memory saved ${nats(saved[place])}`),
    });
    const [best, worst] = [0, 1].map((which) => -mean(known.map((pair) => pair[which])));
    byId("difference").textContent =
      `Memory ${worst >= best ? "saves" : "costs"} ${Math.abs(worst - best).toFixed(3)} nats per token over the ${tokenCount(known.length)} ` +
      `scored in your text: ${best.toFixed(3)} with it, ${worst.toFixed(3)} without.`;
  }
}
