"""A run that learns nothing says so, with the way out; who may, begins again by itself."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder, Window
from transformer_xl.config import TrainingConfig
from transformer_xl.training import train, train_unstuck
from transformer_xl.training.loop import TRIES
from transformer_xl.training.recording import read_metrics
from transformer_xl.training.session import Session
from transformer_xl.training.stuck import Frequencies, TrainingStuck, find_stuck, lowered

STUCK = replace(SMALL, training=replace(SMALL.training, steps=130, warm_up=0, log_every=10, learning_rate=1e-9))
"""A rate at which nothing can be learned. The bias starts at 0, so even frequencies are not."""


def test_frequencies_cost_what_their_entropy_says(byte_store):
    split = byte_store.split("train")
    counts = np.bincount(split.tokens, minlength=256)
    share = counts[counts > 0] / counts.sum()
    entropy = -(share * np.log(share)).sum()
    tokens = split.tokens[:].astype(np.int64)
    assert Frequencies(split, vocabulary=256).nats(tokens) / len(tokens) == pytest.approx(entropy, rel=2e-3)
    assert Frequencies(split, vocabulary=256).nats(np.array([[-1, -1]])) == 0.0


def test_only_a_loss_near_the_frequencies_after_warm_up_is_stuck():
    training = TrainingConfig(steps=1000, warm_up=50)
    near, left = Window(nats=98.0, tokens=20, frequency_nats=100.0), Window(nats=90.0, tokens=20, frequency_nats=100.0)
    assert find_stuck(near, training, step=149) is None
    assert find_stuck(left, training, step=500) is None
    assert find_stuck(Window(), training, step=500) is None
    found = find_stuck(near, training, step=150)
    assert found is not None
    assert found.early
    assert "training.learning_rate 8.3e-05 (it is 0.00025)" in str(found)
    late = find_stuck(near, training, step=400)
    assert late is not None
    assert not late.early


def test_it_is_said_once_and_the_run_goes_on(byte_store, tmp_path, capsys):
    train(STUCK, store=byte_store, folder=tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("nothing else has been learned") == 1
    assert "model.norm pre" in said
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert all(2 < line["frequency_nats"] < math.log(256) for line in lines)


def test_a_model_that_learns_is_not_accused(byte_store, tmp_path, capsys):
    training = replace(SMALL.training, steps=300, lanes=16, warm_up=10, log_every=100, validate_every=0, save_every=0)
    config = replace(SMALL, model=replace(SMALL.model, norm="pre"), training=training)
    train(config, store=byte_store, folder=tmp_path / "run")
    assert "nothing else" not in capsys.readouterr().err


def test_stopping_for_it_is_an_error_of_ours(byte_store, tmp_path):
    with pytest.raises(TrainingStuck, match="nothing else has been learned"):
        train(STUCK, store=byte_store, folder=tmp_path / "run", stuck="stop")


def test_who_may_begins_again_with_a_lower_rate(byte_store, tmp_path, capsys):
    """It can only be seen to try: a rate that was too low is no better for being lower."""
    config = replace(STUCK, training=replace(STUCK.training, save_every=20))
    outcome = train_unstuck(config, store=byte_store, folder=tmp_path / "run")
    assert outcome.step == 130
    assert capsys.readouterr().err.count("; doing so") == TRIES - 1
    run = RunFolder(tmp_path / "run")
    assert run.steps()[-1] == 130
    metrics = [line["step"] for line in read_metrics(run.metrics) if line["kind"] == "train"]
    assert metrics == sorted(set(metrics))


def test_a_lower_rate_warms_up_longer():
    training = lowered(TrainingConfig(steps=400, learning_rate=3e-3, warm_up=60))
    assert training.learning_rate == pytest.approx(1e-3)
    assert training.warm_up == 100
    assert lowered(TrainingConfig(steps=400, warm_up=300)).warm_up == 300


def test_a_window_that_was_saved_before_it_was_counted_is_read(byte_store):
    session = Session.fresh(SMALL, store=byte_store, device=torch.device("cpu"))
    saved = session.state().counters.to_json()
    del saved["window"]["frequency_nats"]
    assert type(session.state().counters).from_json(saved, path=byte_store.folder).window.frequency_nats == 0.0
