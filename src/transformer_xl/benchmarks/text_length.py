"""Does a long text slow its own continuation down? Time per token and memory while one text grows, as a plot."""

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from transformer_xl.benchmarks.children import ready_children, timed
from transformer_xl.benchmarks.measuring import model_folder
from transformer_xl.benchmarks.workloads import Scale, Workload, workloads_of
from transformer_xl.config import ModelConfig
from transformer_xl.console import progress
from transformer_xl.errors import ConfigError
from transformer_xl.pictures import picture

DEFAULT_TOKENS = 200_000
POINTS = 200


@dataclass(frozen=True, kw_only=True)
class Point:
    tokens: int
    """Length of the text so far."""
    ms_per_token: float
    memory_mb: float


def shape(scale: Scale) -> ModelConfig:
    """A small model, so that a long text takes minutes: what the time per token depends on does not depend on its size."""
    tiny = workloads_of("generation", scale="tiny")[0].config
    small = replace(tiny, n_layer=4, d_model=256, n_head=4, d_head=64, d_inner=1024, memory=512, clamp_len=400)
    return small if scale == "full" else tiny


def follow(*, tokens: int, scale: Scale) -> list[Point]:
    """One engine generates a text of so many tokens; a point for each of up to two hundred equal parts."""
    if tokens < 2:
        raise ConfigError(f"`tokens=`: a text of {tokens} tokens has no beginning and end to compare; take at least 2")
    config = shape(scale)
    workload = Workload(name="text length", kind="generation", config=config)
    text = random.Random(0).choices(range(config.vocabulary), k=config.memory)
    step, points = math.ceil(tokens / POINTS), []
    with (
        ready_children({}, names={"exact": "exact"}) as processes,
        model_folder(workload) as folder,
        progress("generating", total=tokens, unit="tokens") as advance,
    ):
        child = processes["exact"]
        child.ask("open", folder=str(folder), lanes=1, top_k=0, segment=1, vocabulary=config.vocabulary, text=text)
        timed(child, mode="generation", steps=1)
        for start in range(0, tokens, step):
            run = timed(child, mode="generation", steps=min(step, tokens - start))
            milliseconds = 1000 * run.seconds / run.tokens
            points.append(Point(tokens=start + run.tokens, ms_per_token=milliseconds, memory_mb=run.memory_mb))
            advance(run.tokens, note=f"{milliseconds:.3f} ms per token, {run.memory_mb:.0f} MB")
    return points


def flatness(points: list[Point]) -> dict[str, float]:
    """Medians of the first and of the last tenth."""
    tenth = math.ceil(len(points) / 10)
    found = {}
    for name in ("ms_per_token", "memory_mb"):
        for place, part in (("first", points[:tenth]), ("last", points[-tenth:])):
            found[f"{name}_{place}"] = median(getattr(point, name) for point in part)
    return found


def follow_and_draw(path: Path, *, tokens: int, scale: Scale) -> list[Point]:
    config = shape(scale)
    title = f"Generation as the text grows ({config.n_layer} layers of {config.d_model}, memory {config.memory})"
    with picture(path, title=title) as axes:  # opened first: a name that cannot be drawn to is refused before the wait
        points = follow(tokens=tokens, scale=scale)
        length = [point.tokens for point in points]
        axes.plot(length, [point.ms_per_token for point in points], color="tab:blue", label="ms per token (left)")
        axes.set_ylim(0, 1.3 * max(point.ms_per_token for point in points))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("tokens of text so far")
        axes.set_ylabel("ms per token")
        memory = axes.twinx()
        memory.plot(length, [point.memory_mb for point in points], color="tab:orange", label="memory (right)")
        memory.set_ylim(0, 1.1 * max(point.memory_mb for point in points))
        memory.set_ylabel("memory of the process, MB")
        axes.legend(handles=[*axes.get_lines(), *memory.get_lines()], loc="lower right")
    return points
