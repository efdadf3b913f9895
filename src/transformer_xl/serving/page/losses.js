// Loss along the text: one reading with its running mean, or two and what the one saved: memory, or learning while it reads.

import { Chart } from "./chart.js";
import { count, described, nats, quoted, tokens as tokenCount } from "./wording.js";

const WINDOW = 32;
const meanName = (window) => `running mean of ${window}`;

const byId = (id) => document.getElementById(id);
const losses = (tokens) => tokens.map(({ logprob }) => (logprob === null ? null : -logprob));
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// The mean of the last `window` values, or of as many as there are; null stays out of it.
function runningMean(values, window) {
  let sum = 0;
  const recent = [];
  return values.map((value) => {
    if (value !== null) {
      recent.push(value);
      sum += value;
      if (recent.length > window) sum -= recent.shift();
    }
    return recent.length ? sum / recent.length : null;
  });
}

// How two readings are told apart: what helps, its reading and the other's, a word about the other, and how far a running mean goes back.
const MEMORY = {
  helper: "Memory",
  window: WINDOW,
  names: ["memory on", "memory off"],
  other: ({ segment }) => `without it, each ${tokenCount(segment)} start anew`,
};
const LEARNING = {
  helper: "Learning",
  window: 256,
  names: ["learning", "standing still"],
  other: () => "without it, the weights stand still and nothing is cached",
};

function markWhereItWrote(tokens, name) {
  const place = tokens.findIndex(({ written }) => written);
  return place > 0 ? [{ place, name }] : [];
}

export class LossCharts {
  constructor({ choose }) {
    const hint = "Point at the chart, or walk it with the arrow keys; a click or Enter shows where the model looked.";
    this.loss = new Chart(byId("loss-chart"), { name: "Loss of each token", hint, choose });
    this.difference = new Chart(byId("difference-chart"), { name: "What was saved at each token", hint: "", choose });
  }

  hide() {
    byId("charts").hidden = byId("difference").hidden = true;
  }

  show(panes) {
    if (panes.length === 0 || panes.some((pane) => pane.tokens.length < 2)) return;
    byId("charts").hidden = false;
    const [first, second] = panes;
    const learns = first.memory === "learn";
    byId("difference").hidden = byId("difference-chart").hidden = !second && !learns;
    if (second) this.#compare(first, second, MEMORY);
    else if (learns) this.#compare(first, { tokens: first.tokens.map((token) => ({ ...token, logprob: token.still })) }, LEARNING);
    else this.#one(first);
  }

  #one({ tokens }) {
    const means = runningMean(losses(tokens), WINDOW);
    this.loss.show({
      series: [
        { kind: "bars", values: losses(tokens), className: "loss", name: "each token" },
        { kind: "line", values: means, className: "with", name: meanName(WINDOW) },
      ],
      marks: markWhereItWrote(tokens, "from here the model wrote"),
      yName: "loss, nats",
      tell: (place) => described(tokens[place], place) + (means[place] === null ? "" : `; ${meanName(WINDOW)}: ${nats(means[place])}`),
    });
  }

  #compare(on, off, { helper, names, other, window }) {
    const thing = helper.toLowerCase();
    const longer = on.tokens.length >= off.tokens.length ? on.tokens : off.tokens;
    const [helped, without] = [on, off].map(({ tokens }) => runningMean(losses(tokens), window));
    const part = (name, value) => (value == null ? "" : `; ${name} ${nats(value)}`);
    const named = (place) => `Token ${count(place + 1)}${longer[place].written ? "" : `, ${quoted(longer[place].text)}`}`;
    this.loss.show({
      series: [
        { kind: "line", values: helped, className: "with", name: `${names[0]}, ${meanName(window)}` },
        { kind: "line", values: without, className: "without", name: `${names[1]}, ${meanName(window)}` },
      ],
      marks: markWhereItWrote(on.tokens, "from here each wrote its own"),
      yName: "loss, nats",
      tell: (place) => `${named(place)}${part(`running mean with ${thing}`, helped[place])}${part("without", without[place])}`,
    });

    // Only what both have read can be compared: the text, not what each wrote after it.
    const pairs = longer.map((_, place) => [on, off].map(({ tokens }) => (tokens[place]?.written ? null : (tokens[place]?.logprob ?? null))));
    const saved = pairs.map(([one, other]) => (one === null || other === null ? null : one - other));
    const known = pairs.filter((_, place) => saved[place] !== null);
    byId("difference").hidden = byId("difference-chart").hidden = known.length === 0;
    if (known.length === 0) return;
    const name = `loss without ${thing} less loss with it: above zero, ${thing} helped (${other(on.about)})`;
    this.difference.show({
      series: [{ kind: "bars", values: saved, className: "saved", name }],
      yName: "saved, nats",
      tell: (place) => named(place) + (saved[place] === null ? ": nothing to compare" : `: ${thing} saved ${nats(saved[place])}`),
    });
    const [best, worst] = [0, 1].map((which) => -mean(known.map((pair) => pair[which])));
    byId("difference").textContent =
      `${helper} ${worst >= best ? "saves" : "costs"} ${Math.abs(worst - best).toFixed(3)} nats per token over the ${tokenCount(known.length)} ` +
      `scored in your text: ${best.toFixed(3)} with it, ${worst.toFixed(3)} without.`;
  }
}
