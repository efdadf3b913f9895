"""Table 9: how many times slower a vanilla model is that reads its whole window again for each token. The measuring is `txl bench sliding`'s."""

import time
from collections.abc import Sequence
from itertools import pairwise

from transformer_xl.benchmarks.measuring import Row, measure
from transformer_xl.benchmarks.workloads import PAPER_RATIOS, workloads_of
from transformer_xl.pictures import draw_lines
from transformer_xl.studies.report import Report
from transformer_xl.studies.runs import Setting
from transformer_xl.studies.verdicts import Told, Verdict, compared

ROUNDS = {"tiny": 1, "full": 3}

CAVEATS: dict[str, str] = {
    "tiny": "Tiny shapes: these figures say that the command works, and nothing about speed.",
    "full": "The paper's shapes and lengths on the processor named above, where the paper timed one GPU and does not say how.",
}


def run_speed(setting: Setting) -> Report:
    started_at, bench = time.perf_counter(), setting.scale.bench
    found = measure("sliding", scale=bench, rounds=ROUNDS[bench], against_huggingface=False)
    attention_of = {workload.name: workload.config.memory for workload in workloads_of("sliding", scale=bench)}
    ours = sorted(
        (row for row in found.rows if row.implementation != "window" and row.ratio_to_sliding is not None),
        key=lambda row: attention_of[row.workload],
    )
    windows = {row.workload: row for row in found.rows if row.implementation == "window"}
    lengths = [attention_of[row.workload] for row in ours]
    ratios = [float(row.ratio_to_sliding or 0.0) for row in ours]
    spreads = [row.ratio_to_sliding_spread or (ratio, ratio) for row, ratio in zip(ours, ratios, strict=True)]
    machine = f"{found.machine.processor}, {found.machine.cores} cores, torch {found.machine.torch}"
    rows = [
        {
            "attention length": f"{length:,}",
            "window, ms per token": _milliseconds(windows[row.workload]),
            "memory, ms per token": _milliseconds(row),
            "window slower by": f"{ratio:,.0f}x",
            "range": "{:,.0f}x to {:,.0f}x".format(*spread),
            "paper: window slower by": f"{PAPER_RATIOS[length]:,}x" if length in PAPER_RATIOS else "",
        }
        for row, length, ratio, spread in zip(ours, lengths, ratios, spreads, strict=True)
    ]
    paper = (list(PAPER_RATIOS), list(PAPER_RATIOS.values()), "s--")
    pictures = draw_lines(
        setting.place(".png"),
        {"here": (lengths, ratios, "o-"), "paper, one GPU": paper},
        title="How many times slower a window is than memory",
        x="attention length",
        y="times slower",
        logarithmic=True,
    )
    return Report(
        title="Evaluation speed: a window read anew for each token against memory (the paper's Table 9)",
        corpus=f"Random weights and random tokens: speed does not depend on them. {machine}.",
        caveat=CAVEATS[bench],
        rows=rows,
        claims=[
            Told(
                claim="memory is faster than a window at every length",
                verdict=compared([1.0], [min(low for low, _ in spreads)]),
            ),
            Told(claim="the longer the attention, the more, at every step", verdict=growing(spreads)),
        ],
        notes=(
            "both compute the same: outputs are compared before anything is timed",
            f"rounds: {found.rounds}, in which the two take turns; medians, ratios within rounds",
        ),
        commands=[("Every row", [f"txl bench sliding --scale {bench} --rounds {ROUNDS[bench]}"])],
        pictures=pictures,
        seconds=time.perf_counter() - started_at,
        values={
            "bench": found.as_json(),
            "rows": [
                {"attention": length, "ratio": ratio, "paper": PAPER_RATIOS.get(length)}
                for length, ratio in zip(lengths, ratios, strict=True)
            ],
        },
    )


def growing(spreads: Sequence[tuple[float, float]]) -> Verdict:
    """Whether every range lies above the one before it, some range below, or neither."""
    steps = {compared(shorter, longer) for shorter, longer in pairwise(spreads)}
    return next((verdict for verdict in ("does not appear", "cannot tell") if verdict in steps), "appears")


def _milliseconds(row: Row) -> str:
    value = 1000 / row.tokens_per_second
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
