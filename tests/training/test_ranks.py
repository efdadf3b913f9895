"""Training on two ranks is training on one: real torchrun processes on gloo, from the same words that people type."""

import json
import math
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from small_run import SMALL
from torchrun import (
    RANDOM,
    TORCHRUN,
    checkpoint_of,
    command,
    environment,
    final_bytes,
    launch,
    train_with_killed_ranks,
    wait_for,
)
from transformer_xl.checkpoint import RunFolder, read_training_state
from transformer_xl.cli import main
from transformer_xl.config import EvaluationConfig, RecurrentConfig, RunConfig
from transformer_xl.errors import ConfigError
from transformer_xl.training import train
from transformer_xl.training.ranks import Ranks, only_this_attempt
from transformer_xl.training.recording import read_metrics
from transformer_xl.training.session import Session
from transformer_xl.training.step import take_step

pytestmark = pytest.mark.timeout(900)  # each launch of torchrun loads torch three times


@pytest.fixture(scope="module")
def deterministic(word_config) -> RunConfig:
    """Adaptive softmax whose tails have weights of their own and, in segments this short, often no target on one rank or on both.

    At ten times this rate Adam makes 1e-5 of rounding in one process already, where the gradient of a weight is almost 0.
    """
    return replace(
        word_config,
        model=replace(word_config.model, div_val=2, tie_embeddings=False),
        training=replace(
            word_config.training,
            segment=2,
            lanes=4,
            accumulation=2,
            steps=50,
            learning_rate=3e-4,
            schedule="constant",
            validate_every=0,
            save_every=0,
            log_every=1,
        ),
    )


@pytest.fixture(scope="module")
def one_rank(deterministic, word_store, tmp_path_factory, without_pictures) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train(deterministic, store=word_store, folder=folder)
    return folder


