"""The same tokens give the same frequencies: beside any neighbours, in any pieces, by any number of threads, and they are the model's own to rounding.
That other processors give them too is asked in `tests/native/test_portable_bits.py`."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transformer_xl as txl
from small_models import build
from transformer_xl import native
from transformer_xl.config import RecurrentConfig
from transformer_xl.errors import ConfigError, InputError
from transformer_xl.inference import Engine, PortableReader, make_reader
from transformer_xl.inference.portable import TOTAL_BITS
from transformer_xl.inference.sines import frequencies, sinusoid
from transformer_xl.model import Recurrent
from transformer_xl.presets import find_preset

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")

RUNS = {"ngrams": (2, 3), "ngram_rows": 17, "d_ngram": 4}
SHAPES = (
    {},
    {"norm": "pre", "final_norm": True, "neighbours": 3, **RUNS},
    {"memory": 40, "d_head": 17, "n_head": 3, "d_model": 36, "d_inner": 50, "vocabulary": 40, "share_biases": False},
    {"memory": 200, "d_head": 16, "tie_embeddings": False, "clamp_len": 9, "neighbours": 2},
    {"memory": 9, "same_length": True, "n_layer": 1, "frequencies": "float16"},
)


def some_tokens(model, *, lanes: int, length: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(model.config.vocabulary, size=(lanes, length))


def alone(model, tokens_T: np.ndarray) -> np.ndarray:
    """One lane, one thread, one token at a time."""
    reader = PortableReader(model, lanes=1, threads=1)
    return np.concatenate([reader.read(np.array([token])) for token in tokens_T])


def by_forward(model, tokens_BT: np.ndarray) -> np.ndarray:
    """Probabilities by the model's own forward, a token at a time with its memory."""
    memory, found = None, []
    with torch.inference_mode():
        for t in range(tokens_BT.shape[1]):
            output = model(torch.from_numpy(tokens_BT[:, t : t + 1]), memory=memory)
            memory = output.memory
            found.append(model.log_probabilities(output.hidden_BTD).double().exp())
    return torch.cat(found, dim=1).numpy()


# --- one lane's bits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neighbours_pieces_and_threads_change_no_bit(shape, threads):
    model = build(**shape)
    tokens_BT = some_tokens(model, lanes=7, length=300)  # past the end of every ring but the longest
    expected_TV = alone(model, tokens_BT[4])
    for lanes in ([4], [4, 0], [0, 4, 2], [6, 5, 4, 3, 2, 1, 0]):
        reader = PortableReader(model, lanes=len(lanes), threads=threads)
        read_BT = tokens_BT[lanes]
        first = np.stack([reader.read(read_BT[:, t]) for t in range(5)], axis=1)
        rest = [reader.read_many(read_BT[:, a:b]) for a, b in ((5, 6), (6, 23), (23, 300))]
        np.testing.assert_array_equal(np.concatenate([first, *rest], axis=1)[lanes.index(4)], expected_TV)


def test_many_lanes_are_the_lanes_one_by_one():
    model = build(norm="pre", final_norm=True, memory=20, **RUNS)
    tokens_BT = some_tokens(model, lanes=150, length=4)
    reader = PortableReader(model, lanes=150, threads=2)
    found = np.stack([reader.read(tokens_BT[:, t]) for t in range(4)], axis=1)
    for lane in (0, 63, 64, 74, 75, 149):
        np.testing.assert_array_equal(found[lane], alone(model, tokens_BT[lane]))


def test_a_lane_that_is_reset_has_read_nothing():
    model = build(norm="pre", neighbours=2, memory=20, **RUNS)
    tokens_BT = some_tokens(model, lanes=3, length=60)
    reader = PortableReader(model, lanes=3)
    reader.read_many(tokens_BT[:, :33])
    reader.reset(np.array([1]))
    found = reader.read_many(tokens_BT[:, 33:])
    np.testing.assert_array_equal(found[1], alone(model, tokens_BT[1, 33:]))
    np.testing.assert_array_equal(found[2], alone(model, tokens_BT[2])[33:])
    reader.reset()
    np.testing.assert_array_equal(reader.read_many(tokens_BT)[2], alone(model, tokens_BT[2]))


