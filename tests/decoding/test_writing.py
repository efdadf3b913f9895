"""Tokens drawn below Python are those that the slow path draws: same model, same seed, same words."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import build
from transformer_xl import native
from transformer_xl.decoding import Sampling
from transformer_xl.decoding.writing import start_lanes
from transformer_xl.errors import InputError
from transformer_xl.inference import Engine

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 10_000),
)


def texts(model, prompts, chosen, *, fast, steps=30, leave=None, weights="exact", few=1):
    lanes = start_lanes(model, prompts, samplings=chosen, weights=weights)
    lanes.reader.writes = lanes.reader.writes and fast
    found = {author.number: [] for author in lanes.writers}
    step = 0
    while step < steps:
        left = 11 - step if leave is not None and step < 11 else steps - step
        for drawn in lanes.next_few(min(few, left)):
            for author, picked in zip(lanes.writers, drawn, strict=True):
                found[author.number].append(picked.token)
            step += 1
        if step == 11 and leave is not None and len(lanes) > 1:
            lanes.leave([author for author in lanes.writers if author.number == leave])
    return found


@given(
    chosen=st.lists(samplings, min_size=1, max_size=14),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    few=st.sampled_from([1, 2, 7, 100]),
    shape=st.sampled_from(
        [
            {"memory": 7},
            {"memory": 20, "norm": "pre", "final_norm": True},
            {"memory": 9, "vocabulary": 700, "tie_embeddings": False},
            {"memory": 5, "encoding": "shaw", "learned_positions": 30, "initial_memory": "zeros"},
            {"memory": 6, "same_length": True},
            {"memory": 6, "neighbours": 4},
            {"memory": 9, "ngrams": (2, 3, 5), "ngram_rows": 17, "d_ngram": 4},
        ]
    ),
)
@settings(max_examples=40, deadline=None)
def test_the_same_words_as_the_slow_path(chosen, dtype, few, shape):
    model = build(**shape).to(dtype)
    prompts = [[1 + lane % 3] * (1 + lane % 4) for lane in range(len(chosen))]
    slow = texts(model, prompts, chosen, fast=False, leave=0)
    assert texts(model, prompts, chosen, fast=True, leave=0, few=few) == slow


def test_the_same_words_from_bytes():
    model = build(memory=12, vocabulary=50).float()
    chosen = [Sampling(seed=seed, top_k=20, top_p=0.9) for seed in range(5)]
    options = {"prompts": [[1, 2]] * 5, "chosen": chosen, "weights": "int8"}
    assert texts(model, fast=True, **options) == texts(model, fast=False, **options)


def test_the_kernel_is_really_used(monkeypatch):
    calls = []
    write = Engine.write
    monkeypatch.setattr(Engine, "write", lambda self, *arguments: (calls.append(1), write(self, *arguments))[1])
    texts(build(memory=7), [[1]], [Sampling()], fast=True, steps=9)
    assert len(calls) == 8  # the first is drawn from what the prompt left
    texts(build(memory=7), [[1]], [Sampling(repetition_penalty=1.2)], fast=True, steps=9)
    assert len(calls) == 8


def test_several_tokens_of_a_call_are_those_of_as_many_calls(monkeypatch):
    """Past the end of the buffers too, where memory moves to the front."""
    model, chosen = build(memory=9), [Sampling(seed=seed, top_k=5) for seed in range(3)]
    one_by_one = texts(model, [[1]] * 3, chosen, fast=True, steps=1200)
    calls = []
    write = Engine.write
    monkeypatch.setattr(Engine, "write", lambda self, *arguments: (calls.append(1), write(self, *arguments))[1])
    assert texts(model, [[1]] * 3, chosen, fast=True, steps=1200, few=100) == one_by_one
    assert len(calls) < 20


def test_under_the_rule_of_segments_each_call_is_one(monkeypatch):
    model = build(memory=9)
    reader = Engine(model, sight="segment")
    reader.read(torch.tensor([[1, 2]]))
    assert reader.most_steps == 1
    assert Engine(model).most_steps > 100


def test_words_that_are_alike_come_in_the_order_of_their_numbers():
    """Whole rows of equal logits: top-k takes the first of them, in both ways."""
    model = build(memory=7, vocabulary=60)
    with torch.no_grad():
        model.vocabulary.tables[0][5:] = model.vocabulary.tables[0][5]
        model.vocabulary.bias_V.zero_()
    chosen = [Sampling(seed=seed, top_k=8) for seed in range(8)]
    fast = texts(model, [[1]] * 8, chosen, fast=True)
    assert fast == texts(model, [[1]] * 8, chosen, fast=False)
    assert {token for text in fast.values() for token in text} <= set(range(13))


def test_a_model_that_gives_no_numbers_is_refused():
    model = build(memory=7)
    lanes = start_lanes(model, [[1, 2]], samplings=[Sampling()])
    lanes.next()
    with torch.no_grad():
        model.vocabulary.bias_V[3] = float("nan")
    for few in (1, 5):
        with pytest.raises(InputError, match="not finite"):
            lanes.next_few(few)
