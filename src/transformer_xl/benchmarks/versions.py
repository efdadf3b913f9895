"""This version beside another one, in turns: the demo's model writes, evaluates and trains. Both must first write the same texts and find the same loss."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformer_xl
from transformer_xl.benchmarks.children import BenchmarkError, Child, all_ready, cores, spread, take_turns, timed
from transformer_xl.console import progress
from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text
from transformer_xl.errors import ConfigError

HERE = Path(transformer_xl.__file__).parents[1]
STEPS = {"writing": 1500, "writing_16": 300, "evaluation": 40_000, "training": 12}
ROUNDING = 1e-5
"""Nats by which two right versions may differ."""
TINY = {"writing": 20, "writing_16": 5, "evaluation": 500, "training": 2}


@dataclass(frozen=True, kw_only=True)
class VersionRow:
    work: str
    tokens_per_second: float
    before: float
    ratio: float
    ratio_spread: tuple[float, float]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def compare_versions(other: Path, *, rounds: int, scale: str) -> list[VersionRow]:
    """`other`: a checkout of another version."""
    source = other / "src"
    if not (source / "transformer_xl" / "__init__.py").is_file():
        raise ConfigError(
            f"`against=`: {other} is no checkout of this software; make one with: git worktree add {other} COMMIT"
        )
    worker = Path(__file__).with_name("version_worker.py")
    steps = STEPS if scale == "full" else TINY
    with tempfile.TemporaryDirectory(prefix="txl-versions-") as name:
        text, data, run = (Path(name) / part for part in ("text.txt", "store", "run"))
        text.write_bytes(b"".join(path.read_bytes() for path in sorted(HERE.rglob("*.py"))))
        prepare_own_text([text], out=data, settings=OwnText())
        sources = {"here": HERE, "before": source}
        starts = {who: partial(Child, who, worker=worker, source=place) for who, place in sources.items()}
        with all_ready(starts) as versions:
            # Speed does not depend on what it has learned. Made by the other version: what an older one has written, a newer one reads.
            versions["before"].ask("make", run=str(run), data=str(data), layers=2 if scale == "tiny" else 4)
            said = [child.ask("open", run=str(run), data=str(data)) for child in versions.values()]
            if not _same(*said):
                raise BenchmarkError(f"the two versions do not compute the same: {said[0]} here, {said[1]} in {other}")
            rows = []
            with progress("bench versions", total=len(steps) * rounds, unit="rounds") as advance:
                for work, count in steps.items():
                    turns = {who: partial(timed, child, mode=work, steps=count) for who, child in versions.items()}
                    found = take_turns(turns, rounds=rounds, advance=partial(advance, note=work))
                    ratio, least, most = spread(found.ratios("here", "before"))
                    speeds = {who: spread(found.speeds(who))[0] for who in versions}
                    rows.append(
                        VersionRow(
                            work=work.replace("_16", ", 16 lanes"),
                            tokens_per_second=speeds["here"],
                            before=speeds["before"],
                            ratio=ratio,
                            ratio_spread=(least, most),
                        )
                    )
    return rows


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one["texts"] == other["texts"] and abs(one["loss_nats"] - other["loss_nats"]) < ROUNDING)


def machine_in_words() -> str:
    return f"{cores()} cores, medians, ratios within rounds; both wrote the same texts and found the same loss"
