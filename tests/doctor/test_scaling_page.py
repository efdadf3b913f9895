"""The hours and gigabytes of docs/scaling.md are what the arithmetic says today."""

import re
from pathlib import Path

import pytest

from transformer_xl.config import RunConfig
from transformer_xl.doctor.speed import STATED, operations
from transformer_xl.presets import find_preset
from transformer_xl.training.footprint import footprint_of

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
CAUTIOUS, HOPEFUL = (0.16, 0.09), 0.48
"""Shares of an A100's peak: what NVIDIA's code reaches on it, and what ours reaches of a processor's."""
GPUS = (1, 4, 8, 64)
MOST = {"enwik8-12l": 8, "wikitext-103-standard": 8, "ptb": 1}
"""What the lanes of a small one are dealt to at most."""
PRESETS = ("enwik8-12l", "enwik8-18l", "enwik8-24l", "wikitext-103-standard", "wikitext-103-large", "lm1b-base")
PRESETS += ("lm1b-large", "ptb")


def hours(run: RunConfig, *, gpus: int, share: float) -> str:
    found = operations(run) * run.training.steps / gpus / (share * STATED["A100"]) / 3600
    return f"{found:,.0f}" if found >= 10 else f"{found:.1f}"


def times(name: str) -> list[str]:
    run = find_preset(name).run
    cells = [f"{operations(run) / 1e12:.1f} T", f"{run.training.steps:,}"]
    for gpus in GPUS:
        if gpus > MOST.get(name, 64):
            cells.append("")
            continue
        fast, slow, best = (hours(run, gpus=gpus, share=share) for share in (*CAUTIOUS, HOPEFUL))
        cells.append(f"{fast} to {slow} h; {best}")
    return cells


def gigabytes(name: str) -> list[str]:
    run, cells = find_preset(name).run, []
    for gpus in GPUS:
        if gpus > MOST.get(name, 64):
            cells.append("")
            continue
        ways = [(False, "ddp"), (True, "ddp"), (True, "fsdp")][: 2 if gpus == 1 else 3]
        found = [
            footprint_of(run, devices=gpus, recompute=recompute, parallel=parallel, by="triton").total
            for recompute, parallel in ways
        ]
        cells.append(" / ".join(f"{one / 1e9:.1f}" for one in found))
    return cells


def shown() -> dict[str, list[list[str]]]:
    """The rows of the page's tables, by their first cell."""
    rows: dict[str, list[list[str]]] = {}
    for line in re.findall(r"^\|(.+)\|$", PAGE, re.MULTILINE):
        first, *cells = (cell.strip() for cell in line.split("|"))
        rows.setdefault(first, []).append(cells)
    return rows


@pytest.mark.parametrize("name", PRESETS)
def test_hours_and_gigabytes_are_those_of_the_arithmetic(name):
    assert times(name) in shown()[name], f"| {name} | {' | '.join(times(name))} |"
    assert gigabytes(name) in shown()[name], f"| {name} | {' | '.join(gigabytes(name))} |"
