"""A run that was stopped and resumed is, to the bit, the run that never stopped."""

import json
import shutil
import signal
from dataclasses import replace

import pytest

from small_run import SMALL, prepare
from transformer_xl.checkpoint import RunFolder
from transformer_xl.data.store import open_store
from transformer_xl.errors import CheckpointError
from transformer_xl.files import digest, write_json
from transformer_xl.training import loop, train

pytestmark = pytest.mark.usefixtures("without_pictures")

EVERYTHING = replace(
    SMALL,
    model=replace(
        SMALL.model, dropout=0.2, attention_dropout=0.1, word_dropout=0.1, locked_dropout=("embedding", "output")
    ),
    training=replace(
        SMALL.training,
        accumulation=2,
        warm_up=5,
        variable_segments=True,
        context=4,
        weight_decay=1e-4,
        embedding_rate_factor=2.0,
        activation_regularisation=0.2,
        temporal_regularisation=0.1,
        rate_by_segment_length=True,
        reset_memory_at_documents=True,
        validate_every=6,
    ),
)
VARIANTS = {
    "uniform average": replace(EVERYTHING, training=replace(EVERYTHING.training, average="uniform", average_from=8)),
    "exponential average": replace(EVERYTHING, training=replace(EVERYTHING.training, average="ema", optimiser="adamw")),
    "plateau, sgd": replace(
        EVERYTHING,
        training=replace(EVERYTHING.training, schedule="plateau", optimiser="sgd", momentum=0.9, learning_rate=0.1),
    ),
    "stretches, neighbours, runs of tokens, muon": replace(
        SMALL,
        model=replace(SMALL.model, norm="pre", neighbours=3, ngrams=(2, 4), ngram_rows=50, d_ngram=4, dropout=0.1),
        training=replace(SMALL.training, stretch=2, optimiser="muon", average="ema", accumulation=2, warm_up=5),
    ),
    "recomputed layers, bf16, muon": replace(
        EVERYTHING,
        training=replace(EVERYTHING.training, checkpoint_activations=True, precision="bfloat16", optimiser="muon"),
    ),
}


def stop_after(monkeypatch, steps, number=signal.SIGTERM):
    """Asks this process to stop during the update after `steps` more."""
    take_step, taken = loop.take_step, 0

    def counting(session, segment):
        nonlocal taken
        taken += 1
        if taken == steps:
            signal.raise_signal(number)
        return take_step(session, segment)

    monkeypatch.setattr(loop, "take_step", counting)


def final_state(folder):
    checkpoint = RunFolder(folder).checkpoint_at(SMALL.training.steps)
    return {name: (checkpoint / name).read_bytes() for name in ("model.safetensors", "training.safetensors")}


@pytest.fixture(scope="module")
def uninterrupted(byte_store, tmp_path_factory):
    folders = {}
    for name, config in VARIANTS.items():
        folders[name] = tmp_path_factory.mktemp("whole") / "run"
        train(config, store=byte_store, folder=folders[name])
    return folders


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "stop_at",
    [1, 8, 12, 19, *(pytest.param(step, marks=pytest.mark.thorough) for step in (2, 4, 7, 9, 15, 18))],
)
def test_stopped_and_resumed_is_bit_identical(variant, stop_at, byte_store, uninterrupted, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, stop_at)
        outcome = train(VARIANTS[variant], store=byte_store, folder=tmp_path / "run")
    assert outcome.step == stop_at
    assert outcome.stopped_by == signal.SIGTERM
    outcome = train(VARIANTS[variant], store=byte_store, folder=tmp_path / "run")
    assert outcome.step == SMALL.training.steps
    assert final_state(tmp_path / "run") == final_state(uninterrupted[variant])


def test_the_weights_really_moved(uninterrupted):
    """Guards the test above: states that never change would be identical too."""
    states = [final_state(folder) for folder in uninterrupted.values()]
    assert len({state["model.safetensors"] for state in states}) == len(VARIANTS)


