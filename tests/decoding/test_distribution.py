"""Questions about the next token, each against the full distribution; and that no tail is opened which could not matter."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import ModelConfig
from transformer_xl.decoding import distribution as module
from transformer_xl.decoding.distribution import (
    PLAIN,
    Adjustment,
    Distribution,
    Words,
    at_share,
    best,
    draw,
    nucleus,
    shortened,
)
from transformer_xl.errors import InputError
from transformer_xl.model.vocabulary import Vocabulary

V, D = 40, 8
HAIR = 1e-9


@pytest.fixture(autouse=True, scope="module")
def few_sorted_at_first():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW", 3)
        yield


def vocabulary(*, cutoffs=(8, 20), tail_bias=0.0, seed=0, scale=1.0):
    torch.manual_seed(seed)
    made = Vocabulary(ModelConfig(vocabulary=V, d_model=D, n_head=2, d_head=3, cutoffs=cutoffs, div_val=2)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, scale)
        if made.tail_bias_C is not None:
            made.tail_bias_C.add_(tail_bias)
    return made


def distribution(made, *, lanes=3, seed=1):
    hidden_BD = torch.randn(lanes, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        full_BV = made.log_probabilities(hidden_BD).numpy()
    return Distribution(made, hidden_BD, edges=made.config.cluster_edges), full_BV


@st.composite
def cases(draw_from):
    """A distribution with tails of any size and weight, the full one beside it, and an adjustment."""
    cutoffs = sorted(draw_from(st.sets(st.integers(1, V - 1), max_size=3)))
    made = vocabulary(
        cutoffs=tuple(cutoffs) if cutoffs else (5,),
        tail_bias=draw_from(st.sampled_from([-6.0, -2.0, 0.0, 3.0])),
        seed=draw_from(st.integers(0, 50)),
        scale=draw_from(st.sampled_from([0.3, 1.0, 2.0])),
    )
    how = Adjustment(
        temperature=draw_from(st.sampled_from([1.0, 1.0, 0.3, 0.9, 2.5])),
        penalty=draw_from(st.sampled_from([1.0, 1.3])),
        seen=np.array(sorted(draw_from(st.sets(st.integers(0, V - 1), max_size=6))), dtype=np.int64),
    )
    return *distribution(made, lanes=draw_from(st.integers(1, 4))), how


def scores(full_BV, how):
    """The definition, spelled out."""
    adjusted = full_BV.copy()
    if len(how.seen):
        adjusted[:, how.seen] *= how.penalty
    return adjusted / how.temperature


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, V))
def test_the_best_are_those_of_the_full_distribution(case, k):
    asked, full_BV, how = case
    for words, score_V in zip(
        asked.ask([lambda lane: best(lane, k, how=how)] * len(full_BV)), scores(full_BV, how), strict=True
    ):
        np.testing.assert_allclose(words.score_K, np.sort(score_V)[::-1][:k], rtol=0, atol=1e-10)
        np.testing.assert_allclose(words.score_K, score_V[words.token_K], rtol=0, atol=1e-10)


@settings(max_examples=250, deadline=None)
@given(cases(), st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]), st.sampled_from([0.0, 0.02, 0.3, 1.0]))
def test_the_nucleus_is_that_of_the_full_distribution(case, p, min_p):
    """With so few words sorted at first that most nuclei need more."""
    asked, full_BV, how = case
    found = asked.ask([lambda lane: nucleus(lane, p=p, min_p=min_p, how=how)] * len(full_BV))
    for words, score_V in zip(found, scores(full_BV, how), strict=True):
        probability_V = np.exp(score_V - score_V.max())
        probability_V /= probability_V.sum()
        order = np.argsort(-probability_V)
        before = probability_V[order].cumsum() - probability_V[order]
        surely = (before < p - HAIR) & (probability_V[order] > min_p * probability_V.max() * (1 + HAIR))
        perhaps = (before < p + HAIR) & (
            probability_V[order] >= min_p * probability_V.max() * (1 - HAIR)
        )  # 0, where it is too small for a float
        surely[0] = perhaps[0] = True
        assert set(order[surely]) <= set(words.token_K) <= set(order[perhaps])
        np.testing.assert_allclose(words.score_K, score_V[words.token_K], rtol=0, atol=1e-10)


@settings(max_examples=150, deadline=None)
@given(cases(), st.floats(0.0, 1.0, exclude_max=True))
def test_a_share_falls_where_the_full_distribution_says(case, share):
    asked, full_BV, how = case
    for token, score_V in zip(
        asked.ask([lambda lane: at_share(lane, share, how=how)] * len(full_BV)), scores(full_BV, how), strict=True
    ):
        probability_V = np.exp(score_V - score_V.max())
        reached_V = (probability_V / probability_V.sum()).cumsum()
        assert reached_V[token] >= share - HAIR
        assert token == 0 or reached_V[token - 1] <= share + HAIR


@pytest.mark.parametrize(
    "question",
    [
        lambda lane: best(lane, 5),
        lambda lane: best(lane, 5, how=Adjustment(temperature=0.5, penalty=1.2, seen=np.array([1, 30]))),
        lambda lane: nucleus(lane, p=0.9),
        lambda lane: nucleus(lane, p=0.9, how=Adjustment(temperature=0.8)),
        lambda lane: nucleus(lane, min_p=0.05, how=Adjustment(temperature=2.0)),
        lambda lane: at_share(lane, 0.4),
    ],
)
def test_no_tail_is_opened_when_the_head_holds_everything(question):
    asked, _ = distribution(vocabulary(tail_bias=-30.0))
    asked.ask([question] * 3)
    assert asked.opened == 0


def test_only_the_lanes_that_need_a_tail_open_it():
    made = vocabulary(tail_bias=-30.0)
    hidden_BD = torch.randn(3, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        made.tail_weight_CE[0] = 0.0
        made.tail_weight_CE[0, 0] = 1000.0  # the first coordinate decides for tail 1
        hidden_BD[:, 0] = torch.tensor([-1.0, 1.0, -1.0])
    asked = Distribution(made, hidden_BD, edges=made.config.cluster_edges)
    words = asked.ask([lambda lane: best(lane, 3)] * 3)
    assert asked.opened == 1
    assert [bool((found.token_K >= 8).any()) for found in words] == [False, True, False]


def test_the_share_opens_the_one_tail_it_falls_into():
    asked, _ = distribution(vocabulary(tail_bias=0.0), lanes=1)
    tails = asked.lanes[0].closed
    head = 1.0 - sum(map(math.exp, tails.values()))
    (token,) = asked.ask([lambda lane: at_share(lane, head + 0.5 * math.exp(tails[1]))])
    assert 8 <= token < 20
    assert asked.opened == 1


def test_every_tail_is_opened_when_everything_is_asked_for():
    asked, full_BV = distribution(vocabulary())
    words = asked.ask([lambda lane: best(lane, V)] * 3)
    assert asked.opened == 6
    for found, full_V in zip(words, full_BV, strict=True):
        np.testing.assert_allclose(found.score_K[np.argsort(found.token_K)], full_V, rtol=0, atol=1e-10)


def test_a_plain_softmax_has_nothing_to_open():
    torch.manual_seed(0)
    made = Vocabulary(ModelConfig(vocabulary=V, d_model=D, n_head=2, d_head=3)).double()
    made.initialise()
    asked, full_BV = distribution(made)
    words = asked.ask([lambda lane: best(lane, 4)] * 3)
    np.testing.assert_allclose(words[1].score_K, np.sort(full_BV[1])[::-1][:4], rtol=0, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, V), st.sampled_from([0.05, 0.6, 0.95, 1.0]), st.sampled_from([0.0, 0.1]))
def test_within_the_best_the_same_rules_hold(case, k, p, min_p):
    """Shortening all words is the nucleus of the vocabulary."""
    asked, full_BV, how = case
    lanes = len(full_BV)
    everything = asked.ask([lambda lane: best(lane, V, how=how)] * lanes)
    expected = asked.ask([lambda lane: nucleus(lane, p=p, min_p=min_p, how=how)] * lanes)
    for words, nucleus_words in zip(everything, expected, strict=True):
        assert shortened(words, p=p, min_p=min_p).token_K.tolist() == nucleus_words.token_K.tolist()
        few = shortened(Words(token_K=words.token_K[:k], score_K=words.score_K[:k]), p=p, min_p=min_p)
        mass = np.exp(few.score_K).sum() / np.exp(words.score_K[:k]).sum()
        assert mass >= p - HAIR or min_p


def test_very_low_temperatures_stay_in_range():
    asked, full_BV = distribution(vocabulary(tail_bias=3.0))
    cold = Adjustment(temperature=1e-4)
    for question in (lambda lane: nucleus(lane, p=0.9, how=cold), lambda lane: best(lane, 3, how=cold)):
        for words, full_V in zip(asked.ask([question] * 3), full_BV, strict=True):
            assert words.token_K[0] == full_V.argmax()
            assert draw(words, 0.999) == full_V.argmax()
    assert asked.ask([lambda lane: at_share(lane, 0.5, how=cold)] * 3) == full_BV.argmax(-1).tolist()


def test_drawing_follows_the_numbers_not_the_scores():
    words = Words(token_K=np.array([7, 2, 5]), score_K=np.log([0.5, 0.3, 0.2]))
    assert [draw(words, share) for share in (0.0, 0.29, 0.31, 0.49, 0.51, 0.99)] == [2, 2, 5, 5, 7, 7]


def test_asking_for_none_is_named():
    asked, _ = distribution(vocabulary())
    with pytest.raises(InputError, match="ask for at least 1"):
        asked.ask([lambda lane: best(lane, 0, how=PLAIN)] * 3)
