"""The parts of a study: differences between models, attention lengths, verdicts, shuffled sentences."""

import math

import numpy as np
import pytest
import torch

from small_models import build
from transformer_xl.config.sources import resolve
from transformer_xl.console import progress
from transformer_xl.data.corpora.recipes import RECIPES
from transformer_xl.data.text.tokenizers import WordTokenizer
from transformer_xl.errors import ConfigError, DataError
from transformer_xl.presets import find_preset
from transformer_xl.studies import tables as ablation
from transformer_xl.studies.lengths import Point, best_point, sweep_lengths, trained_attention, window_losses
from transformer_xl.studies.models import asked_model, in_a_name
from transformer_xl.studies.report import mean_and_spread, several
from transformer_xl.studies.scales import SCALES, find_scale
from transformer_xl.studies.sentences import in_sentences
from transformer_xl.studies.tables import ENCODING, FRAGMENTATION, LENGTHENED, MEMORY_MATCHED, column_at
from transformer_xl.studies.verdicts import Claim, Column, compared


def config_of(base, variant):
    vocabulary = RECIPES[base.corpus].counts.vocabulary or 793_471
    return asked_model(base, variant, corpus=base.corpus, vocabulary=vocabulary, seed=1).config


# --- models


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("study", [ENCODING, FRAGMENTATION, MEMORY_MATCHED], ids=lambda study: study.title[:12])
def test_every_row_is_a_model_at_every_scale(scale, study):
    base = getattr(find_scale(scale), study.base)
    start = config_of(base, ablation.XL)
    for row in study.rows:
        config, variant = config_of(base, row.variant), row.variant
        fed = config.training.segment + config.training.context
        assert fed == round(start.training.segment * variant.length)
        assert config.training.context == (fed // 2 if variant.half_loss else 0)
        assert config.model.memory == (start.model.memory if variant.recurrence else 0)
        assert config.model.encoding == variant.encoding
        assert config.training.lanes == start.training.lanes
        assert config.training.steps == variant.steps * start.training.steps


def test_the_papers_lengths_at_the_papers_scale():
    base = find_scale("paper").ablation
    assert config_of(base, ablation.XL).training.segment == 128
    assert trained_attention(config_of(base, ablation.SHAW)) == 256
    assert config_of(base, ablation.LONGER).training.segment == 176
    longer_half = config_of(base, ablation.LONGER_HALF).training
    assert (longer_half.context, longer_half.segment) == (86, 86)


def test_the_tiny_scale_is_what_its_preset_and_words_say():
    base = find_scale("tiny").ablation
    preset = find_preset("modern-byte").run
    config = resolve(preset, vocabulary=205, files=[], words=base.words)
    assert config.model.n_layer == preset.model.n_layer
    assert config.training.average == "ema"
    assert config_of(base, ablation.XL).model == config.model


def test_names_of_corpora_become_names_of_folders():
    assert in_a_name("ptb, lines shuffled") == "ptb-lines-shuffled"
    assert in_a_name("../..") == "text"


def test_an_unknown_scale_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="no scale papper; did you mean paper"):
        find_scale("papper")


def test_a_corpus_of_too_few_words_is_refused_by_name():
    base = find_scale("tiny").sentences
    with pytest.raises(
        DataError, match=r"notes has a vocabulary of 300, too small .* give a larger corpus, such as ptb"
    ):
        asked_model(base, ablation.XL, corpus="notes", vocabulary=300, seed=1)


# --- attention lengths


def test_windows_score_every_token_once_in_its_window(byte_store):
    """Against each token read by hand in the window it belongs to."""
    split = byte_store.split("test").first(47)
    tokens = torch.from_numpy(np.asarray(split.tokens, dtype=np.int64))
    for encoding in ("absolute", "per_layer"):
        model = build(
            encoding=encoding, memory=0, vocabulary=256, **({"learned_positions": 8} if encoding == "per_layer" else {})
        ).eval()
        with progress("windows", total=46) as advance:
            losses = window_losses(model, split, window=8, advance=advance)
        assert math.isnan(losses[0])
        for target in range(1, 47):
            end = 8 if target <= 8 else min(46, 8 + 4 * math.ceil((target - 8) / 4))
            fed = tokens[None, end - 8 : end]
            with torch.inference_mode():
                loss_BT = model(fed, targets_BT=tokens[None, end - 7 : end + 1]).loss_BT
            assert losses[target] == pytest.approx(float(loss_BT[0, target - (end - 7)]), rel=1e-5)


def test_a_split_shorter_than_its_window_is_one_window(byte_store):
    split = byte_store.split("test").first(6)
    model = build(encoding="absolute", memory=0, vocabulary=256).eval()
    with progress("windows", total=5) as advance:
        losses = window_losses(model, split, window=8, advance=advance)
    assert np.isnan(losses).tolist() == [True, False, False, False, False, False]


def test_learned_positions_end_the_sweep():
    base = find_scale("tiny").ablation
    assert sweep_lengths(config_of(base, ablation.XL), segment=32) == [16, 32, 48, 64, 96, 128, 160]
    assert sweep_lengths(config_of(base, ablation.PER_LAYER_HALF), segment=32) == [16, 32]
    assert sweep_lengths(config_of(base, ablation.LONGER), segment=32) == [16, 32, 44, 48, 64, 96, 128, 160]


