"""The benchmark of learning while reading, at toy size: every way, ratios within rounds, and a long text in parts."""

import json

import pytest

from transformer_xl.benchmarks.adaptation import STATIC, ways_of
from transformer_xl.cli import main


def test_every_way_is_measured_beside_the_static_one(capsys):
    words = ["bench", "adaptation", "--scale", "tiny", "--rounds", "2"]
    assert main([*words, "--tokens", "160", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cost["way"] for cost in found["costs"]] == list(ways_of("tiny"))
    ratios = {cost["way"]: cost["ratio_to_static"] for cost in found["costs"]}
    assert ratios.pop(STATIC) == 1.0
    assert all(ratio > 0 for ratio in ratios.values())
    assert [part["tokens"] for part in found["parts"]] == list(range(16, 161, 16))
    assert main([*words, "--tokens", "160"]) == 0
    assert "x the time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"), [(["--tokens", "9"], "--tokens"), (["--against", "huggingface"], "--against")]
)
def test_what_cannot_be_measured(capsys, words, message):
    assert main(["bench", "adaptation", "--scale", "tiny", *words]) == 2
    assert message in capsys.readouterr().err
