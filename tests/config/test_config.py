"""Configurations that cannot work stop with one sentence: the field, the value, the way out."""

import json
from dataclasses import asdict, replace

import pytest

from transformer_xl.config import ModelConfig, RunConfig, TrainingConfig
from transformer_xl.config.fields import override, read
from transformer_xl.config.sources import options
from transformer_xl.errors import ConfigError
from transformer_xl.presets import PRESETS, find_preset

GOOD = ModelConfig(vocabulary=100, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, memory=4)

BAD = [
    ({"n_head": 0}, "model.n_head: 0 is too small; it must be at least 1"),
    ({"n_layer": -1}, "model.n_layer: -1"),
    ({"memory": -3}, "model.memory: -3 is negative; it must be 0 or more"),
    ({"clamp_len": -1}, "model.clamp_len: -1 is negative"),
    ({"cutoffs": (50, 20)}, "model.cutoffs: 20 does not come after 50"),
    ({"cutoffs": (20, 300)}, r"model.cutoffs: 300 is past the vocabulary \(100\); drop it"),
    ({"cutoffs": (0, 20)}, "model.cutoffs: 0 does not come after 0"),
    ({"encoding": "relativ"}, "model.encoding: 'relativ' is unknown; did you mean relative"),
    ({"encoding": "absolute"}, "model.memory: 4 with encoding absolute.*set model.memory to 0"),
    ({"encoding": "per_layer", "learned_positions": 8}, "model.memory: 4 with encoding per_layer"),
    ({"encoding": "shaw"}, "model.learned_positions: 0 with encoding shaw"),
    ({"learned_positions": 8}, "model.learned_positions: 8 with encoding relative"),
    ({"encoding": "shaw", "learned_positions": 3, "clamp_len": 9}, "model.clamp_len: 9 is past the 3 learned"),
    ({"d_embed": 8, "projections": "never"}, "model.d_embed: 8.*model.d_model 16.*set projections to 'needed'"),
    ({"div_val": 2, "cutoffs": (10,), "projections": "never"}, "model.d_embed: 16"),
    ({"div_val": 2}, "model.div_val: 2 without cutoffs"),
    ({"div_val": 8, "cutoffs": (10, 20)}, "model.div_val: 8 leaves no width"),
    ({"tie_projections": (True, True)}, "model.tie_projections: 2 values for 1 clusters"),
    ({"dropout": 1.0}, "model.dropout: 1.0 is not a rate"),
    ({"embedding_dropout": float("nan")}, "model.embedding_dropout: nan is not a rate"),
    ({"locked_dropout": ("attenton",)}, "model.locked_dropout: no dropout 'attenton'; did you mean attention"),
    ({"same_length": True, "memory": 0}, "model.same_length: with model.memory 0"),
    ({"d_model": 15}, "model.d_model: 15 is odd"),
    ({"share_biases": False, "encoding": "shaw", "learned_positions": 4}, "model.share_biases"),
    ({"final_norm": True}, "model.final_norm: true with norm 'post'"),
    ({"norm": "pre_keys"}, "model.norm: 'pre_keys' with encoding relative"),
    ({"auxiliary_targets": 1, "cutoffs": (10,)}, "model.auxiliary_targets: 1 with cutoffs"),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD, ids=[str(changes) for changes, _ in BAD])
def test_bad_models_are_refused_by_name(changes, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        replace(GOOD, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"segment": 0}, "training.segment: 0 is too small"),
        ({"lanes": 10, "accumulation": 3}, "training.accumulation: 3 does not divide training.lanes 10"),
        ({"schedule": "cosinus"}, "did you mean cosine"),
        ({"schedule": "inverse_square_root"}, "training.warm_up: 0"),
        ({"clip": -1.0}, "training.clip: -1.0 is negative"),
    ],
)
def test_bad_training_is_refused_by_name(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        TrainingConfig(**changes)


def test_parts_are_checked_against_each_other():
    model = replace(GOOD, memory=0, encoding="per_layer", learned_positions=64)
    with pytest.raises(ConfigError, match=r"training.segment: 128 tokens"):
        RunConfig(model=model, training=TrainingConfig(segment=128))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_json_round_trip(preset):
    assert read(RunConfig, json.loads(json.dumps(asdict(preset.run))), name="") == preset.run


def test_reading_is_strict():
    table = asdict(RunConfig(model=GOOD))
    with pytest.raises(ConfigError, match=r"no field model.memroy; did you mean model.memory\?"):
        read(RunConfig, {**table, "model": {**table["model"], "memroy": 4}}, name="")
    with pytest.raises(ConfigError, match=r"model.n_layer: expected a whole number, found '2'"):
        read(RunConfig, {**table, "model": {**table["model"], "n_layer": "2"}}, name="")
    with pytest.raises(ConfigError, match=r"model.n_layer: expected a whole number, found True"):
        read(RunConfig, {**table, "model": {**table["model"], "n_layer": True}}, name="")
    with pytest.raises(ConfigError, match=r"model.vocabulary is missing"):
        read(RunConfig, {"model": {}}, name="")
    with pytest.raises(ConfigError, match=r"model: expected a table of fields, found 3"):
        read(RunConfig, {"model": 3}, name="")


def test_dotted_overrides():
    run = override(
        find_preset("wikitext-103-standard").run,
        {"model.memory": "640", "model.cutoffs": "10,20,30", "training.learning_rate": "1e-4"},
    )
    assert (run.model.memory, run.model.cutoffs, run.training.learning_rate) == (640, (10, 20, 30), 1e-4)
    assert override(run, {"model.embedding_dropout": "none", "model.same_length": "true"}).model.same_length
    with pytest.raises(ConfigError, match=r"no field model.memroy; did you mean model.memory\?"):
        override(run, {"model.memroy": "1"})
    with pytest.raises(ConfigError, match=r"model.memory: expected a whole number, found 'many'"):
        override(run, {"model.memory": "many"})
    with pytest.raises(ConfigError, match=r"model is a group of fields"):
        override(run, {"model": "3"})


def test_an_unknown_preset_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="no preset enwik8-12; did you mean enwik8-12l"):
        find_preset("enwik8-12")


def test_a_run_says_what_it_is_and_that_is_no_option():
    config = RunConfig(model=GOOD)
    told = asdict(config)
    assert told["model_type"] == "transformer-xl"
    assert read(RunConfig, {name: value for name, value in told.items() if name != "model_type"}, name="") == config
    with pytest.raises(ConfigError, match="model_type: 'gpt2' is unknown"):
        read(RunConfig, {**told, "model_type": "gpt2"}, name="")
    names = [name for name, _, _ in options()]
    assert "model_type" not in names
    assert "model.encoding" in names


def test_every_option_is_explained():
    assert [name for name, _, explanation in options() if not explanation.strip()] == []
