"""The compiled kernels against torch's own operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import build
from transformer_xl import native
from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.inference import Engine
from transformer_xl.inference.weights import Linear
from transformer_xl.model import TransformerXL

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")


def without_kernels(model, **arguments):
    engine = Engine(model, **arguments)
    engine.compiled = engine.linear.compiled = False
    return engine


@st.composite
def shapes(draw):
    """Widths around and between the vectors' own, memories shorter and longer than a tile of keys, clamps inside and outside of it."""
    encoding = draw(st.sampled_from(["relative", "relative", "shaw", "shaw_biased"]))
    return {
        "encoding": encoding,
        "n_layer": 2,
        "d_model": draw(st.sampled_from([4, 16, 82])),
        "n_head": draw(st.sampled_from([1, 3])),
        "d_head": draw(st.sampled_from([2, 5, 8, 16, 41, 72])),
        "d_inner": draw(st.sampled_from([3, 64])),
        "memory": draw(st.sampled_from([1, 10, 100, 600])),
        "clamp_len": draw(st.sampled_from([0, 5, 60])),
        "learned_positions": 0 if encoding == "relative" else draw(st.sampled_from([60, 200])),
        "norm": draw(st.sampled_from(["post", "pre"])),
        "same_length": draw(st.booleans()),
        "same_length_keys": draw(st.sampled_from(["memory", "memory+1"])),
        "initial_memory": draw(st.sampled_from(["empty", "zeros"])),
        "neighbours": draw(st.sampled_from([0, 1, 4, 9])),
        **draw(st.sampled_from([{}, {"ngrams": (2, 3), "ngram_rows": 11, "d_ngram": 5}])),
    }


@needs_compiler
@given(
    shape=shapes(),
    lanes=st.integers(1, 5),
    sight=st.sampled_from(["last", "segment"]),
    turns=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 30, 49, 97, 300]), st.sampled_from([None, 0])), min_size=1, max_size=8
    ),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_the_same_numbers_as_torch(shape, lanes, sight, turns, seed):
    model = build(**shape)
    generator = torch.Generator().manual_seed(seed)
    fast, plain = Engine(model, lanes=lanes, sight=sight), without_kernels(model, lanes=lanes, sight=sight)
    for length, reset in turns:
        tokens = torch.randint(model.config.vocabulary, (lanes, length), generator=generator)
        expected = plain.read(tokens)
        assert (fast.read(tokens) - expected).abs().max() < 1e-10 * expected.abs().max()
        if reset is not None:
            fast.reset([reset])
            plain.reset([reset])


@needs_compiler
@pytest.mark.parametrize("length", [1, 150])
def test_float32_stays_close_to_the_exact_model(length):
    """At the weights a model starts with and a real width; with the wild weights of the other tests torch's own float32 strays as far."""
    torch.manual_seed(0)
    shape = {"n_layer": 4, "d_model": 96, "n_head": 2, "d_head": 41, "d_inner": 200, "memory": 300, "clamp_len": 100}
    model = TransformerXL(ModelConfig(vocabulary=50, **shape)).eval()
    tokens = torch.randint(50, (2, 600))
    engine = Engine(model, lanes=2)
    fast = torch.cat([engine.read(tokens[:, i : i + length]) for i in range(0, 600, length)], 1)
    exact = without_kernels(model.double(), lanes=2).read(tokens)
    assert (fast - exact).abs().max() < 2e-5 * exact.abs().max()


@needs_compiler
@given(
    vectors=st.integers(1, 40),
    rows=st.integers(1, 30),
    columns=st.integers(1, 50),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=60, deadline=None)
def test_a_matrix_times_a_few_vectors(vectors, rows, columns, bias, dtype):
    x, weight = torch.randn(vectors, columns, dtype=dtype), torch.randn(rows, columns, dtype=dtype)
    offset = torch.randn(rows, dtype=dtype) if bias else None
    expected = torch.nn.functional.linear(x, weight, offset)
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-4}
    torch.testing.assert_close(native.linear(x, weight, None, offset), expected, **tolerance)
    if dtype == torch.float32:
        stored, scale = Linear("int8", compiled=True).stored(weight)
        rounded = torch.nn.functional.linear(x, stored * scale[:, None], offset)
        torch.testing.assert_close(native.linear(x, stored, scale, offset), rounded, rtol=0, atol=1e-4)
        # Each weight is off by at most half of what 1/127 of its row's largest one is.
        assert ((stored * scale[:, None] - weight).abs() <= weight.abs().amax(1, keepdim=True) / 127 * 0.501).all()


def test_int8_reads_its_rounded_weights_everywhere():
    """One token at a time, in chunks, and without kernels: the same rounded model."""
    model = build(memory=20, d_model=32, d_head=8, cutoffs=(4, 9)).float()
    tokens = torch.randint(13, (2, 40), generator=torch.Generator().manual_seed(0))
    chunks, single = Engine(model, lanes=2, weights="int8"), Engine(model, lanes=2, weights="int8")
    plain = without_kernels(model, lanes=2, weights="int8")
    expected = plain.score(tokens)
    torch.testing.assert_close(chunks.score(tokens), expected, rtol=2e-5, atol=2e-4, equal_nan=True)
    one_by_one = torch.cat([single.score(tokens[:, i : i + 1]) for i in range(40)], 1)
    torch.testing.assert_close(one_by_one, expected, rtol=2e-5, atol=2e-4, equal_nan=True)
    exact = Engine(model, lanes=2).score(tokens)
    difference = (exact - expected)[:, 1:].abs().median()
    assert 1e-3 < difference < 1.0  # it is another model, and a close one
    with pytest.raises(InputError, match="int8' is for float32 models"):
        Engine(model.double(), weights="int8")


def test_lanes_alone_and_together_are_the_same_bits():
    """A text does not change with its neighbours: what one lane reads alone it reads among others, to the last bit."""
    model = build(memory=20, d_model=34, d_head=9).float()
    if not native.usable(model.vocabulary.bias_V):
        pytest.skip("torch's own products differ in their last bit with the number of lanes")
    tokens = torch.randint(13, (40, 30), generator=torch.Generator().manual_seed(1))
    alone = Engine(model)
    own = torch.cat([alone.read(tokens[3:4, i : i + 1]) for i in range(30)], 1)
    for lanes in (5, 11, 16, 40):  # by twos and fours, as one group of vectors, as several
        together = Engine(model, lanes=lanes)
        read = torch.cat([together.read(tokens[:lanes, i : i + 1]) for i in range(30)], 1)
        assert torch.equal(read[3], own[0])


def test_a_projected_vocabulary_keeps_the_bits_of_a_lane():
    """Narrow clusters are projected in and out: by the same kernels, whatever the number of lanes."""
    model = build(memory=20, vocabulary=60, d_model=34, d_head=9, cutoffs=(20, 40), div_val=2).float()
    if not native.usable(model.vocabulary.bias_V):
        pytest.skip("torch's own products differ in their last bit with the number of lanes")
    tokens = torch.randint(60, (64, 20), generator=torch.Generator().manual_seed(1))
    alone, together = Engine(model), Engine(model, lanes=64)
    for i in range(20):
        own, among = alone.read(tokens[3:4, i : i + 1])[:, -1], together.read(tokens[:, i : i + 1])[:, -1]
        assert torch.equal(own[0], among[3])
        assert torch.equal(alone.head_logits(own)[0], together.head_logits(among)[3])
        for cluster in (1, 2):
            assert torch.equal(alone.cluster_logits(cluster, own)[0], together.cluster_logits(cluster, among)[3])
