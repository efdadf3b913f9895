"""Figures do not depend on how they were computed: lanes, segments, batches; and each says its rule."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.checkpoint import load_checkpoint
from transformer_xl.cli import main
from transformer_xl.config import EvaluationConfig, ModelConfig
from transformer_xl.errors import ConfigError
from transformer_xl.evaluation import evaluate, figures, make_rule, score_split
from transformer_xl.evaluation.ngram import witten_bell_bits
from transformer_xl.evaluation.scoring import lanes_for
from transformer_xl.library import load
from transformer_xl.model import TransformerXL


@pytest.fixture
def split(byte_store):
    return byte_store.split("test")


@pytest.fixture
def model(trained_run):
    return load_checkpoint(trained_run).model.double()


def losses(model, split, *, name="exact", lanes=None, **lengths):
    rule = make_rule(model, EvaluationConfig(**lengths), name=name, tokens=len(split), lanes=lanes)
    return score_split(model, split, rule=rule)


@pytest.mark.parametrize("same_length", [False, True])
def test_the_exact_figure_does_not_depend_on_lanes(model, split, same_length):
    one = losses(model, split, lanes=1, segment=8, memory=12, same_length=same_length)
    assert np.isnan(one).tolist() == [True] + [False] * (len(split) - 1)
    for lanes in (2, 3, 7, 16):
        many = losses(model, split, lanes=lanes, segment=8, memory=12, same_length=same_length)
        np.testing.assert_allclose(many, one, rtol=0, atol=1e-6)
        assert abs(np.nanmean(many) - np.nanmean(one)) < 1e-6


def test_nor_on_segments_where_every_token_sees_its_last_m(model, split):
    model.config = replace(model.config, same_length_keys="memory+1")
    base = losses(model, split, lanes=1, segment=1, memory=9, same_length=True)
    for segment in (3, 8, 50):
        np.testing.assert_allclose(
            losses(model, split, lanes=4, segment=segment, memory=9, same_length=True), base, rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("encoding", ["relative", "absolute"])
def test_sliding_agrees_with_a_single_pass_on_text_that_fits(split, encoding):
    torch.manual_seed(0)
    model = TransformerXL(
        ModelConfig(vocabulary=256, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, encoding=encoding)
    ).double()
    short = split.first(40)
    tokens = torch.from_numpy(short.tokens.astype(np.int64))[None]
    with torch.no_grad():
        whole = model.eval()(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT[0].numpy()
    for window in (39, 64):
        np.testing.assert_allclose(losses(model, short, name="sliding", segment=window)[1:], whole, rtol=0, atol=1e-6)


def test_sliding_gives_each_token_a_full_window(split):
    torch.manual_seed(0)
    model = (
        TransformerXL(ModelConfig(vocabulary=256, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32))
        .double()
        .eval()
    )
    tokens = torch.from_numpy(split.tokens.astype(np.int64))
    found = losses(model, split, name="sliding", segment=10)
    assert not np.isnan(found[1:]).any()
    with torch.no_grad():
        for place in (11, 50, len(split) - 1):
            window = tokens[place - 10 : place + 1][None]
            alone = model(window[:, :-1], targets_BT=window[:, -1:]).loss_BT.item()
            assert found[place] == pytest.approx(alone, abs=1e-6)


def test_the_papers_rule_drops_the_remainder_and_starts_cold(model, split):
    paper = losses(model, split, name="paper", segment=12, memory=12)
    column = len(split) // 10
    assert np.isnan(paper).sum() == 10 + len(split) % 10
    assert not np.isnan(paper[1:column]).any()
    exact = losses(model, split, segment=12, memory=12)
    assert abs(paper[column + 1] - exact[column + 1]) > 1e-6


def test_evaluation_leaves_the_model_as_it_was(model, split):
    model.train()
    before = model.config
    evaluate(model, split, rule=make_rule(model, EvaluationConfig(segment=8, memory=3, clamp_len=2), tokens=len(split)))
    assert model.config == before
    assert model.training


def test_units(split):
    values = np.full(len(split), math.log(2.0), dtype=np.float32)
    values[0] = np.nan
    rule = make_rule(
        TransformerXL(ModelConfig(vocabulary=2, d_model=2, n_layer=1, n_head=1, d_head=1, d_inner=1)),
        EvaluationConfig(),
        tokens=9,
    )
    found = figures(values, split=split, rule=rule, seconds=1.0)
    assert found.value("perplexity_per_word") == pytest.approx(2.0)
    assert found.value("bits_per_character") == pytest.approx(1.0)
    assert found.value("bits_per_byte") == pytest.approx(1.0)
    assert found.tokens == len(split) - 1


def test_lanes_cost_little_warm_up_and_memory():
    model = ModelConfig(vocabulary=10, n_layer=12, memory=2100)
    assert lanes_for(model, tokens=1000, segment=80) == 1
    assert 1 < lanes_for(model, tokens=5_000_000, segment=80) <= 16
    assert lanes_for(replace(model, n_layer=24, d_head=128, memory=3800), tokens=10**9, segment=128) == 1


def test_rounded_weights_cost_a_little_and_say_so(trained_run, split, capsys):
    model = load_checkpoint(trained_run).model
    bits = {}
    for weights in ("exact", "int8"):
        rule = make_rule(model, EvaluationConfig(segment=8, memory=12), tokens=len(split), weights=weights)
        assert ("weights rounded to int8" in rule.sentence()) == (weights == "int8")
        bits[weights] = evaluate(model, split, rule=rule).bits_per_token
    assert 0 < abs(bits["int8"] - bits["exact"]) < 0.05
    assert main(["evaluate", str(trained_run), "--weights", "int8", "--memory", "0", "--tokens", "50"]) == 2
    assert "'int8' with memory 0" in capsys.readouterr().err


def test_sliding_with_memory_is_refused(model, split):
    with pytest.raises(ConfigError, match=r"evaluation.memory: 4 with sliding windows"):
        losses(model, split, name="sliding", segment=8, memory=4)


def test_command_writes_figures_losses_and_sweep(trained_run, tmp_path, capsys, byte_store):
    assert main(["evaluate", str(trained_run), "--per-token", str(tmp_path / "losses.npy"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    written = np.load(tmp_path / "losses.npy")
    assert len(written) == result["tokens"] == len(byte_store.split("test")) - 1
    assert written.mean(dtype=np.float64) == pytest.approx(result["loss_nats"])
    assert "exact" in result["rule_in_words"]
    assert main(["evaluate", str(trained_run), "--sweep", "0,6,12,24"]) == 0
    shown = capsys.readouterr().out
    assert "(trained with)" in shown
    assert (trained_run / "figures" / "sweep-test.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((trained_run / "evaluations" / "test-sweep.json").read_text())["sweep"]) == 4
    assert (
        main(
            [
                "evaluate",
                str(trained_run),
                "--rule",
                "paper",
                "--memory",
                "20",
                "--clamp",
                "5",
                "--same-length",
                "--segment",
                "7",
            ]
        )
        == 0
    )
    assert "paper: 10 columns each starting cold" in capsys.readouterr().out


def test_witten_bell_by_hand():
    """Two symbols, order 2, worked out on paper: after 0 came 1 twice and 0 once; after 1 came 0 once."""
    train, test = np.array([0, 1, 0, 0, 1]), np.array([0, 1])
    uniform = 1 / 4
    unigram = {0: (3 + 2 * uniform) / (5 + 2), 1: (2 + 2 * uniform) / (5 + 2)}
    bigram = (2 + 2 * unigram[1]) / (3 + 2)
    assert witten_bell_bits(train, test, order=2, vocabulary=4) == pytest.approx(-math.log2(bigram))


def test_witten_bell_is_a_distribution():
    generator = np.random.default_rng(0)
    train = generator.integers(0, 5, 300)
    context = list(train[10:13])
    total = sum(
        2 ** -witten_bell_bits(train, np.array([*context, symbol]), order=4, vocabulary=5) for symbol in range(5)
    )
    assert total == pytest.approx(1.0)
    unseen = sum(
        2 ** -witten_bell_bits(np.zeros(50, int), np.array([3, 3, 3, symbol]), order=4, vocabulary=5)
        for symbol in range(5)
    )
    assert unseen == pytest.approx(1.0)


def test_command_reads_a_text_in_the_models_own_tokens(trained_run, tmp_path, capsys):
    text = "def f(x):\n    return x\n" * 20
    (tmp_path / "notes.txt").write_text(text, encoding="utf-8")
    before = sorted((trained_run / "evaluations").glob("*")) if (trained_run / "evaluations").exists() else []
    assert main(["evaluate", str(trained_run), "--text", str(tmp_path / "notes.txt"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    bits = load(trained_run).score(text).bits[1:]
    assert told["bits_per_byte"] == pytest.approx(bits.mean(), rel=0.01)  # segments are cut elsewhere
    assert told["text"] == str(tmp_path / "notes.txt")
    made = set((trained_run / "evaluations").glob("*")) - set(before)
    assert [path.name.startswith("text-notes.txt-") for path in made] == [True]
    for path in made:
        path.unlink()
    assert main(["evaluate", str(trained_run), "--text", "x", "--split", "valid"]) == 2
    assert capsys.readouterr().err == "txl: --split is of a store, and --text has none; leave one of them out\n"
    assert main(["evaluate", str(trained_run), "--text", "x", "--data", "y"]) == 2
    assert capsys.readouterr().err == "txl: --text and --data are two texts; give one of them\n"
