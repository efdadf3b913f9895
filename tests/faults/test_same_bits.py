"""The same seed, machine and number of threads give the same bits; another number of threads, the same up to rounding."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder

WITHIN = 1e-4
"""How far weights of 200 steps may be apart with another number of threads: sums are taken in another order, and Adam divides small gradients by themselves."""


@pytest.fixture(scope="module")
def trained(byte_store, tmp_path_factory):
    """By number of threads and name: the checkpoint after 200 steps with dropout, in a process of its own."""
    folder = tmp_path_factory.mktemp("bits")
    config = replace(
        SMALL,
        model=replace(SMALL.model, dropout=0.1, attention_dropout=0.1),
        training=replace(SMALL.training, steps=200, learning_rate=1e-3, validate_every=0, save_every=0),
    )
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    made: dict[tuple[int, str], Path] = {}

    def train(threads: int, name: str) -> Path:
        if (threads, name) not in made:
            run = folder / f"{name}-{threads}"
            words = ["train", str(folder / "config.json"), "--data", str(byte_store.folder), "--run", str(run)]
            call(words, threads=threads)
            made[threads, name] = RunFolder(run).checkpoint_at(200)
        return made[threads, name]

    return train


def call(words: list[str], *, threads: int) -> str:
    told = subprocess.run(
        [sys.executable, "-m", "transformer_xl", *words],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout


def digest(folder: Path) -> list[str]:
    files = ("model.safetensors", "training.safetensors")
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files]


def test_200_steps_give_the_same_bits_twice(trained):
    assert digest(trained(1, "first")) == digest(trained(1, "second"))


def test_two_threads_stay_within_rounding_of_one(trained):
    one, two = (load_file(trained(threads, "first") / "model.safetensors") for threads in (1, 2))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < WITHIN


def test_1000_tokens_are_the_same_twice_and_with_other_threads(trained):
    run = trained(1, "first").parent.parent
    words = ["generate", str(run), "--prompt", "def ", "--tokens", "1000", "--seed", "3", "--temperature", "0.9"]
    first, second, other = (call(words, threads=threads) for threads in (1, 1, 2))
    assert first == second == other
    assert len(first) > 500
