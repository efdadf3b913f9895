"""A long time: memory stays flat and no file stays open, in training and in generation. Slow; each writes down what it saw."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from small_run import SMALL
from transformer_xl.checkpoint import load_checkpoint
from transformer_xl.decoding import Sampling, generate
from transformer_xl.training import loop, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc"),
]
STEPS, TOKENS = 20_000, 1_000_000
WARM = 0.1
"""The share after which everything there is to load is loaded."""


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in status if line.startswith("VmRSS"))


def open_files() -> int:
    """But for the log of TensorBoard, which its own thread opens for every line and closes again."""
    return sum("tfevents" not in where for where in map(target, os.listdir("/proc/self/fd")) if where)


def target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # closed since it was listed, as the list's own is
        return ""


class Watch:
    """Looks once after the warm part, and often from then on."""

    def __init__(self, total: int) -> None:
        self.warm, self.often = int(total * WARM), total // 100
        self.memory_mb: list[float] = []
        self.files: list[int] = []

    def look(self, done: int) -> None:
        if done >= self.warm and done % self.often == 0:
            self.memory_mb.append(resident_mb())
            self.files.append(open_files())

    def check(self, what: str) -> None:
        first, last, most = self.memory_mb[0], self.memory_mb[-1], max(self.memory_mb)
        print(
            f"{what}: {first:.1f} MB after a tenth, {last:.1f} MB at the end, {most:.1f} at most; files {set(self.files)}"
        )
        assert len(self.memory_mb) > 80
        assert last < 1.02 * first
        assert len(set(self.files)) == 1


def test_twenty_thousand_steps(byte_store, tmp_path, monkeypatch, without_pictures):
    watch, take_step = Watch(STEPS), loop.take_step

    def watched(session, segment):
        watch.look(session.step)
        return take_step(session, segment)

    monkeypatch.setattr(loop, "take_step", watched)
    config = replace(
        SMALL,
        model=replace(SMALL.model, dropout=0.1),
        training=replace(SMALL.training, steps=STEPS, validate_every=1000, save_every=1000, log_every=100),
    )
    assert train(config, store=byte_store, folder=tmp_path / "run").step == STEPS
    watch.check(f"{STEPS:,} steps")


def test_a_million_tokens(trained_run):
    watch, checkpoint = Watch(TOKENS), load_checkpoint(trained_run)
    drawn = generate(checkpoint.model, [1], tokens=TOKENS, sampling=Sampling(seed=0, top_k=40))
    for number in itertools.count(1):
        if next(drawn, None) is None:
            break
        watch.look(number)
    assert number == TOKENS + 1
    watch.check(f"{TOKENS:,} tokens")
