"""Training learns, records, keeps what it should, and lets nothing in that is not finite."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder, load_checkpoint
from transformer_xl.config import TrainingConfig
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.training import loop, train
from transformer_xl.training.optimisation import Average, learning_rate
from transformer_xl.training.recording import read_metrics
from transformer_xl.training.reporting import TrainingStopped
from transformer_xl.training.session import Session
from transformer_xl.training.step import forgetting_documents, take_step


def test_a_run_is_a_folder_always_the_same(trained_run):
    names = {path.name for path in trained_run.iterdir()}
    assert {
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "README.md",
        "tensorboard",
        "checkpoints",
        "samples",
        "figures",
    } <= names
    assert "txl train small" in (trained_run / "README.md").read_text()
    assert json.loads((trained_run / "environment.json").read_text())["torch"] == torch.__version__
    assert (trained_run / "figures" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_it_learns(byte_store, tmp_path):
    config = replace(SMALL, training=replace(SMALL.training, steps=120, validate_every=0, save_every=0))
    train(config, store=byte_store, folder=tmp_path / "run")
    losses = [line["loss_nats"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert losses[0] > 5.0
    assert losses[-1] < losses[0] - 1.5


def test_last_and_best_are_kept_and_older_ones_go(byte_store, tmp_path):
    config = replace(SMALL, training=replace(SMALL.training, steps=25, save_every=3, validate_every=0))
    train(config, store=byte_store, folder=tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert run.steps() == [24, 25]
    assert run.best_step() == 25
    assert json.loads((run.checkpoint_at(25) / "training.json").read_text())["step"] == 25


def test_accumulation_gives_the_gradients_of_the_whole_batch(byte_store):
    """Each micro-batch owns its lanes and memory, so two halves are the whole."""
    sessions = []
    for parts in (1, 2, 4):
        config = replace(
            SMALL, training=replace(SMALL.training, accumulation=parts, optimiser="sgd", learning_rate=0.5)
        )
        session = Session.fresh(config, store=byte_store, device=torch.device("cpu"))
        session.model.double()
        for _ in range(4):
            take_step(session, session.lanes.next())
            session.step += 1
        sessions.append(session)
    for other in sessions[1:]:
        for (name, mine), theirs in zip(sessions[0].model.named_parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_recomputed_layers_give_the_same_gradients(byte_store):
    weights = []
    for recompute in (False, True):
        model = replace(SMALL.model, dropout=0.3)
        config = replace(SMALL, model=model, training=replace(SMALL.training, checkpoint_activations=recompute))
        session = Session.fresh(config, store=byte_store, device=torch.device("cpu"))
        for _ in range(3):
            take_step(session, session.lanes.next())
            session.step += 1
        weights.append(nn.utils.parameters_to_vector(session.model.parameters()))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_half_loss_scores_every_token_after_the_first_context_once(byte_store):
    config = replace(SMALL, training=replace(SMALL.training, segment=6, context=6))
    session = Session.fresh(config, store=byte_store, device=torch.device("cpu"))
    for number in range(4):
        segment = session.lanes.next()
        assert segment.tokens.shape[1] == (6 if number == 0 else 12)
        take_step(session, segment)
        assert session.memories[0].length == min(12, 6 * number)  # what will be fed again is not yet memory


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("step", [1, 5])
def test_nothing_that_is_not_finite_reaches_the_weights(where, step, byte_store, tmp_path, monkeypatch):
    before = poison(monkeypatch, where=where, at=step)
    with pytest.raises(TrainingStopped, match=rf"{where} of step {step} is not finite"):
        train(SMALL, store=byte_store, folder=tmp_path / "run")
    session = before["session"]
    assert torch.equal(before["weights"], nn.utils.parameters_to_vector(session.model.parameters()))
    assert before["weights"].isfinite().all()


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_skipping_counts_and_goes_on(where, byte_store, tmp_path, monkeypatch):
    poison(monkeypatch, where=where, at=3)
    config = replace(SMALL, training=replace(SMALL.training, non_finite="skip"))
    outcome = train(config, store=byte_store, folder=tmp_path / "run")
    assert outcome.step == 20
    checkpoint = load_checkpoint(tmp_path / "run")
    assert all(parameter.isfinite().all() for parameter in checkpoint.model.parameters())
    assert json.loads((checkpoint.folder / "training.json").read_text())["skipped"] == 1


def poison(monkeypatch, *, where, at):
    """Makes the loss, or one gradient alone, NaN in update number `at`; remembers the weights just before it."""
    take_step, seen = loop.take_step, {}

    def poisoned(session, segment):
        if session.step + 1 != at:
            return take_step(session, segment)
        seen.update(session=session, weights=nn.utils.parameters_to_vector(session.model.parameters()).detach().clone())
        if where == "loss":
            forward = session.model.vocabulary.loss
            with monkeypatch.context() as patch:
                patch.setattr(session.model.vocabulary, "loss", lambda *a, **more: forward(*a, **more) * math.nan)
                return take_step(session, segment)
        hook = session.model.vocabulary.bias_V.register_hook(lambda gradient: gradient * math.nan)
        try:
            return take_step(session, segment)
        finally:
            hook.remove()

    monkeypatch.setattr(loop, "take_step", poisoned)
    return seen


@pytest.mark.processes
def test_a_second_trainer_is_refused_and_a_dead_ones_lock_is_no_hindrance(byte_store, tmp_path):
    folder = tmp_path / "run"
    holder = (
        "import sys, time; from transformer_xl.checkpoint import RunFolder; from transformer_xl.training.lifetime import only_trainer\n"
        f"with only_trainer(RunFolder({str(folder)!r})): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"is being trained by process {process.pid}"):
            train(SMALL, store=byte_store, folder=folder)
        process.kill()
    assert train(SMALL, store=byte_store, folder=folder).step == 20


def test_published_schedules():
    """The two published rules, at the places where they differ."""
    pytorch = TrainingConfig(steps=100, warm_up=10, learning_rate=1.0)
    assert [learning_rate(pytorch, update=n) for n in (0, 1, 5)] == pytest.approx([1.0, 0.1, 0.5])
    assert learning_rate(pytorch, update=50) == pytest.approx(0.5)
    assert learning_rate(pytorch, update=10) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.1)))
    tensorflow = replace(pytorch, schedule_rule="tensorflow", floor=0.004)
    assert [learning_rate(tensorflow, update=n) for n in (0, 1, 10)] == pytest.approx([0.0, 0.1, 1.0])
    assert learning_rate(tensorflow, update=55) == pytest.approx(0.004 + 0.996 * 0.5)
    assert learning_rate(tensorflow, update=100) == pytest.approx(0.004)
    assert learning_rate(replace(pytorch, schedule="inverse_square_root"), update=40) == pytest.approx(0.5)
    assert learning_rate(replace(pytorch, schedule="constant"), update=99) == 1.0


@pytest.mark.parametrize("kind", ["uniform", "ema"])
def test_averages(kind):
    torch.manual_seed(0)
    layer = nn.Linear(2, 1)
    average = Average(TrainingConfig(average=kind, average_decay=0.75, average_from=2))
    history = []
    for step in range(1, 7):
        with torch.no_grad():
            layer.weight.normal_()
        average.update(layer, step=step)
        history.append(layer.weight.detach().clone())
    used = history[2:]
    if kind == "uniform":
        expected = torch.stack(used).mean(0)
    else:
        expected = used[0]
        for value in used[1:]:
            expected = 0.75 * expected + 0.25 * value
    torch.testing.assert_close(average.weights["weight"], expected)
    now = layer.weight.detach().clone()
    with average.in_place(layer):
        torch.testing.assert_close(layer.weight.detach(), expected)
    assert torch.equal(layer.weight, now)


def test_documents_end_memory(byte_store):
    training = replace(SMALL.training, reset_memory_at_documents=True)
    session = Session.fresh(replace(SMALL, training=training), store=byte_store, device=torch.device("cpu"))
    memory = session.model(torch.zeros(3, 12, dtype=torch.int64)).memory
    starts = np.zeros((3, 12), dtype=bool)
    starts[1, 4] = starts[1, 9] = starts[2, 0] = True
    assert forgetting_documents(memory, starts, training).valid_B.tolist() == [12, 3, 12]
    assert forgetting_documents(memory, starts, SMALL.training).valid_B.tolist() == [12, 12, 12]


def test_bf16_trains(byte_store, tmp_path):
    config = replace(SMALL, training=replace(SMALL.training, precision="bfloat16"))
    assert math.isfinite(train(config, store=byte_store, folder=tmp_path / "run").validation.figures.loss_nats)


def test_word_models_train_with_adaptive_softmax(word_store, word_config, tmp_path):
    outcome = train(word_config, store=word_store, folder=tmp_path / "run")
    assert outcome.validation.figures.perplexity < word_store.manifest.vocabulary_size


def test_auxiliary_losses_train(byte_store, tmp_path):
    model = replace(
        SMALL.model, memory=0, encoding="per_layer", learned_positions=16, auxiliary_layers=True, auxiliary_targets=1
    )
    config = replace(SMALL, model=model, evaluation=replace(SMALL.evaluation, memory=0))
    assert train(config, store=byte_store, folder=tmp_path / "run").step == 20


def test_disk_full_keeps_the_last_checkpoint(byte_store, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    train(SMALL, store=byte_store, folder=folder)
    before = {path: path.read_bytes() for path in RunFolder(folder).checkpoint_at(20).rglob("*") if path.is_file()}

    def full(*arguments, **options):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr("transformer_xl.checkpoint.folder.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        train(replace(SMALL, training=replace(SMALL.training, steps=24)), store=byte_store, folder=folder)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert RunFolder(folder).steps() == [10, 20]
    assert not list(RunFolder(folder).checkpoints.glob(".txl-partial-*"))


def test_half_precision_names(byte_store):
    with pytest.raises(ConfigError, match=r"training.precision: 'fp16' is unknown"):
        TrainingConfig(precision="fp16")
