"""The doctor finds what is wrong, by name, and nothing where nothing is."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tile_cases import interpreter
from transformer_xl import native
from transformer_xl.cli import main
from transformer_xl.console import progress, say
from transformer_xl.doctor import examining
from transformer_xl.doctor.examining import CHECKS, Report, examine, plain
from transformer_xl.doctor.kernels import attended, formula, shapes
from transformer_xl.doctor.setting import Result, Setting, differences, drawn_model, worst
from transformer_xl.doctor.speed import STATED, operations, timed_on
from transformer_xl.inference import Engine
from transformer_xl.model import attention, dropout
from transformer_xl.model.reference import reference_attend
from transformer_xl.presets import find_preset

CPU = torch.device("cpu")
FEW = ("wikitext-103-standard", "bytes", "tiny-lstm")


def found_by(*checks: str, presets: tuple[str, ...] = FEW) -> dict[str, Result]:
    return {result.name: result for result in examine(CPU, checks=checks, presets=presets).results}


@pytest.mark.parametrize(
    "check", ["machine", "paths", "formula", "dropout", "determinism", "one device", "engine", "texts", "memory"]
)
def test_nothing_is_wrong(check):
    result = found_by(check)[check]
    assert result.status == "ok", (result.sentence, result.details)
    assert result.figure
    assert not result.remedy


@pytest.mark.parametrize("check", ["serving", "steps", "resuming", "waits", "speed"])
def test_nothing_is_wrong_in_whole_trainings_and_servers(check, without_pictures):
    result = found_by(check)[check]
    assert result.status == ("skipped" if check == "waits" else "ok"), (result.sentence, result.details)


@pytest.mark.processes
def test_two_real_processes_learn_what_one_learns(without_pictures):
    result = found_by("several")["several"]
    assert result.status == "ok", (result.sentence, result.details)
    assert result.details["ranks"] == 2


# --- defects, planted one at a time


def failed(check: str) -> Result:
    result = found_by(check)[check]
    assert result.status == "failed"
    assert result.remedy
    return result


def test_a_wrong_sign_in_the_shift_is_named(monkeypatch):
    def wrong(by_distance_BHTS):
        T, S = by_distance_BHTS.shape[2:]
        column_TS = T - 1 + torch.arange(T)[:, None] - torch.arange(S)  # where it is T-1-i+j
        return by_distance_BHTS.gather(-1, column_TS.clamp(0, S - 1).expand(by_distance_BHTS.shape))

    monkeypatch.setattr(attention, "relative_shift", wrong)
    result = failed("formula")
    assert "attention is not the paper's formula" in result.sentence
    assert "wikitext-103-standard in float64 by torch" in result.sentence


def test_a_wrong_gradient_of_the_shift_is_named(monkeypatch):
    right = attention._RelativeShift.backward
    monkeypatch.setattr(attention._RelativeShift, "backward", staticmethod(lambda ctx, grad: -right(ctx, grad)))
    assert "the gradient of" in failed("formula").sentence


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")
def test_a_layers_dropout_drawn_differently_backwards_is_named(monkeypatch):
    def other_mask(ctx, gradient):
        return native.drop(gradient.contiguous(), ctx.rate, ctx.seed + 1), None, None

    monkeypatch.setattr(dropout._Drop, "backward", staticmethod(other_mask))
    sentence = failed("dropout").sentence
    assert "another mask backwards than forwards: dropout of a layer's values" in sentence
    assert "that of a whole model (its loss rises" in sentence


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")
def test_attentions_dropout_drawn_differently_backwards_is_named(monkeypatch):
    right = native.Attention.backward

    def other_mask(self, *given):
        self.shape.seed += 1
        return right(self, *given)

    monkeypatch.setattr(native.Attention, "backward", other_mask)
    sentence = failed("dropout").sentence
    assert "attention's own for wikitext-103-standard in float32 by native (the gradient of" in sentence


def test_a_tensor_of_the_processor_in_the_engine_is_named(monkeypatch):
    right = Engine._distances_of

    def on_the_processor(self, layer, length):
        distances = right(self, layer, length)
        return type(distances)(
            **{name: None if value is None else value.cpu() for name, value in vars(distances).items()}
        )

    monkeypatch.setattr(Engine, "_distances_of", on_the_processor)
    result = failed("one device")
    assert "a tensor of the processor meets those of the device" in result.sentence
    assert "model/attention.py:" in result.sentence


def test_wrong_numbers_in_the_engine_are_named(monkeypatch):
    right = Engine._visible_distance
    monkeypatch.setattr(Engine, "_visible_distance", lambda self: right(self) - 1)
    assert "the engine reads something else than the model's forward pass" in failed("engine").sentence


def test_training_that_goes_elsewhere_is_named(monkeypatch):
    from transformer_xl.training import step

    right = step.learning_rate
    there = patch.object(
        step, "learning_rate", lambda training, update: right(training, update=update) * (1 + 0.1 * (update > 9))
    )

    def losses(config, setting, *, device, exact=False, first=examining.training.losses):
        if exact:
            return first(config, setting, device=device, exact=True)
        with there:
            return first(config, setting, device=device)

    monkeypatch.setattr(examining.training, "losses", losses)
    paper = {"paper": examining.training.small_runs()["paper"]}
    monkeypatch.setattr(examining.training, "small_runs", lambda: paper)
    assert "20 steps of training go elsewhere than on the processor: paper in float32" in failed("steps").sentence


def test_kernels_that_are_not_used_are_named(monkeypatch):
    monkeypatch.setattr(native, "usable", lambda like: False)
    result = failed("paths")
    assert "the kernels know the shapes of wikitext-103-standard, bytes, and are not used" in result.sentence
    assert "install g++" in result.remedy


# --- what is told


def test_a_check_that_breaks_is_named_with_its_place_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(Engine, "_through_kernels", None)
    monkeypatch.setattr(Engine, "_through_torch", None)
    results = found_by("engine", "machine")
    assert results["engine"].status == "failed"
    assert results["engine"].sentence.startswith("TypeError at inference/engine.py:")
    assert results["engine"].details["traceback"]
    assert results["machine"].status == "ok"


def test_what_is_said_meanwhile_is_kept_for_the_report(monkeypatch, capsys):
    def talking(setting):
        say("the kernels cannot be had")
        with progress("working", total=1) as advance:
            advance(1)
        return Result(status="ok", figure="fine")

    monkeypatch.setattr(examining, "CHECKS", {"talking": talking})
    (result,) = examine(CPU, checks=["talking"]).results
    assert result.said == ("the kernels cannot be had",)
    assert capsys.readouterr().err == ""


@pytest.fixture
def few_checks(monkeypatch):
    sick = Result(status="failed", figure="2 wrong", sentence="it limps", remedy="rest", details={"off": float("inf")})
    some = {"paths": CHECKS["paths"], "formula": CHECKS["formula"], "waits": CHECKS["waits"], "sick": lambda _: sick}

    def slow(setting):
        for _ in range(2):
            say("one token's step cannot be recorded")
        return Result(status="ok", figure="right")

    some["engine"] = slow

    def only(*names):
        monkeypatch.setattr(examining, "CHECKS", {name: some[name] for name in names})
        monkeypatch.setitem(examine.__kwdefaults__, "checks", names)
        monkeypatch.setitem(examine.__kwdefaults__, "presets", FEW)

    return only


def test_the_table_ends_with_the_json(few_checks, capsys):
    few_checks("paths", "formula", "waits", "engine")
    assert main(["doctor", "--device", "cpu"]) == 0
    shown, told = capsys.readouterr()
    *table, last = shown.splitlines()
    assert json.loads(last)["ok"] is True
    assert [result["name"] for result in json.loads(last)["results"]] == ["paths", "formula", "waits", "engine"]
    lines = {line.split()[0]: line for line in table if line}
    assert "native" in lines["bytes"]
    assert "a recurrent model has no attention" in lines["tiny-lstm"]
    assert "ok" in lines["formula"].split()
    assert "waits: torch counts waits for CUDA alone" in shown
    assert shown.count("\nengine said: one token's step cannot be recorded\n") == 1
    assert "computing on cpu" in told


def test_a_failure_is_exit_code_1_and_says_what_to_do(few_checks, capsys):
    few_checks("sick", "paths")
    assert main(["doctor", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "sick: it limps. What to do: rest." in shown
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["results"][0]["details"] == {"off": "inf"}


@pytest.mark.parametrize(("device", "sentence"), [("gpu", "is no device"), ("cuda:7", "not here")])
def test_a_device_that_is_not_here_is_one_sentence(device, sentence, capsys):
    assert main(["doctor", "--device", device]) == 2
    assert sentence in capsys.readouterr().err


def test_json_has_no_infinities():
    report = Report(device="cpu", seconds=1.0, results=[Result(status="ok", figure="", details={"a": [float("nan")]})])
    assert json.loads(json.dumps(report.as_json(), allow_nan=False))["results"][0]["details"] == {"a": ["nan"]}
    assert plain({1: (0.5, None)}) == {"1": [0.5, None]}


# --- what only a card has


def test_nvidias_figures_are_9_and_16_percent_of_an_a100(monkeypatch):
    """By the count of operations that the doctor and docs/scaling.md have."""
    base, large = timed_on(torch.device("cuda"))
    shares = [
        operations(one.run) / (one.run.training.lanes * one.run.training.segment) * one.published / STATED["A100"]
        for one in (base, large)
    ]
    assert [round(share, 2) for share in shares] == [0.09, 0.16]


@pytest.mark.processes
def test_the_kernels_for_cards_pass_in_tritons_interpreter():
    pytest.importorskip("triton", reason="there is no Triton here")
    with interpreter() as interpreted:
        for half in (False, True):
            _, share = interpreted(off_by_tiles, "wikitext-103-standard", half)
            assert share < (1e-2 if half else 1e-5)


def off_by_tiles(preset: str, half: bool) -> tuple[str, float]:
    ((_, config),) = shapes({preset: find_preset(preset).run.model}).items()
    config = replace(config, n_head=2, memory=20)
    expected = attended(
        drawn_model(config), reference_attend, rounded=torch.float16 if half else torch.float32, segment=24
    )
    with patch.object(native, "usable", lambda like: False), torch.autocast("cpu", dtype=torch.float16, enabled=half):
        return worst(differences(attended(drawn_model(config).float(), "triton", segment=24), expected))


# --- all of it


def test_every_preset_that_attends_is_looked_at(tmp_path):
    setting = Setting(device=CPU, presets=("text8-24l", "enwik8-24l"), folder=tmp_path)
    assert {*formula(setting).details} == {"text8-24l", "enwik8-24l"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_is_green_and_done_in_five_minutes():
    began_at = time.monotonic()
    command = [sys.executable, "-m", "transformer_xl", "doctor", "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert [result["name"] for result in json.loads(done.stdout)["results"]] == [*CHECKS]
    assert time.monotonic() - began_at < 300
