"""The benchmark of learning while reading, at toy size: every way, ratios within rounds, and a long text in parts."""

import json

import pytest

from transformer_xl.benchmarks.adaptation import STATIC, _model, ways_of
from transformer_xl.cli import main


def test_every_way_is_measured_beside_the_static_one(capsys, tmp_path):
    words = ["bench", "adaptation", "--scale", "tiny", "--rounds", "2"]
    assert main([*words, "--tokens", "320", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cost["way"] for cost in found["costs"]] == list(ways_of("tiny", segment=16))
    ratios = {cost["way"]: cost["ratio_to_static"] for cost in found["costs"]}
    assert ratios.pop(STATIC) == 1.0
    assert all(ratio > 0 for ratio in ratios.values())
    assert (found["segment"], found["lesson"]) == (16, 32)
    assert [part["tokens"] for part in found["parts"]] == list(range(32, 321, 32))
    assert main([*words, "--tokens", "320", "--json", str(tmp_path / "costs.json")]) == 0
    assert "x the time" in capsys.readouterr().out
    assert json.loads((tmp_path / "costs.json").read_text()).keys() == found.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scale", "tiny", "--tokens", "9"], "--tokens"),
        (["--against", "huggingface"], "--against"),
        (["--scale", "tiny", "--preset", "bytes"], "leave out --scale tiny"),
        (["--preset", "tiny-lstm"], "no Transformer-XL"),
        (["--json", "nowhere/costs.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_measured(capsys, words, message):
    assert main(["bench", "adaptation", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_preset_brings_its_model_and_the_segment_it_is_evaluated_with():
    model, segment = _model("full", "text")
    assert (model.config.vocabulary, model.config.memory, segment) == (4096, 64, 64)
