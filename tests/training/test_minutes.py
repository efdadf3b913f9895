"""Training that ends by the clock: on time whatever the machine does, and to the bit what it would have been without a stop."""

import json
import math
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_resuming import stop_after

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder, Timetable, read_training_state
from transformer_xl.checkpoint.folder import read_config
from transformer_xl.cli import main
from transformer_xl.config import TrainingConfig
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.presets import PRESETS
from transformer_xl.training import clock, loop, reporting, train
from transformer_xl.training.clock import seconds_of_a_step, steps_in
from transformer_xl.training.optimisation import learning_rate
from transformer_xl.training.recording import read_metrics
from transformer_xl.training.session import Session

pytestmark = pytest.mark.usefixtures("without_pictures")

DROPPING = replace(SMALL.model, dropout=0.1)


def by_clock(minutes, **training):
    fields = {"validate_every": 0, "save_every": 0, "log_every": 5, "warm_up": 4} | training
    return replace(SMALL, model=DROPPING, training=replace(SMALL.training, minutes=minutes, **fields))


class Machine:
    """A machine whose clock moves with the steps alone: so many seconds each, by how many were taken."""

    def __init__(self, monkeypatch, seconds):
        self.time, self.taken = 0.0, 0
        for place in (clock, loop, reporting):
            monkeypatch.setattr(place, "now", lambda: self.time)
        evaluate = clock.evaluate_together
        timed = lambda *what, **how: replace(evaluate(*what, **how), seconds=2**-10)  # noqa: E731
        monkeypatch.setattr(clock, "evaluate_together", timed)
        for place in (clock, loop):
            monkeypatch.setattr(place, "take_step", self.slowly(place.take_step, seconds, counts=place is loop))

    def slowly(self, take_step, seconds, *, counts):
        def take(session, segment):
            self.time += seconds(session.step) if counts else seconds(0)
            return take_step(session, segment)

        return take


def state_of(folder):
    run = RunFolder(folder)
    checkpoint = run.checkpoint_at(run.steps()[-1])
    return {name: (checkpoint / name).read_bytes() for name in ("model.safetensors", "training.safetensors")}


def rates(folder):
    return [line["rate"] for line in read_metrics(RunFolder(folder).metrics) if line["kind"] == "train"]