def recorded(folder: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def assert_close(folder: Path, other: Path, *, within: float = 1e-5) -> None:
    """The same losses and norms step by step, and the same files: names, shapes, and numbers up to rounding."""
    assert recorded(folder, "loss_nats") == pytest.approx(recorded(other, "loss_nats"), abs=within)
    assert recorded(folder, "gradient_norm") == pytest.approx(recorded(other, "gradient_norm"), rel=1e-4)
    for file in ("model.safetensors", "training.safetensors"):
        mine, theirs = load_file(checkpoint_of(folder) / file), load_file(checkpoint_of(other) / file)
        names = [name for name in theirs if not name.startswith("random.")]
        assert names == [name for name in mine if not name.startswith("random.")]
        for name in names:
            torch.testing.assert_close(
                mine[name], theirs[name], rtol=0, atol=within, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_the_comparison_covers_what_it_should(deterministic, word_store, one_rank):
    """Clipping is active, tails lack targets for one rank and for all, and the weights moved."""
    lines = [line for line in read_metrics(one_rank / "metrics.jsonl") if line["kind"] == "train"]
    assert len(lines) == 50
    assert all(line["gradient_norm"] > deterministic.training.clip for line in lines)
    session = Session.fresh(deterministic, store=word_store, device=torch.device("cpu"))
    edges, unused = deterministic.model.cluster_edges, set()
    for _ in range(50):
        targets = session.lanes.next().targets
        for low, high in pairwise(edges[1:]):
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


@pytest.fixture(scope="module")
def uninterrupted(byte_store, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    answer = launch(RANDOM, byte_store, folder)
    assert answer.returncode == 0, answer.stderr
    return folder


def test_each_rank_draws_its_own_dropout(uninterrupted):
    state = load_file(checkpoint_of(uninterrupted) / "training.safetensors")
    assert not torch.equal(state["random.cpu"], state["random.cpu.1"])


@pytest.mark.parametrize("second", [[0, 1], [1, 0]])
def test_what_a_dead_attempt_left_in_the_store_is_not_taken_for_the_living(second, tmp_path):
    def addresses_found(arriving: list[int], attempt: str) -> dict[int, str]:
        """Two ranks arrive one after the other; each leaves its address and asks for the other's."""
        found: dict[int, str] = {}

        def arrive(rank: int) -> None:
            store = only_this_attempt(dist.FileStore(str(tmp_path / "store"), -1), rank=rank, count=2)
            store.set(f"address of {rank}", f"{rank} in the {attempt}")
            found[rank] = store.get(f"address of {1 - rank}").decode()

        threads = [threading.Thread(target=arrive, args=(rank,), daemon=True) for rank in arriving]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join(timeout=20)
        return found

    assert addresses_found([0, 1], "first") == {0: "1 in the first", 1: "0 in the first"}
    assert addresses_found(second, "second") == {0: "1 in the second", 1: "0 in the second"}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks' processes in /proc")
def test_after_a_killed_rank_torchrun_goes_on_to_the_same_bits(byte_store, uninterrupted, tmp_path):
    resumes = train_with_killed_ranks(byte_store, tmp_path / "run", ranks=[1, 0])
    assert len(resumes) == 2
    assert 0 < resumes[0] < resumes[1] < RANDOM.training.steps
    assert final_bytes(tmp_path / "run") == final_bytes(uninterrupted)


def test_sigterm_saves_once_and_the_same_command_goes_on_to_the_same_bits(byte_store, uninterrupted, tmp_path):
    folder, said = tmp_path / "run", tmp_path / "said"
    with (
        said.open("w") as stderr,
        subprocess.Popen(
            [*TORCHRUN, "-m", "--", *command(RANDOM, byte_store, folder)], env=environment(), stderr=stderr
        ) as process,
    ):
        wait_for(RunFolder(folder).steps, process, said)
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert said.read_text().count("stopped at step") == 1
    stopped_at = RunFolder(folder).steps()[-1]
    assert f"stopped at step {stopped_at} and saved" in said.read_text()
    assert stopped_at < 120
    answer = launch(RANDOM, byte_store, folder)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count(f"going on from step {stopped_at}") == 1
    assert final_bytes(folder) == final_bytes(uninterrupted)


def test_recurrent_models_train_on_two_ranks(byte_store, tmp_path):
    config = replace(
        SMALL,
        model=RecurrentConfig(vocabulary=256, cell="lstm", n_layer=2, d_model=16, d_hidden=20),
        training=replace(SMALL.training, log_every=1, validate_every=0, save_every=0),
        evaluation=EvaluationConfig(segment=12),
    )
    answer = launch(config, byte_store, tmp_path / "two")
    assert answer.returncode == 0, answer.stderr
    train(config, store=byte_store, folder=tmp_path / "one")
    assert_close(tmp_path / "two", tmp_path / "one")
    with pytest.raises(ConfigError, match="train a recurrent model with `parallel=ddp`"):
        Ranks(count=2, parallel="fsdp").check(config)


def test_ranks_end_together_by_the_clock_of_the_first(byte_store, tmp_path):
    config = replace(RANDOM, training=replace(RANDOM.training, minutes=0.1, save_minutes=1e-4, save_every=0))
    answer = launch(config, byte_store, tmp_path / "run")
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count("steps fit into 0.1 minutes") == 1
    state = read_training_state(checkpoint_of(tmp_path / "run")).counters
    assert (
        state.timetable.spent <= 12
    )  # of 6: what starts and saves beside hundreds of other processes may take seconds
    assert state.step > 1
    assert len(RunFolder(tmp_path / "run").steps()) > 1  # saved on the way, by the clock alone


def test_lanes_that_cannot_be_dealt_are_one_sentence(byte_store, tmp_path):
    config = replace(SMALL, training=replace(SMALL.training, lanes=6, accumulation=2))
    answer = launch(config, byte_store, tmp_path / "run")
    assert answer.returncode != 0
    sentence = (
        "txl: training.lanes: 6 lanes cannot be dealt to 2 ranks in 2 micro-batches each; make it a multiple of 4"
    )
    assert answer.stderr.count(sentence) == 1
    assert answer.stderr.count("txl: ") == 1
    assert "exitcode  : 2 " in answer.stderr
    assert not (tmp_path / "run").exists()


def test_several_ranks_are_asked_for_by_torchrun(byte_store, capsys):
    assert main(["train", "demo", "--data", str(byte_store.folder), "--run", "x", "--parallel", "fsdp"]) == 2
    assert "start them with: torchrun --nproc-per-node N" in capsys.readouterr().err


@pytest.mark.parametrize("late", [False, True])
def test_what_is_not_finite_on_another_rank_is_skipped_here_too(late, byte_store):
    class TwoRanks(Ranks):
        def carried(self, wrapped, numbers):
            return numbers + math.nan

    session = Session.fresh(SMALL, store=byte_store, device=torch.device("cpu"))
    session.ranks, session.late = TwoRanks(), late
    before = torch.nn.utils.parameters_to_vector(session.model.parameters()).clone()
    assert not take_step(session, session.lanes.next()).taken
    assert session.memories == [None] or not any(layer.any() for layer in session.memories[0].layers)
    assert torch.equal(before, torch.nn.utils.parameters_to_vector(session.model.parameters()))


def test_an_adapter_is_trained_by_two_ranks_as_by_one(trained_run, byte_store, tmp_path):
    begin = ["train", "--from", str(trained_run), "--adapter", "rank=3", "--data", str(byte_store.folder)]
    begin += ["--training.steps", "8", "--training.log_every", "1", "--training.validate_every", "0", "--run"]
    assert main([*begin, str(tmp_path / "one")]) == 0
    words = [*TORCHRUN, "-m", "--", "transformer_xl", *begin]
    done = subprocess.run([*words, str(tmp_path / "two")], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_close(tmp_path / "two", tmp_path / "one")
    assert (
        load_file(tmp_path / "two" / "adapter.safetensors").keys()
        == load_file(tmp_path / "one" / "adapter.safetensors").keys()
    )
    assert "text.txt valid: " in done.stdout
    refused = [*words, str(tmp_path / "three"), "--parallel", "fsdp"]
    done = subprocess.run(refused, env=environment(), capture_output=True, text=True)
    assert "train it with --parallel ddp" in done.stderr


def test_layers_gathered_in_half_precision(tmp_path):
    """fsdp's policy as cards have it: bfloat16 travels and multiplies, gradients and the sum that layers add to are float32."""
    script, out = Path(__file__).with_name("half_shards.py"), tmp_path / "found.json"
    path = {"PYTHONPATH": f"{script.parents[1]}:{environment().get('PYTHONPATH', '')}"}
    subprocess.run([*TORCHRUN, str(script), str(out)], check=True, env={**environment(), **path}, timeout=300)
    found = json.loads(out.read_text())
    assert found["types"] == ["torch.bfloat16"]
    assert found["residual"] == "torch.float32"
    whole, sharded = found["losses"]
    assert math.isclose(whole, sharded, rel_tol=2e-3)
    assert found["off"] < 0.03
