"""Thousands of changed files of our own through the doors that everybody uses: each is refused in one sentence that names the file, or does its work.

Checksums find most of it first, so most cases have theirs made anew, as somebody would who means harm or edits a file by hand.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from campaign import run_campaign

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import EvaluationConfig, RecurrentConfig, RunConfig
from transformer_xl.training import train

BATCHES = 4
THOUSANDS = {"weights": 20_000, "tables": 10_000}
ENGINES, STATES = 5_000, 2_000


@pytest.fixture(scope="module")
def kinds_of_runs(byte_store, tmp_path_factory, without_pictures) -> list[Path]:
    """Short runs that together have every part a training state can have."""
    model, training = SMALL.model, replace(SMALL.training, steps=4, log_every=3, validate_every=0)
    configs = {
        "zeros": RunConfig(model=replace(model, initial_memory="zeros", norm="pre"), training=training),
        "muon": RunConfig(
            model=replace(model, cutoffs=(60, 120), div_val=2),
            training=replace(training, optimiser="muon", average="ema", accumulation=2, variable_segments=True),
        ),
        "sgd": RunConfig(
            model=model,
            training=replace(training, optimiser="sgd", momentum=0.9, precision="float16", average="uniform"),
        ),
        "lstm": RunConfig(
            model=RecurrentConfig(vocabulary=256, cell="lstm", n_layer=2, d_model=16, d_hidden=20), training=training
        ),
        "qrnn": RunConfig(
            model=RecurrentConfig(vocabulary=256, cell="qrnn", n_layer=2, d_model=16, d_hidden=20, window=2),
            training=training,
        ),
    }
    folder = tmp_path_factory.mktemp("kinds")
    for name, config in configs.items():
        evaluation = EvaluationConfig(segment=12, memory=0 if config.model.recurrent else 12)
        train(replace(config, evaluation=evaluation), store=byte_store, folder=folder / name)
    return [folder / name for name in configs]


def copied(run: Path, place: Path) -> Path:
    return Path(shutil.copytree(RunFolder(run).chosen_checkpoint(), place / "checkpoint"))


@pytest.mark.parametrize("kind", ["trained_run", "recurrent_run"])
def test_changed_checkpoints_are_refused_by_name_or_run(kind, request, tmp_path):
    run = request.getfixturevalue(kind)
    found = run_campaign("weights", copied(run, tmp_path / "weights"), seed=1, count=250)
    assert found["refused"] > 100
    assert found["ran"] > 10
    assert run_campaign("tables", copied(run, tmp_path / "tables"), seed=1, count=100)["refused"] > 30


def test_changed_engines_are_refused_by_name_or_go_on(kinds_of_runs, trained_run, tmp_path):
    found = run_campaign("engines", tmp_path, trained_run, *kinds_of_runs, seed=1, count=400)
    assert found["refused"] > 200
    assert found["ran"] > 10


def test_changed_training_states_are_refused_by_name_or_go_on(kinds_of_runs, byte_store, tmp_path):
    runs = [shutil.copytree(run, tmp_path / run.name) for run in kinds_of_runs]
    found = run_campaign("training", byte_store.folder, *runs, seed=1, count=150)
    assert found["refused"] > 70
    assert found["ran"] > 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ["weights", "tables"])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_thousands_of_changed_checkpoints(what, batch, trained_run, tmp_path):
    run_campaign(what, copied(trained_run, tmp_path), seed=2 + batch, count=THOUSANDS[what] // BATCHES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_changed_engines(kinds_of_runs, trained_run, tmp_path):
    run_campaign("engines", tmp_path, trained_run, *kinds_of_runs, seed=2, count=ENGINES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_changed_training_states(kinds_of_runs, byte_store, tmp_path):
    runs = [shutil.copytree(run, tmp_path / run.name) for run in kinds_of_runs]
    run_campaign("training", byte_store.folder, *runs, seed=2, count=STATES)