def test_each_logged_step_stands_once_after_resuming(byte_store, tmp_path, monkeypatch):
    from transformer_xl.training.recording import read_metrics

    with monkeypatch.context() as patch:
        stop_after(patch, 17)
        train(SMALL, store=byte_store, folder=tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    with run.metrics.open("a") as file:
        file.write('{"kind": "train", "step": 99, "loss_na')  # half a line, as a killed process leaves it
    train(SMALL, store=byte_store, folder=tmp_path / "run")
    steps = [line["step"] for line in read_metrics(run.metrics) if line["kind"] == "train"]
    assert steps == [5, 10, 15, 20]


def test_another_configuration_is_another_run(byte_store, trained_run):
    changed = replace(SMALL, model=replace(SMALL.model, dropout=0.5))
    with pytest.raises(CheckpointError, match=r"model.dropout 0.0 -> 0.5\); choose another `run=`"):
        train(changed, store=byte_store, folder=trained_run)


def test_what_may_change_is_said(byte_store, tmp_path, capsys):
    train(SMALL, store=byte_store, folder=tmp_path / "run")
    gentler = replace(SMALL, training=replace(SMALL.training, steps=21, learning_rate=1e-3))
    assert train(gentler, store=byte_store, folder=tmp_path / "run").step == 21
    assert "training.learning_rate 0.01 -> 0.001" in capsys.readouterr().err
    fewer = replace(SMALL, training=replace(SMALL.training, lanes=2))
    with pytest.raises(CheckpointError, match=r"training.lanes 4 -> 2"):
        train(fewer, store=byte_store, folder=tmp_path / "run")


def test_the_card_of_a_finished_run_keeps_its_figure(byte_store, tmp_path):
    train(SMALL, store=byte_store, folder=tmp_path / "run", command="first")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "valid bits per byte" in card
    train(SMALL, store=byte_store, folder=tmp_path / "run", command="first")
    assert "valid bits per byte" in (tmp_path / "run" / "README.md").read_text()


def test_resume_false_refuses_a_run_that_exists(byte_store, trained_run):
    with pytest.raises(CheckpointError, match="already holds a run"):
        train(SMALL, store=byte_store, folder=trained_run, resume="false")


def test_resume_from_a_path_goes_on_elsewhere(byte_store, trained_run, tmp_path):
    longer = replace(SMALL, training=replace(SMALL.training, steps=22))
    outcome = train(longer, store=byte_store, folder=tmp_path / "run", resume=str(trained_run))
    assert outcome.step == 22
    with pytest.raises(CheckpointError, match="holds no checkpoint to go on from"):
        train(longer, store=byte_store, folder=tmp_path / "other", resume=str(tmp_path / "nothing"))


def a_few_steps(store, folder, steps):
    return train(replace(SMALL, training=replace(SMALL.training, steps=steps)), store=store, folder=folder)


def test_resuming_on_other_text_of_the_same_length_is_refused(byte_store, tmp_path):
    text = (byte_store.folder.parent / "text.txt").read_bytes()
    (tmp_path / "text.txt").write_bytes(text.swapcase())
    other = prepare(tmp_path / "text.txt", tmp_path / "other", "byte")
    assert len(other.split("train")) == len(byte_store.split("train"))
    a_few_steps(byte_store, tmp_path / "run", 2)
    with pytest.raises(
        CheckpointError, match=r"other holds other text than .*; give the `data=` it began with, or train"
    ):
        a_few_steps(other, tmp_path / "run", 3)
    assert RunFolder(tmp_path / "run").steps() == [2]


def test_data_that_moved_or_was_prepared_again_are_the_same_data(byte_store, tmp_path, capsys):
    a_few_steps(byte_store, tmp_path / "run", 2)
    moved = open_store(shutil.copytree(byte_store.folder, tmp_path / "elsewhere"))
    assert a_few_steps(moved, tmp_path / "run", 3).step == 3
    again = prepare(byte_store.folder.parent / "text.txt", tmp_path / "again", "byte")
    assert a_few_steps(again, tmp_path / "run", 4).step == 4
    assert "unchecked" not in capsys.readouterr().err


def test_a_checkpoint_of_before_that_names_no_text_goes_on_and_says_so(byte_store, tmp_path, capsys):
    a_few_steps(byte_store, tmp_path / "run", 2)
    checkpoint = RunFolder(tmp_path / "run").checkpoint_at(2)
    values = json.loads((checkpoint / "training.json").read_text(encoding="utf-8"))
    del values["data"]
    write_json(checkpoint / "training.json", values)
    checksums = json.loads((checkpoint / "checksums.json").read_text(encoding="utf-8"))
    checksums["training.json"] = digest(checkpoint / "training.json")
    write_json(checkpoint / "checksums.json", checksums)
    assert a_few_steps(byte_store, tmp_path / "run", 3).step == 3
    assert capsys.readouterr().err.count("does not say which text it was trained on") == 1
    assert a_few_steps(byte_store, tmp_path / "run", 4).step == 4
    assert "does not say" not in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_is_passed_over(byte_store, tmp_path, capsys):
    folder = tmp_path / "run"
    train(SMALL, store=byte_store, folder=folder)
    newest = RunFolder(folder).checkpoint_at(20) / "training.safetensors"
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(data)
    longer = replace(SMALL, training=replace(SMALL.training, steps=21))
    outcome = train(longer, store=byte_store, folder=folder)
    said = capsys.readouterr().err
    assert "passing over a checkpoint" in said
    assert "going on from step 10" in said
    assert outcome.step == 21