def test_what_a_thread_was_told_about_small_numbers_does_not_matter():
    """torch.set_flush_denormal speaks to the processor, of all that the thread computes."""
    model = build(init_std=1e-38, projection_init_std=1e-38).float()
    tokens_T = some_tokens(model, lanes=1, length=8)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-20 if parameter.dim() > 1 else 1.0)
    expected_TV = alone(model, tokens_T)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert float(torch.tensor(1e-30) * torch.tensor(1e-10)) == 0
        np.testing.assert_array_equal(alone(model, tokens_T), expected_TV)
        assert float(torch.tensor(1e-30) * torch.tensor(1e-10)) == 0  # and it is left as it was
    finally:
        torch.set_flush_denormal(False)


# --- the model's own numbers


@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_the_models_own(shape):
    check_numbers(build(**shape), length=70)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n_layer=st.integers(1, 3),
    half_width=st.integers(2, 20),
    n_head=st.integers(1, 4),
    d_head=st.integers(1, 35),
    d_inner=st.integers(1, 40),
    vocabulary=st.integers(2, 40),
    memory=st.integers(1, 40),
    norm=st.sampled_from(["pre", "post"]),
    neighbours=st.integers(0, 4),
    clamp_len=st.integers(0, 20),
    ngrams=st.sampled_from([(), (2,), (2, 4), (3, 8)]),
    tie_embeddings=st.booleans(),
    share_biases=st.booleans(),
    same_length=st.booleans(),
    same_length_keys=st.sampled_from(["memory", "memory+1"]),
)
def test_any_shape(seed, half_width, norm, ngrams, **shape):
    runs = {"ngrams": ngrams, "ngram_rows": 11, "d_ngram": 3} if ngrams else {}
    model = build(seed=seed, d_model=2 * half_width, norm=norm, final_norm=norm == "pre", init_std=0.2, **runs, **shape)
    check_numbers(model, length=shape["memory"] + 5)
    tokens_BT = some_tokens(model, lanes=2, length=12)
    together = PortableReader(model, lanes=2, threads=2).read_many(tokens_BT)
    np.testing.assert_array_equal(together[1], alone(model, tokens_BT[1]))


def check_numbers(model, *, length: int) -> None:
    """Beside float64: as near as the ordinary engine is in float32, and what whole numbers cost."""
    tokens_BT = some_tokens(model, lanes=2, length=length)
    exact_BTV = by_forward(model, tokens_BT)
    found_BTV = PortableReader(model, lanes=2).read_many(tokens_BT)
    assert found_BTV.dtype == np.uint32
    assert (found_BTV.sum(axis=-1, dtype=np.int64) == 1 << TOTAL_BITS).all()
    assert found_BTV.min() >= 1
    single = build_single(model)
    engine = Engine(single, lanes=2)
    usual_BTV = engine.log_probabilities(engine.read(torch.from_numpy(tokens_BT))).exp().numpy()
    whole = (model.config.vocabulary + 1) / 2**TOTAL_BITS
    allowed = 8 * np.abs(usual_BTV - exact_BTV).max() + 2e-6 + whole
    assert np.abs(found_BTV / 2**TOTAL_BITS - exact_BTV).max() < allowed


def build_single(model):
    single = type(model)(model.config)
    single.load_state_dict(model.state_dict())
    return single.eval()