MACHINES = {
    "steady": lambda step: 0.25,
    "half as fast from step 60 on": lambda step: 0.25 if step < 60 else 0.5,
    "three times as fast from step 60 on": lambda step: 0.75 if step < 60 else 0.25,
    "a tenth as fast from step 100 on": lambda step: 0.125 if step < 100 else 1.25,
    "every other step slow": lambda step: 0.125 if step % 2 else 0.375,
    "slower and slower": lambda step: 0.125 * (1 + step // 32),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_it_ends_on_time_whatever_the_machine_does(machine, byte_store, tmp_path, monkeypatch):
    watch = Machine(monkeypatch, MACHINES[machine])
    outcome = train(by_clock(1.0, log_every=1), store=byte_store, folder=tmp_path / "run")
    assert watch.time == pytest.approx(60, rel=0.05)
    table = read_training_state(RunFolder(tmp_path / "run").checkpoint_at(outcome.step)).counters.timetable
    assert table.spent == watch.time
    falling = rates(tmp_path / "run")
    peak = falling.index(max(falling[1:]))
    assert all(before >= after for before, after in pairwise(falling[peak:]))
    assert falling[-1] < 0.05 * SMALL.training.learning_rate or machine == "a tenth as fast from step 100 on"


@pytest.mark.parametrize("machine", ["half as fast from step 60 on", "every other step slow"])
@pytest.mark.parametrize("stop_at", [1, 37, 60, 100])
def test_stopped_and_resumed_is_bit_identical(machine, stop_at, byte_store, tmp_path, monkeypatch):
    config = by_clock(0.75, average="ema", log_every=7, save_every=9)
    with monkeypatch.context() as patch:
        Machine(patch, MACHINES[machine])
        train(config, store=byte_store, folder=tmp_path / "whole")
    with monkeypatch.context() as patch:
        Machine(patch, MACHINES[machine])
        stop_after(patch, stop_at)
        assert train(config, store=byte_store, folder=tmp_path / "run").step == stop_at
    with monkeypatch.context() as patch:
        Machine(patch, MACHINES[machine])
        train(config, store=byte_store, folder=tmp_path / "run")
    assert RunFolder(tmp_path / "run").steps()[-1] == RunFolder(tmp_path / "whole").steps()[-1]
    assert state_of(tmp_path / "run") == state_of(tmp_path / "whole")


def test_what_comes_before_the_next_mark_does_not_depend_on_the_clock(byte_store, tmp_path, monkeypatch):
    """Killed between two saves, the steps since the last are taken again on a machine that is five times as slow, and are the same to the bit."""
    config = by_clock(1.0, save_every=16)
    for name, seconds in {"first": lambda step: 0.25, "again": lambda step: 0.25 if step < 16 else 1.25}.items():
        with monkeypatch.context() as patch:
            Machine(patch, seconds)
            stop_after(patch, 26)  # the first mark is after an eighth of some 230
            assert train(config, store=byte_store, folder=tmp_path / name).step == 26
    assert state_of(tmp_path / "first") == state_of(tmp_path / "again")
    tables = [
        read_training_state(RunFolder(tmp_path / name).checkpoint_at(26)).counters.timetable
        for name in ("first", "again")
    ]
    assert tables[0].mark == tables[1].mark > 26
    assert tables[0].spent < tables[1].spent


def test_what_saves_cost_is_reckoned_with(byte_store, tmp_path, monkeypatch):
    """Saving takes as long as ten steps, every ten steps: half of the time. The schedule is at its end when the time is, without a leap."""
    watch = Machine(monkeypatch, MACHINES["steady"])

    def saving(*what):
        watch.time += 2.5

    monkeypatch.setattr(loop, "save", saving)
    train(by_clock(2.0, save_every=10, log_every=1), store=byte_store, folder=tmp_path / "run")
    assert watch.time == pytest.approx(120, rel=0.05)
    falling = rates(tmp_path / "run")[10:]
    assert falling[-1] < 0.05 * SMALL.training.learning_rate
    assert max(before - after for before, after in pairwise(falling)) < 0.03 * SMALL.training.learning_rate


def test_on_a_real_clock(byte_store, tmp_path, capsys):
    started_at = time.perf_counter()
    outcome = train(by_clock(0.1, validate_every=200), store=byte_store, folder=tmp_path / "run")
    assert time.perf_counter() - started_at == pytest.approx(6, rel=0.05)
    said = capsys.readouterr().err
    assert "computing on cpu, 1 thread, in float32" in said
    assert "steps fit into 0.1 minutes" in said
    assert outcome.validation.step == outcome.step
    assert train(by_clock(0.1, validate_every=200), store=byte_store, folder=tmp_path / "run").step == outcome.step
    assert "training.steps" not in capsys.readouterr().err


def test_other_minutes_and_steps_go_on_from_there(byte_store, tmp_path, monkeypatch, capsys):
    watch = Machine(monkeypatch, MACHINES["steady"])
    first = train(by_clock(0.25), store=byte_store, folder=tmp_path / "run")
    watch.time = 0.0
    second = train(by_clock(0.5), store=byte_store, folder=tmp_path / "run")
    assert watch.time == pytest.approx(15, abs=0.05 * 30)  # what is left
    assert second.step > 1.5 * first.step
    said = capsys.readouterr().err
    assert "going on with changes: training.minutes 0.25 -> 0.5" in said
    by_steps = replace(by_clock(0.0), training=replace(by_clock(0.0).training, steps=second.step + 3))
    assert train(by_steps, store=byte_store, folder=tmp_path / "run").step == second.step + 3
    watch.time = 0.0
    third = train(by_clock(0.75), store=byte_store, folder=tmp_path / "run")
    steps_took = 0.25 * (second.step + 3)  # where steps decide, time is counted in steps alone
    assert watch.time == pytest.approx(45 - steps_took, abs=0.05 * 45)
    assert third.step > second.step + 30
    assert "more steps fit into 0.75 minutes" in capsys.readouterr().err


def test_a_validation_reads_what_there_is_time_for(byte_store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(clock, "VALIDATION_SHARE", 1e-9)
    outcome = train(by_clock(0.02), store=byte_store, folder=tmp_path / "run")
    assert "validating on the first 2 tokens of valid, which is what there is time for" in capsys.readouterr().err
    assert outcome.validation.figures.tokens == 1


def test_nothing_is_lost_for_longer_than_the_minutes_between_saves(byte_store, tmp_path, monkeypatch):
    Machine(monkeypatch, lambda step: 0.5)
    fields = {"save_every": 0, "validate_every": 0, "steps": 100, "save_minutes": 0.125}
    saved = []
    monkeypatch.setattr(loop, "save", lambda session, *rest: saved.append(session.step))
    train(replace(SMALL, training=replace(SMALL.training, **fields)), store=byte_store, folder=tmp_path / "run")
    assert saved == [15, 30, 45, 60, 75, 90, 100]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_every_preset_saves_and_validates(preset):
    training = preset.run.training
    assert 0 < training.save_minutes <= 5
    assert 0 < training.validate_every < training.steps
    assert training.precision == ("bfloat16" if preset.name in ("bytes", "text", "box", "modern-word") else "auto")


# --- shares


@given(steps=st.integers(5, 10_000), share=st.floats(0.01, 0.9))
def test_a_warm_up_of_a_share_is_that_of_as_many_steps(steps, share):
    by_share = TrainingConfig(steps=steps, warm_up_share=share)
    by_steps = TrainingConfig(steps=steps, warm_up=math.ceil(share * steps))
    for update in np.linspace(0, steps - 1, 7, dtype=int).tolist():
        assert learning_rate(by_share, update=update) == learning_rate(by_steps, update=update)


def test_what_is_counted_in_steps_leaves_the_clock_time_for_the_rest():
    assert TrainingConfig(steps=60, warm_up=100).warm_up_steps == 100
    assert TrainingConfig(steps=60, warm_up=100, minutes=1.0).warm_up_steps == 12
    with pytest.raises(
        ConfigError, match=r"training.warm_up: 10 beside training.warm_up_share 0.1; set one of them to 0"
    ):
        TrainingConfig(warm_up=10, warm_up_share=0.1)
    assert TrainingConfig(steps=60, average_decay=0.99).average_share == 1 - 0.99
    assert TrainingConfig(steps=60, average_decay=0.99, minutes=1.0).average_share == pytest.approx(1 / 6)
    assert TrainingConfig(steps=6000, average_decay=0.99, minutes=1.0).average_share == 1 - 0.99
    assert TrainingConfig(steps=2, average_decay=0.99, minutes=1.0).average_share == 1
    with pytest.raises(ConfigError, match=r"training.minutes: -1.0 is negative"):
        TrainingConfig(minutes=-1.0)


# --- epochs


@pytest.mark.parametrize("changes", [{}, {"stretch": 2}, {"lanes": 3, "segment": 50}])
def test_an_epoch_reads_everything_once(changes, byte_store):
    config = replace(SMALL, training=replace(SMALL.training, **changes))
    session = Session.fresh(config, store=byte_store, device=clock.torch.device("cpu"))
    steps = steps_in(2, config, byte_store)
    for _ in range(steps):
        assert session.lanes.epoch < 2
        session.lanes.next()
    assert session.lanes.epoch == 2


def test_epochs_of_varying_segments_are_about_right(byte_store):
    config = replace(SMALL, training=replace(SMALL.training, variable_segments=True, segment=40))
    fixed = replace(SMALL, training=replace(SMALL.training, segment=40))
    assert steps_in(3, config, byte_store) == pytest.approx(steps_in(3, fixed, byte_store), rel=0.1)


def test_timing_takes_the_time_it_is_given(byte_store):
    started_at = time.perf_counter()
    a_step = seconds_of_a_step(SMALL, store=byte_store, device=clock.torch.device("cpu"), within=0.5)
    assert 0 < a_step < 0.2
    assert time.perf_counter() - started_at < 3


# --- as people type it


def printed(capsys, *words):
    assert main(["train", *words, "--print_config"]) == 0
    return json.loads(capsys.readouterr().out)["training"]


def test_one_thing_says_how_long(byte_store, tmp_path, capsys):
    data = ["bytes", "--data", str(byte_store.folder)]
    assert printed(capsys, *data, "--minutes", "2.5")["minutes"] == 2.5
    found = printed(capsys, *data, "--epochs", "2")
    assert (found["minutes"], found["steps"]) == (
        0.0,
        2
        * steps_in(
            1,
            replace(
                SMALL,
                training=TrainingConfig(**{name: found[name] for name in ("segment", "lanes", "stretch", "seed")}),
            ),
            byte_store,
        ),
    )
    (tmp_path / "timed.toml").write_text("[training]\nminutes = 3\n")
    (tmp_path / "counted.toml").write_text("[training]\nsteps = 7\n")
    timed, counted = (["--config", str(tmp_path / f"{name}.toml")] for name in ("timed", "counted"))
    assert printed(capsys, *data, *timed)["minutes"] == 3.0
    for later in (counted, ["--training.steps", "7"]):
        found = printed(capsys, *data, *timed, *later)
        assert (found["minutes"], found["steps"]) == (0.0, 7)
    assert printed(capsys, *data, *counted, *timed)["minutes"] == 3.0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--minutes", "3", "--epochs", "2"], "--minutes and --epochs both say how long to train; give one of them"),
        (["--epochs", "2", "--training.steps", "2"], "--epochs and --training.steps both say how long to train"),
        (["--minutes", "0"], "--minutes: 0 is no time; give more than 0"),
        (["--minutes", "nan"], "--minutes: nan is no time; give more than 0"),
        (["--minutes", "inf"], "training.minutes: inf is no number to reckon with"),
        (["--epochs", "-1"], "--epochs -1.0 is no number of times to read a text; give more than 0"),
        (["--device", "gpu", "--run", "run"], "--device 'gpu' is no device; give auto, cpu, cuda, cuda:1 or mps"),
        (
            ["--device", "cuda", "--run", "run"],
            "--device cuda is not here, or this torch cannot use it; give auto or cpu",
        ),
        (["--device", "meta", "--run", "run"], "--device meta is not here"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, sentence, byte_store, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "bytes", "--data", str(byte_store.folder), *words]) == 2
    assert f"txl: {sentence}" in capsys.readouterr().err


# --- what a file says


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("pace", -0.5),
        ("position", 1e9),
        ("step", 10**9),
        ("spent", float("nan")),
        ("seconds", 1e12),
        ("mark", "x"),
    ],
)
def test_a_timetable_that_cannot_be_is_refused(field, value, byte_store, tmp_path, monkeypatch):
    from transformer_xl.checkpoint.training_state import Counters

    Machine(monkeypatch, MACHINES["steady"])
    outcome = train(by_clock(0.05), store=byte_store, folder=tmp_path / "run")
    path = RunFolder(tmp_path / "run").checkpoint_at(outcome.step) / "training.json"
    values = json.loads(path.read_text())
    assert Counters.from_json(values, path=path).timetable == Timetable(**values["timetable"])
    values["timetable"][field] = value
    with pytest.raises(CheckpointError, match=rf"training.json: timetable.{field}"):
        Counters.from_json(values, path=path)


def test_the_run_says_its_minutes_and_the_steps_of_its_schedule(byte_store, tmp_path, monkeypatch):
    Machine(monkeypatch, MACHINES["steady"])
    outcome = train(by_clock(0.25), store=byte_store, folder=tmp_path / "run")
    training = read_config(RunFolder(tmp_path / "run").config).training
    assert training.minutes == 0.25
    assert training.steps == pytest.approx(outcome.step, abs=5)
    assert "in 0.25 minutes" in (tmp_path / "run" / "README.md").read_text()
