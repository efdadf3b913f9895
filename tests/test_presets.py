"""The paper's models, counted to the unit."""

import json

import pytest

from transformer_xl.cli import main

COUNTS = {
    "enwik8-12l": 41_055_436,
    "enwik8-18l": 87_965_708,
    "enwik8-24l": 277_231_820,
    "text8-24l": 277_050_395,
    "wikitext-103-standard": 151_107_538,
    "wikitext-103-large": 285_205_322,
    "wikitext-103-large-16l": 257_919_818,
    "wikitext-103-ablation": 127_815_738,
    "lm1b-base": 469_020_530,
    "lm1b-large": 838_078_062,
    "lm1b-ablation": 301_166_450,
    "ptb": 23_533_960,
}


@pytest.fixture
def as_json(capsys):
    assert main(["presets", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_counts_are_these(as_json):
    counted = {preset["name"]: preset["parameters"] for preset in as_json}
    assert {name: counted.get(name) for name in COUNTS} == COUNTS


TENSORFLOW = ("enwik8-18l", "enwik8-24l", "text8-24l", "wikitext-103-large", "wikitext-103-large-16l", "lm1b-large")
"""The large models follow the scripts for TensorFlow, all others of the paper those for PyTorch."""


def test_large_presets_are_as_their_scripts(as_json):
    for preset in (preset for preset in as_json if preset["table"] and not preset["name"].endswith(("lstm", "qrnn"))):
        model, training, large = preset["model"], preset["training"], preset["name"] in TENSORFLOW
        words = preset["corpus"] in ("wikitext-103", "lm1b")
        assert training["schedule_rule"] == ("tensorflow" if large else "pytorch"), preset["name"]
        assert training["floor"] == (0.01 if large else 1 / 3 if preset["name"] == "ptb" else 0), preset["name"]
        assert model["share_biases"] is not (large and words), preset["name"]
        assert model["init_std"] == (0.005 if large and words else 0.02), preset["name"]
        assert preset["evaluation"]["same_length"] is (preset["name"] != "ptb"), preset["name"]


def test_every_preset_says_where_it_comes_from(as_json):
    for preset in as_json:
        assert preset["provenance"] in ("script", "author", "cited", "fitted", "own")
        assert bool(preset["paper_result"]) == preset["table"].startswith("Table") == (preset["provenance"] != "own")


def test_the_table_shows_every_preset(capsys):
    assert main(["presets"]) == 0
    shown = capsys.readouterr().out
    for name, count in COUNTS.items():
        assert name in shown
        assert f"{count:,}" in shown
    assert "fitted sizes were chosen here so that the count is the paper's; they were never published" in shown