@pytest.mark.parametrize("name", ["bytes", "text", "modern-byte", "paper-demo"])
def test_presets_that_it_is_for(name):
    torch.manual_seed(0)
    model = type(build())(find_preset(name).run.model).eval()
    tokens_BT = some_tokens(model, lanes=2, length=40)
    found_BTV = PortableReader(model, lanes=2).read_many(tokens_BT)
    engine = Engine(model, lanes=2)
    usual_BTV = engine.log_probabilities(engine.read(torch.from_numpy(tokens_BT))).exp().numpy()
    assert np.abs(found_BTV / 2**TOTAL_BITS - usual_BTV).max() < 1e-5 + model.config.vocabulary / 2**TOTAL_BITS


def test_a_likely_word_and_words_that_cannot_be():
    """Whatever the logits: at least 1 each, and 2^24 in all."""
    model = build(vocabulary=5).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "encoding.position_bias_PHK":
                parameter.zero_()
        model.vocabulary.bias_V.copy_(torch.tensor([0.0, 500.0, -1e30, 499.0, 500.0]))
    (found_V,) = PortableReader(model, lanes=1).read(np.array([0]))
    share = 1 / (2 + np.exp(-1.0))
    assert found_V[[0, 2]].tolist() == [1, 1]
    assert found_V / 2**TOTAL_BITS == pytest.approx([0, share, 0, share * np.exp(-1.0), share], abs=1e-6)
    assert found_V[1] >= found_V[4]  # what is left over is the first of the likeliest


# --- sines


def test_sines_and_frequencies_are_those_of_the_mathematics():
    import mpmath

    width, distance_S = 20, np.array([0, 1, 2, 7, 100, 4097, 1_000_003])
    found_E = frequencies(width, rounded="float32")
    exact_E = [float(mpmath.mpf(10000) ** -(mpmath.mpf(2 * e) / width)) for e in range(width // 2)]
    np.testing.assert_allclose(found_E, exact_E, rtol=3e-7)
    found_SD = sinusoid(distance_S, width=width, rounded="float32")
    for row, distance in zip(found_SD, distance_S.tolist(), strict=True):
        angles = [mpmath.mpf(distance) * mpmath.mpf(float(value)) for value in found_E]
        exact = [float(f(angle)) for f in (mpmath.sin, mpmath.cos) for angle in angles]
        np.testing.assert_array_equal(row, np.array(exact, np.float32))
    from transformer_xl.model.encodings import frequencies as by_torch

    np.testing.assert_allclose(found_E, by_torch(width).numpy(), rtol=3e-7)


# --- doors


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"encoding": "shaw"}, "model.encoding: 'shaw'"),
        ({"initial_memory": "zeros"}, "model.initial_memory: 'zeros'"),
        ({"cutoffs": (5,)}, "model.cutoffs: (5,)"),
        ({"d_embed": 4}, "model.projections: 'needed'"),
        ({"vocabulary": 70_000}, "model.vocabulary: 70,000"),
    ],
)
def test_a_model_that_it_cannot_read_is_refused_by_name(shape, named):
    with pytest.raises(ConfigError) as refused:
        PortableReader(build(**shape), lanes=1)
    assert str(refused.value).startswith(named)


def test_another_kind_of_model_is_refused():
    with pytest.raises(ConfigError, match="Recurrent"):
        PortableReader(Recurrent(RecurrentConfig(vocabulary=5, cell="lstm", n_layer=1, d_model=4, d_hidden=4)), lanes=1)


@pytest.mark.parametrize(
    "numbers", [{"lanes": 0}, {"lanes": 2.0}, {"memory": -1}, {"memory": 1 << 20}, {"threads": 0}, {"threads": 10**9}]
)
def test_numbers_that_cannot_be_are_refused(numbers):
    with pytest.raises(InputError):
        PortableReader(build(), **{"lanes": 1} | numbers)


