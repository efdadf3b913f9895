"""What the analysis gathers, against the slow reference that spells the paper's terms out, over several segments with memory."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from small_models import build
from transformer_xl.analysis.attention import (
    attention_maps,
    average_attention,
    top_keys,
    widest_of_different_layers,
)
from transformer_xl.analysis.terms import TOTAL, by_distance, recording, scores_by_distance
from transformer_xl.config import EvaluationConfig
from transformer_xl.errors import InputError
from transformer_xl.model.attention import Mask
from transformer_xl.model.reference import attention_probabilities, attention_terms

WITH_MEMORY = [
    {"encoding": "relative"},
    {"encoding": "relative", "clamp_len": 3},
    {"encoding": "relative", "same_length_keys": "memory+1"},
    {"encoding": "relative", "norm": "pre", "share_biases": False},
    {"encoding": "relative", "initial_memory": "zeros"},
    {"encoding": "shaw"},
    {"encoding": "shaw", "clamp_len": 3, "norm": "pre"},
    {"encoding": "shaw_biased", "same_length_keys": "memory+1"},
]
WITHOUT_MEMORY = [
    {"encoding": "relative", "memory": 0},
    {"encoding": "absolute", "memory": 0},
    {"encoding": "absolute", "memory": 0, "norm": "pre_keys"},
    {"encoding": "per_layer", "memory": 0},
]
NAMES = {"a": "content", "b": "content_distance", "c": "content_bias", "d": "distance_bias"}
TERMS_OF = {"relative": "abcd", "shaw": "ab", "shaw_biased": "abcd", "absolute": "a", "per_layer": "a"}
SEGMENT = 4


def called(changes):
    return "-".join(str(value) for value in changes.values())


def text(model, length=31):
    return np.random.default_rng(0).integers(model.config.vocabulary, size=length)


def lengths_of(model, segment=SEGMENT):
    return EvaluationConfig(segment=segment, memory=model.config.memory, clamp_len=model.config.clamp_len)


@contextmanager
def attending(model, function):
    model.attend = function
    try:
        yield
    finally:
        model.attend = None


def brute_force(model, tokens, *, segment=SEGMENT):
    """[(layer, position)] -> {term: [H, keys]}, oldest key first, from the reference's own terms and softmax."""
    memory_length = model.config.memory
    if memory_length:
        model.set_lengths(same_length=True)
    rows, state = {}, {"calls": 0, "start": 0}

    def slow(query_BHTK, key_BHSK, value_BHSK, *, distances, mask_BTS, dropout):
        layer = state["calls"] % model.config.n_layer
        state["calls"] += 1
        terms = attention_terms(query_BHTK, key_BHSK, distances=distances)
        present = TERMS_OF[model.config.encoding]
        by_term = {TOTAL: terms.sum()} | {term: getattr(terms, NAMES[term]) for term in present}
        for term, score in by_term.items():
            probability = attention_probabilities(score, width=query_BHTK.shape[-1], mask_BTS=mask_BTS)
            for t in range(query_BHTK.shape[2]):
                seen = ~mask_BTS[0, t]
                rows.setdefault((layer, state["start"] + t), {})[term] = probability[0, :, t, seen].numpy()
            if term == TOTAL:
                total = probability
        return total @ value_BHSK

    memory = None
    with attending(model, slow), torch.no_grad():
        for state["start"] in range(0, len(tokens), segment):
            part = torch.as_tensor(tokens[state["start"] : state["start"] + segment])[None]
            memory = model(part, memory=memory).memory
    model.set_lengths(same_length=False)
    return rows


def averaged(rows, *, layers, first):
    """Over the queries with the most keys, from position `first` on; by distance, and the mean entropy in bits."""
    most = max(row[TOTAL].shape[1] for row in rows.values())
    full = {place: row for place, row in rows.items() if row[TOTAL].shape[1] == most and place[1] >= first}
    average, entropy = {}, []
    for layer in range(layers):
        mine = [row for place, row in full.items() if place[0] == layer]
        entropy.append(np.mean([-(row[TOTAL] * np.log2(row[TOTAL])).sum(-1) for row in mine], axis=0))
        for term in mine[0]:
            average.setdefault(term, []).append(np.mean([row[term][:, ::-1] for row in mine], axis=0))
    return {term: np.stack(values) for term, values in average.items()}, np.stack(entropy), len(full) // layers


