"""Training on two ranks is training on one: real torchrun processes on gloo, from the same words that people type."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.cli import main
from transformer_xl.config import EvaluationConfig, RecurrentConfig, RunConfig
from transformer_xl.data.store import Store
from transformer_xl.training import loop, train
from transformer_xl.training.recording import read_metrics
from transformer_xl.training.session import Session

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def deterministic(word_config) -> RunConfig:
    """Adaptive softmax whose tails have weights of their own and, in segments this short, often no target on one rank or on both."""
    return replace(
        word_config,
        model=replace(word_config.model, div_val=2, tie_embeddings=False),
        training=replace(
            word_config.training,
            segment=2,
            lanes=4,
            accumulation=2,
            steps=50,
            learning_rate=3e-3,
            schedule="constant",
            validate_every=0,
            save_every=0,
            log_every=1,
        ),
    )


@pytest.fixture(scope="module")
def one_rank(deterministic, word_store, tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curve", lambda run, unit: None)
        folder = tmp_path_factory.mktemp("one") / "run"
        train(deterministic, store=word_store, folder=folder)
    return folder


def command(config: RunConfig, store: Store, folder: Path, *more: str) -> list[str]:
    file = folder.parent / f"{folder.name}.json"
    file.write_text(json.dumps(asdict(config)))
    return ["transformer_xl", "train", str(file), "--data", str(store.folder), "--run", str(folder), *more]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def launch(*words, launcher: list[str] = TORCHRUN) -> subprocess.CompletedProcess:
    together = [*launcher, "-m", "--", *command(*words)] if launcher is TORCHRUN else [*launcher, *command(*words)]
    return subprocess.run(together, env=environment(), capture_output=True, text=True)


def checkpoint_of(folder: Path) -> Path:
    run = RunFolder(folder)
    return run.checkpoint_at(run.steps()[-1])


def losses(folder: Path) -> list[float]:
    return [line["loss_nats"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def assert_close(folder: Path, other: Path, *, within: float = 1e-5) -> None:
    """The same losses step by step, and the same files: names, shapes, and numbers up to rounding."""
    assert losses(folder) == pytest.approx(losses(other), abs=within)
    for file in ("model.safetensors", "training.safetensors"):
        mine, theirs = load_file(checkpoint_of(folder) / file), load_file(checkpoint_of(other) / file)
        names = [name for name in theirs if not name.startswith("random.")]
        assert names == [name for name in mine if not name.startswith("random.")]
        for name in names:
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=within, msg=name)


def final_bytes(folder: Path) -> list[bytes]:
    return [(checkpoint_of(folder) / name).read_bytes() for name in ("model.safetensors", "training.safetensors")]


def test_the_comparison_covers_what_it_should(deterministic, word_store, one_rank):
    """Clipping is active, tails lack targets for one rank and for all, and the weights moved."""
    lines = [line for line in read_metrics(one_rank / "metrics.jsonl") if line["kind"] == "train"]
    assert len(lines) == 50
    assert all(line["gradient_norm"] > deterministic.training.clip for line in lines)
    session = Session.fresh(deterministic, store=word_store, device=torch.device("cpu"))
    edges, unused = deterministic.model.cluster_edges, set()
    for _ in range(50):
        targets = session.lanes.next().targets
        for low, high in zip(edges[1:], edges[2:], strict=False):
            there = ((targets >= low) & (targets < high)).any(1)
            unused.add((bool(there[:2].any()), bool(there[2:].any())))
    assert unused == {(False, False), (False, True), (True, False), (True, True)}
    weights = load_file(checkpoint_of(one_rank) / "model.safetensors")
    fresh = session.model.state_dict()
    assert all(not torch.equal(weights[name], fresh[name]) for name in weights)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_are_one(parallel, deterministic, word_store, one_rank, tmp_path):
    answer = launch(deterministic, word_store, tmp_path / "run", "--parallel", parallel)
    assert answer.returncode == 0, answer.stderr
    assert_close(tmp_path / "run", one_rank)
    assert answer.stdout.count("trained to step 50") == 1
    assert answer.stderr.count("step 50: valid perplexity") == 1
    assert "arning" not in answer.stderr
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (facts["ranks"], facts["parallel"]) == (2, parallel)
    assert facts["command"].startswith("torchrun --nproc-per-node 2 -m -- transformer_xl train ")
    validation, expected = (
        next(line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "validation")
        for folder in (tmp_path / "run", one_rank)
    )
    assert validation["loss_nats"] == pytest.approx(expected["loss_nats"], abs=1e-5)


def test_two_ranks_then_one_then_two_go_on_alike(deterministic, word_store, one_rank, tmp_path):
    def until(steps):
        return replace(deterministic, training=replace(deterministic.training, steps=steps))

    folder = tmp_path / "run"
    answer = launch(until(15), word_store, folder, "--parallel", "fsdp")
    assert answer.returncode == 0, answer.stderr
    answer = launch(until(30), word_store, folder, launcher=[sys.executable, "-m"])
    assert answer.returncode == 0, answer.stderr
    assert "going on with 1 rank where 2 saved" in answer.stderr
    answer = launch(until(50), word_store, folder)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count("going on with 2 ranks where 1 saved") == 1
    assert_close(folder, one_rank)