def test_more_memory_than_the_machine_has_is_refused():
    with pytest.raises(InputError, match="GB, and this machine has"):
        PortableReader(build(), lanes=10**9)


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([1]),
        np.array([[1], [2]]),
        np.array([1, 13]),
        np.array([1, -1]),
        np.array([1.0, 2.0]),
        np.array([True, False]),
        np.array([1, 2], np.uint64),
    ],
)
def test_tokens_that_it_cannot_read_are_refused_and_change_nothing(tokens):
    model = build()
    reader = PortableReader(model, lanes=2)
    reader.read(np.array([3, 4]))
    with pytest.raises(InputError):
        reader.read(tokens)
    np.testing.assert_array_equal(reader.read(np.array([5, 6]))[0], alone(model, np.array([3, 5]))[1])


def test_numbers_that_are_not_finite_are_refused_and_change_nothing():
    model = build(tie_embeddings=False).float()
    with torch.no_grad():
        model.vocabulary.tables[0][7] = 3e38
    reader = PortableReader(model, lanes=2)
    first = reader.read(np.array([1, 2]))
    with pytest.raises(InputError, match="not finite"):
        reader.read(np.array([3, 7]))
    reader.reset([0])
    again = reader.read(np.array([1, 3]))
    np.testing.assert_array_equal(again[0], first[0])
    np.testing.assert_array_equal(again[1], alone(model, np.array([2, 3]))[1])


@pytest.mark.parametrize("lanes", [[2], [-1], [0, 9]])
def test_lanes_that_do_not_exist_are_not_reset(lanes):
    with pytest.raises(InputError, match="does not exist"):
        PortableReader(build(), lanes=2).reset(lanes)


def test_asked_for_by_name(trained_run):
    loaded = txl.load(trained_run)
    reader = loaded.engine(lanes=3, portable=True)
    assert isinstance(reader, PortableReader)
    assert reader.read(np.array([1, 2, 3])).shape == (3, loaded.model.config.vocabulary)
    with pytest.raises(InputError, match="weights: 'int8'"):
        make_reader(loaded.model, weights="int8", portable=True)
    with pytest.raises(InputError, match="state"):
        loaded.engine(state="somewhere", portable=True)


# --- the fingerprint


def test_the_fingerprint_is_of_all_that_decides_the_bits():
    model = build().float()
    first = PortableReader(model, lanes=1).fingerprint
    assert len(first) == 32
    assert PortableReader(model, lanes=3, threads=2).fingerprint == first
    assert PortableReader(build(dropout=0.3).float(), lanes=1).fingerprint == first
    others = {PortableReader(model, lanes=1, memory=7).fingerprint, first}
    for changes in ({"clamp_len": 3}, {"norm_eps": 1e-4}, {"norm": "pre"}):
        others.add(PortableReader(build(**changes).float(), lanes=1).fingerprint)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1
        others.add(PortableReader(model, lanes=1).fingerprint)
    assert len(others) == 5 + len(list(model.parameters()))


def test_weights_in_half_precision_are_what_they_are_in_single():
    half = build().to(torch.bfloat16)
    single = build_single(half)
    tokens_T = some_tokens(half, lanes=1, length=10)[0]
    assert PortableReader(half, lanes=1).fingerprint == PortableReader(single, lanes=1).fingerprint
    np.testing.assert_array_equal(alone(half, tokens_T), alone(single, tokens_T))


def test_a_model_that_learns_on_leaves_a_reader_as_it_was():
    model = build(**SHAPES[1]).float()
    tokens_T = some_tokens(model, lanes=1, length=10)[0]
    expected_TV, reader = alone(model, tokens_T), PortableReader(model, lanes=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    np.testing.assert_array_equal(reader.read_many(tokens_T[None])[0], expected_TV)


def test_another_memory_is_the_model_with_that_memory():
    model = build(memory=30)
    other = build(memory=5)
    assert replace(model.config, memory=5) == other.config
    tokens_T = some_tokens(model, lanes=1, length=40)[0]
    found = PortableReader(model, lanes=1, memory=5).read_many(tokens_T[None])[0]
    np.testing.assert_array_equal(found, alone(other, tokens_T))
