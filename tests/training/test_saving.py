"""Saving beside training: a snapshot is what is written, whatever training does meanwhile; one at a time; a write that fails is told, and loses nothing."""

import errno
import os
import shutil
import threading
from dataclasses import replace

import pytest

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder, load_checkpoint, write_checkpoint
from transformer_xl.cli import main
from transformer_xl.training import saving, train
from transformer_xl.training.background import Background

pytestmark = pytest.mark.usefixtures("without_pictures")
CONFIG = replace(
    SMALL,
    model=replace(SMALL.model, dropout=0.2),
    training=replace(
        SMALL.training, steps=24, save_every=6, validate_every=0, average="ema", accumulation=2, log_every=1
    ),
)


def bytes_of(folder, step):
    checkpoint = RunFolder(folder).checkpoint_at(step)
    return [(checkpoint / name).read_bytes() for name in ("model.safetensors", "training.safetensors")]


def test_what_is_written_while_training_goes_on_is_the_step_that_was_saved(byte_store, tmp_path, monkeypatch):
    """The thread begins to write only when three more steps were taken; a run that waits for each write saves the same, and goes on to the same."""
    train(CONFIG, store=byte_store, folder=tmp_path / "whole")
    begun, reached = [], threading.Event()

    def late(folder, **what):
        begun.append(folder.name)
        assert reached.wait(timeout=60)
        write_checkpoint(folder, **what)

    def on_step(step):
        if step.step == 6 + 3:
            reached.set()

    monkeypatch.setattr(saving, "write_checkpoint", late)
    train(CONFIG, store=byte_store, folder=tmp_path / "late", on_step=on_step)
    assert begun == [f"step-{step:08d}" for step in (6, 12, 18, 24)]
    for step in (18, 24):
        assert bytes_of(tmp_path / "late", step) == bytes_of(tmp_path / "whole", step)
    # And from what the thread wrote, a run goes on to the same bits.
    monkeypatch.setattr(saving, "write_checkpoint", write_checkpoint)
    stopped = train(CONFIG, store=byte_store, folder=tmp_path / "again", on_step=lambda s: s.step == 14 and s.stop())
    assert stopped.step == 14
    shutil.rmtree(RunFolder(tmp_path / "again").checkpoint_at(14))
    train(CONFIG, store=byte_store, folder=tmp_path / "again")
    assert bytes_of(tmp_path / "again", 24) == bytes_of(tmp_path / "whole", 24)


def test_one_is_written_at_a_time_and_the_end_waits(byte_store, tmp_path, monkeypatch):
    writing, most = 0, 0

    def counted(folder, **what):
        nonlocal writing, most
        writing += 1
        most = max(most, writing)
        write_checkpoint(folder, **what)
        writing -= 1

    monkeypatch.setattr(saving, "write_checkpoint", counted)
    every = replace(CONFIG, training=replace(CONFIG.training, save_every=1))
    train(every, store=byte_store, folder=tmp_path / "run")
    assert (most, writing) == (1, 0)
    assert RunFolder(tmp_path / "run").steps() == [23, 24]
    assert not [thread for thread in threading.enumerate() if thread.name == "saving"]


def test_a_write_that_fails_beside_training_ends_it_and_loses_nothing_older(byte_store, tmp_path, monkeypatch, capsys):
    steps = []

    def full(folder, **what):
        if folder.name.endswith("12"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        write_checkpoint(folder, **what)

    monkeypatch.setattr(saving, "write_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        train(CONFIG, store=byte_store, folder=tmp_path / "run", on_step=lambda step: steps.append(step.step))
    assert 12 <= steps[-1] <= 18  # it was told when it was known, at the latest when the next was to be written
    assert RunFolder(tmp_path / "run").steps() == [6]
    load_checkpoint(tmp_path / "run")
    monkeypatch.setattr(saving, "write_checkpoint", write_checkpoint)
    assert train(CONFIG, store=byte_store, folder=tmp_path / "run").step == 24
    train(CONFIG, store=byte_store, folder=tmp_path / "whole")
    assert bytes_of(tmp_path / "run", 24) == bytes_of(tmp_path / "whole", 24)
    assert main(["runs", str(tmp_path)]) == 0


def failing_beside(work):
    with Background() as background:
        background.begin(work)
        raise ValueError("of training")


def test_an_error_of_training_waits_for_what_is_being_written():
    written = []
    with pytest.raises(ValueError, match="of training"):
        failing_beside(lambda: written.append("whole"))
    assert written == ["whole"]


def test_both_errors_are_told(capsys):
    def fail():
        raise OSError(errno.EIO, "broken")

    with pytest.raises(ValueError, match="of training"):
        failing_beside(fail)
    assert "the last checkpoint could not be written either" in capsys.readouterr().err
