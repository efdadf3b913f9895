"""Trackers of other people hear of the figures that metrics.jsonl has, offline and with their real packages; and training outlives them."""

import json
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec

import pytest

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.cli import main
from transformer_xl.errors import ConfigError
from transformer_xl.training import tracking
from transformer_xl.training.tracking import Tracking

needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is an extra")
needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is an extra")


def train(folder, byte_store, *names, steps):
    """In a process of its own: both packages start threads, and mlflow warns as it is imported."""
    sizes = [
        "--model.n_layer",
        "1",
        "--model.d_model",
        "16",
        "--model.n_head",
        "2",
        "--model.d_head",
        "8",
        "--model.d_inner",
        "16",
    ]
    sizes += [
        "--training.lanes",
        "2",
        "--training.segment",
        "8",
        "--training.log_every",
        "1",
        "--training.validate_every",
        "2",
    ]
    sizes += ["--training.validation_tokens", "50", "--training.save_every", "2", "--model.memory", "8"]
    command = [
        sys.executable,
        "-m",
        "transformer_xl",
        "train",
        "tiny-byte",
        "--data",
        str(byte_store.folder),
        "--run",
        str(folder / "run"),
    ]
    command += [word for name in names for word in ("--track", name)] + ["--training.steps", str(steps), *sizes]
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "OMP_NUM_THREADS": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.processes
@needs_mlflow
def test_mlflow_has_every_figure_and_a_run_goes_on_there(byte_store, tmp_path):
    for steps in (3, 5):
        ran = train(tmp_path, byte_store, "mlflow", steps=steps)
        assert ran.returncode == 0, ran.stderr
    base = sqlite3.connect(tmp_path / "mlflow.db")
    found = base.execute("select key, step, value from metrics").fetchall()
    runs = base.execute("select name, status from runs").fetchall()
    parameters = dict(base.execute("select key, value from params").fetchall())
    base.close()
    assert runs == [("run", "FINISHED")]
    assert parameters["model.d_inner"] == "16"
    for line in lines_of(tmp_path):
        for name, value in line.items():
            if name not in ("kind", "step"):
                assert (f"{line['kind']}/{name}", line["step"], pytest.approx(value)) in found


@pytest.mark.processes
@needs_wandb
def test_wandb_keeps_every_figure_offline(byte_store, tmp_path):
    ran = train(tmp_path, byte_store, "wandb", steps=3)
    assert ran.returncode == 0, ran.stderr
    identity = json.loads((tmp_path / "run" / "tracking.json").read_text())["wandb"]
    (kept,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb")
    data = kept.read_bytes()
    for name in ("train/loss_nats", "validation/bits_per_byte"):
        assert name.encode() in data
    ran = train(tmp_path, byte_store, "wandb", steps=5)
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "run" / "tracking.json").read_text())["wandb"] == identity


class Broken:
    """A tracker whose server dies: no package can be made to do that at a chosen moment."""

    identity = "a1"

    def __init__(self, run, config, *, identity):
        self.given, self.logged = identity, []

    def log(self, values, *, step):
        if step > 1:
            raise OSError("gone")
        self.logged.append((step, values))

    def close(self):
        raise AssertionError("it was left behind")


def test_training_outlives_a_tracker(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tracking.TRACKERS, "mlflow", Broken)
    run = RunFolder(tmp_path)
    found = Tracking(["mlflow"], run, SMALL)
    tracker = found._trackers["mlflow"]
    for step in (1, 2, 3):
        found.log("train", {"loss_nats": 1.0}, step=step)
    found.close()
    assert tracker.logged == [(1, {"train/loss_nats": 1.0})]
    assert capsys.readouterr().err == "mlflow takes no more figures (gone); metrics.jsonl has them all\n"
    assert Tracking(["mlflow"], run, SMALL)._trackers["mlflow"].given == "a1"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"mlflow": 3}', '{"mlflow": "../x"}', '{"mlflow": "' + "a" * 70 + '"}', '{"other": "a"}']
)
def test_what_stands_in_the_file_is_checked(text, tmp_path, monkeypatch):
    monkeypatch.setitem(tracking.TRACKERS, "mlflow", Broken)
    (tmp_path / "tracking.json").write_text(text)
    assert Tracking(["mlflow"], RunFolder(tmp_path), SMALL)._trackers["mlflow"].given is None


def test_a_tracker_that_cannot_start_is_one_sentence(tmp_path, monkeypatch, byte_store, capsys):
    def refusing(run, config, *, identity):
        raise RuntimeError("no login")

    monkeypatch.setitem(tracking.TRACKERS, "wandb", refusing)
    with pytest.raises(ConfigError, match=r"`track=wandb`: it could not be started \(no login\)"):
        Tracking(["wandb"], RunFolder(tmp_path), SMALL)

    def absent(run, config, *, identity):
        raise ModuleNotFoundError("wandb")

    monkeypatch.setitem(tracking.TRACKERS, "wandb", absent)
    words = ["train", "tiny-byte", "--data", str(byte_store.folder), "--run", str(tmp_path / "run"), "--track", "wandb"]
    assert main(words) == 2
    assert (
        "--track wandb needs a package; install it with: pip install 'transformer-xl[wandb]'" in capsys.readouterr().err
    )
    assert main([*words[:-1], "paper"]) == 2
    assert "invalid choice: 'paper'" in capsys.readouterr().err