@pytest.mark.parametrize("changes", WITH_MEMORY + WITHOUT_MEMORY, ids=called)
def test_averages_are_those_of_the_reference(changes):
    model = build(**changes)
    tokens = text(model)
    found = average_attention(model, tokens, lengths=lengths_of(model))
    rows = brute_force(model, tokens)
    average, entropy_NH, queries = averaged(rows, layers=2, first=found.span - 1 if model.config.memory else 0)
    assert found.queries == queries
    assert list(found.average) == [TOTAL, *TERMS_OF[model.config.encoding]]
    for term, values_NHR in average.items():
        np.testing.assert_allclose(found.average[term], values_NHR, rtol=0, atol=1e-10)
        np.testing.assert_allclose(found.average[term].sum(-1), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.entropy_bits_NH, entropy_NH, rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", WITH_MEMORY + WITHOUT_MEMORY, ids=called)
def test_maps_are_those_of_the_reference(changes):
    """Also where the reading starts in the middle of the text."""
    model = build(**changes)
    tokens = text(model, 60)
    rows = brute_force(model, tokens)
    heads, positions = [(1, 0), (0, 1)], [58, 2, 59]
    for found in attention_maps(model, tokens, lengths=lengths_of(model), heads=heads, positions=positions, rows=3):
        assert [row.position for row in found.rows] == list(range(found.position - 2, found.position + 1))
        for row in found.rows:
            keys = row.position + 1 - row.first_key
            assert list(row.probability) == [TOTAL, *TERMS_OF[model.config.encoding]]
            for term, probability in row.probability.items():
                expected = rows[found.head[0], row.position][term][found.head[1]]
                # zeros that stand before the text are no tokens of it
                np.testing.assert_allclose(probability, expected[-keys:], rtol=0, atol=1e-10)
                assert len(expected) == keys or changes.get("initial_memory") == "zeros"


def test_every_head_of_every_position_is_asked_for_in_order():
    model = build()
    maps = attention_maps(model, text(model), lengths=lengths_of(model), heads=[(1, 1), (0, 0)], positions=[20, 9])
    assert [(one.position, one.head) for one in maps] == [(20, (1, 1)), (20, (0, 0)), (9, (1, 1)), (9, (0, 0))]


@pytest.mark.parametrize("changes", WITH_MEMORY, ids=called)
def test_averages_do_not_depend_on_how_much_is_read_at_once(changes):
    model = build(**changes)
    tokens = text(model, 40)
    base = average_attention(model, tokens, lengths=lengths_of(model, 4))
    for segment in (1, 7, 40, 64):
        other = average_attention(model, tokens, lengths=lengths_of(model, segment))
        assert other.queries == base.queries
        for term, values_NHR in base.average.items():
            np.testing.assert_allclose(other.average[term], values_NHR, rtol=0, atol=1e-12)


@pytest.mark.parametrize("changes", [WITH_MEMORY[0], WITH_MEMORY[-1], WITHOUT_MEMORY[0]], ids=called)
def test_single_precision_is_close(changes):
    model = build(**changes)
    tokens = text(model, 60)
    exact = average_attention(model, tokens, lengths=lengths_of(model))
    found = average_attention(model.float(), tokens, lengths=lengths_of(model))
    for term, values_NHR in exact.average.items():
        np.testing.assert_allclose(found.average[term], values_NHR, rtol=0, atol=1e-5)


@pytest.mark.parametrize("memory", [0, 3, 5, 9])
@pytest.mark.parametrize("encoding", ["relative", "shaw", "shaw_biased"])
def test_terms_add_up_to_the_references_scores(encoding, memory):
    """Memory shorter than, as long as and longer than the span of 6 keys."""
    model, T, span = build(encoding=encoding), 4, 6
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(2, 2, length, 3, generator=generator).double() for length in (T, memory + T))
    distances = model.encoding.distances(memory + T)[0]
    mask_BTS = Mask(memory=memory, segment=T, valid_B=None, visible_distance=span - 1, device=query.device).cells_BTS
    with torch.no_grad():
        scores = scores_by_distance(query, key, distances=distances, mask_BTS=mask_BTS, span=span)
        terms = attention_terms(query, key, distances=distances)
    shape = scores.terms["a"].shape
    seen = torch.ones(1, T, span, dtype=torch.bool) if scores.unseen_BTR is None else ~scores.unseen_BTR
    visible = ~mask_BTS[:, None].expand(2, 2, T, memory + T)
    for term, name in NAMES.items():
        expected = getattr(terms, name)[visible] / 3**0.5
        part = scores.terms.get(term, torch.zeros(shape)).expand(shape)
        torch.testing.assert_close(part[seen[:, None].expand(shape)].double(), expected, rtol=0, atol=1e-10)
    total = sum(scores.terms.values()).expand(shape)[seen[:, None].expand(shape)]
    torch.testing.assert_close(total, terms.sum()[visible] / 3**0.5, rtol=0, atol=1e-10)


def test_by_distance_is_a_view_whose_rows_end_at_the_query():
    by_key_BHTW = torch.arange(3 * 4).view(1, 1, 3, 4)
    assert by_distance(by_key_BHTW, span=2)[0, 0].tolist() == [[0, 1], [5, 6], [10, 11]]
    by_distance(by_key_BHTW, span=2).fill_(-1)
    assert by_key_BHTW[0, 0].tolist() == [[-1, -1, 2, 3], [4, -1, -1, 7], [8, 9, -1, -1]]