def test_the_best_length_is_the_shortest_that_attains_the_figure():
    points = [
        Point(attention=attention, value=value, loss_nats=0.0, blocks=(), tokens=1, seconds=0.0, rule="")
        for attention, value in ((64, 2.3), (128, 2.1009), (192, 2.1005), (256, 2.1001), (320, 2.2))
    ]
    assert best_point(points, unit="bits_per_character").attention == 128
    assert best_point(points[:1], unit="bits_per_character").attention == 64


# --- verdicts


def figures_about(value, *, seeds=5, apart=0.0):
    """A row's figure: perplexities around this one, seed by seed, over places that are hard for everybody."""
    hard = np.linspace(-1, 1, 50)
    return Column(
        blocks=[math.log(value) + hard + apart * (seed - 2) for seed in range(seeds)], unit="perplexity_per_word"
    )


def told(better, worse, *, denied=False, same_row=False):
    claim = Claim(text="it is", better=("a", "x"), worse=("a" if same_row else "b", "y"), denied=denied)
    rows = {"a": {"x": better}, "b": {}}
    rows["a" if same_row else "b"]["y"] = worse
    return claim.told(rows)


def test_a_claim_appears_only_where_its_interval_excludes_zero():
    found = told(figures_about(20.0), figures_about(22.0))
    assert found.verdict == "appears"
    assert found.effect.value == pytest.approx(2.0)
    assert 0 < found.effect.low < 2.0 < found.effect.high
    assert told(figures_about(22.0), figures_about(20.0)).verdict == "does not appear"
    noisy = told(figures_about(20.0, apart=0.2), figures_about(21.0, apart=0.2))
    assert noisy.verdict == "cannot tell"
    assert noisy.effect.low < 0 < noisy.effect.high
    # The same models at another length: how far seeds lie apart does not matter.
    assert told(figures_about(20.0, apart=0.2), figures_about(21.0, apart=0.2), same_row=True).verdict == "appears"


def test_two_seeds_tell_nothing():
    assert told(figures_about(20.0, seeds=2), figures_about(30.0, seeds=2)).verdict == "cannot tell"


def test_that_something_does_not_gain_needs_an_interval_without_gain():
    assert told(figures_about(21.0), figures_about(20.0), denied=True).verdict == "appears"
    assert told(figures_about(20.0), figures_about(20.0), denied=True).verdict == "appears"
    assert told(figures_about(19.0), figures_about(20.0), denied=True).verdict == "does not appear"
    assert told(figures_about(19.0, apart=0.2), figures_about(20.0), denied=True).verdict == "cannot tell"
    assert told(None, figures_about(20.0), denied=True).verdict == "cannot tell"


def test_lengths_are_compared_seed_by_seed():
    assert compared([1.0, 1.1], [1.2, 1.3]) == "appears"
    assert compared([1.2, 1.3], [1.0, 1.1]) == "does not appear"
    assert compared([1.0, 1.25], [1.2, 1.3]) == "cannot tell"
    assert compared([2.0], [2.0]) == "does not appear"


def test_a_claim_of_the_paper_holds_on_the_papers_figures():
    """Every ordering listed must be one that the paper's own table shows, where it has both rows."""
    for study in (ENCODING, FRAGMENTATION, MEMORY_MATCHED):
        columns = {}
        for row in study.rows:
            best, init = row.paper_best, row.paper_init or row.paper_best
            if best is not None:
                columns[row.variant.name] = {"best": figures_about(best), "level": figures_about(init)}
                columns[row.variant.name]["longer"] = figures_about(best)
        claims = [*study.claims]
        if study.lengthened:
            claims += study.lengthened.claims
            columns[LENGTHENED] = {
                column_at(share): figures_about(value) for share, (value, _) in study.lengthened.paper.items()
            }
        known = [claim for claim in claims if claim.worse[0] in columns]
        assert len(claims) - len(known) == (3 if study is ENCODING else 0)
        for claim in known:
            assert claim.told(columns).verdict == "appears", claim.text


def test_means_show_how_far_the_seeds_lie():
    assert mean_and_spread([2.0], digits=2) == "2.00"
    assert mean_and_spread([2.0, 2.2], digits=2) == "2.10 ± 0.10"
    assert several([64.0, 64.0]) == "64"
    assert several([320.0, 64.0]) == "64 to 320"


# --- sentences


def lines_of(split, mark):
    tokens = np.asarray(split.tokens)
    return [tuple(line) for line in np.split(tokens, np.flatnonzero(tokens == mark) + 1) if len(line)]


def test_shuffled_lines_are_the_same_lines_in_another_order(word_store, tmp_path):
    assert isinstance(word_store.tokenizer, WordTokenizer)
    store = in_sentences(word_store, out=tmp_path)
    mark = word_store.tokenizer.mark
    before, after = lines_of(word_store.split("train"), mark), lines_of(store.split("train"), mark)
    assert sorted(before) == sorted(after)
    assert before != after
    made_at = (store.folder / "manifest.json").stat().st_mtime_ns
    assert (in_sentences(word_store, out=tmp_path).folder / "manifest.json").stat().st_mtime_ns == made_at
    assert store.split("test").bytes == word_store.split("test").bytes