@pytest.mark.parametrize("changes", WITH_MEMORY + WITHOUT_MEMORY, ids=called)
def test_a_recorded_model_answers_as_always(changes):
    model = build(**changes)
    memory = model.config.memory
    if memory:
        model.set_lengths(same_length=True)
    span = SEGMENT if not memory else model.config.visible_distance + 1
    seen, states = [], {True: None, False: None}
    tokens = torch.as_tensor(text(model))[None]
    for start in range(0, tokens.shape[1], SEGMENT):
        part = tokens[:, start : start + SEGMENT]
        with torch.no_grad():
            usual = model(part, memory=states[False])
            with recording(model, span=span, record=lambda layer, scores, probability: seen.append(layer)):
                recorded = model(part, memory=states[True])
        states = {False: usual.memory, True: recorded.memory}
        torch.testing.assert_close(recorded.hidden_BTD, usual.hidden_BTD, rtol=0, atol=1e-10)
    assert seen == [0, 1] * 8
    assert model.attend is None


def test_the_model_is_as_it_was_afterwards_even_after_an_error():
    model = build(train=True)
    config = model.config
    average_attention(model, text(model), lengths=EvaluationConfig(segment=5, memory=4))
    assert (model.config, model.training, model.attend) == (config, True, None)

    def stop(amount=1, *, note=None):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        average_attention(model, text(model), lengths=EvaluationConfig(segment=5, memory=4), advance=stop)
    assert (model.config, model.training, model.attend) == (config, True, None)


def test_memory_share_is_what_lies_before_the_segment():
    """Counted query by query, over whole segments of full queries."""
    model = build()
    tokens = text(model, 6 + 5 * SEGMENT)  # segments of full queries begin at 8
    found = average_attention(model, tokens[: 8 + 4 * SEGMENT], lengths=lengths_of(model))
    rows = brute_force(model, tokens)
    queries = range(found.span - 1, 8 + 4 * SEGMENT)
    shares_by_start = []  # whichever token segments begin at, on average
    for shift in range(SEGMENT):
        inside = [(position - shift) % SEGMENT + 1 for position in queries]
        total = sum(rows[1, position][TOTAL][:, :-own].sum(-1) for position, own in zip(queries, inside, strict=True))
        shares_by_start.append(total / len(queries))
    np.testing.assert_allclose(found.memory_share[1], np.mean(shares_by_start, axis=0), rtol=0, atol=1e-10)
    assert (average_attention(build(memory=0), tokens, lengths=EvaluationConfig(segment=4)).memory_share == 0).all()


def test_heads_are_ranked_by_how_far_they_look():
    model = build(n_layer=3)
    found = average_attention(model, text(model), lengths=lengths_of(model))
    distance_NH = (found.average[TOTAL] * np.arange(found.span)).sum(-1)
    ranked = [distance_NH[head] for head in found.widest()]
    assert sorted(ranked, reverse=True) == ranked
    assert len(set(found.widest())) == 6
    chosen = widest_of_different_layers(found, heads=2)
    assert len({layer for layer, _ in chosen}) == 2
    assert found.widest()[0] in chosen
    assert len(widest_of_different_layers(found, heads=9)) == 3


def test_a_fifth_of_the_keys_is_marked():
    assert top_keys(np.array([0.1, 0.5, 0.0, 0.2, 0.2])) == [1]
    assert top_keys(np.array([0.1, 0.3, 0.0, 0.2, 0.2, 0.2])) == [1, 3]
    assert top_keys(np.array([1.0])) == [0]


def test_what_cannot_be_looked_at_is_one_sentence():
    model = build()
    tokens, lengths = text(model), lengths_of(model)
    with pytest.raises(InputError, match=r"a text of 1 tokens has nothing to look back at"):
        average_attention(model, tokens[:1], lengths=lengths)
    with pytest.raises(InputError, match=r"has 5 tokens, and a memory of 6 is full only from token 6 on.*`memory=4`"):
        average_attention(model, tokens[:5], lengths=lengths)
    with pytest.raises(InputError, match=r"fewer than one segment of 4"):
        average_attention(build(memory=0), tokens[:3], lengths=EvaluationConfig(segment=4))
    with pytest.raises(InputError, match=r"no head 3.1: this model has layers 1 to 2 with heads 1 to 2"):
        attention_maps(model, tokens, lengths=lengths, heads=[(2, 0)], positions=[3])
    with pytest.raises(InputError, match=r"no token 32 in a text of 31 tokens"):
        attention_maps(model, tokens, lengths=lengths, heads=[(0, 0)], positions=[31])
