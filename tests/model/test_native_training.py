"""The compiled kernels of training against torch's own operations and the spelled-out formula: values, gradients, masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import build, random_memory, random_tokens
from transformer_xl import native
from transformer_xl.model import Memory
from transformer_xl.model.attention import Mask, kernel_attend
from transformer_xl.model.dropout import Dropout, dropped
from transformer_xl.model.encodings import Distances
from transformer_xl.model.reference import reference_attend
from transformer_xl.native import doors

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")


@st.composite
def cases(draw):
    lanes, memory, segment = draw(st.integers(1, 3)), draw(st.integers(0, 70)), draw(st.integers(1, 70))
    valid = draw(st.none() | st.lists(st.integers(0, memory), min_size=lanes, max_size=lanes))
    visible = draw(st.none() | st.integers(0, memory + segment))
    heads, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8, 13, 41]))
    return lanes, memory, segment, heads, width, valid, visible, draw(st.booleans()), draw(st.integers(0, 2**16))


def leaves(case, dtype=torch.float64):
    B, M, T, H, K, _, _, biased, seed = case
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    biases = (leaf(H, K), leaf(H, K)) if biased else ()
    return leaf(B, T, H, K), leaf(B, M, 2, H, K), leaf(B, T, 2, H, K), leaf(M + T, H, K), *biases


def by_kernels(case, query, memory, key_value, relative, content=None, position=None, *, dropout=0.0):
    M, valid, visible = case[1], case[5], case[6]
    lowest_B = None if valid is None else M - torch.tensor(valid)
    lengths = {"lowest_B": lowest_B, "visible_distance": visible, "dropout": dropout}
    return kernel_attend(query, memory, key_value, relative, content, position, **lengths)


def by_the_formula(case, query, memory, key_value, relative, content=None, position=None):
    _, M, T, _, _, valid, visible, _, _ = case
    key_BHSK, value_BHSK = torch.cat([memory, key_value], 1).permute(2, 0, 3, 1, 4)
    mask_BTS = Mask(
        memory=M,
        segment=T,
        valid_B=None if valid is None else torch.tensor(valid),
        visible_distance=visible,
        device=torch.device("cpu"),
    ).cells_BTS
    distances = Distances(relative_key_HSK=relative.transpose(0, 1), content_bias_HK=content, position_bias_HK=position)
    mixed_BHTK = reference_attend(
        query.transpose(1, 2), key_BHSK, value_BHSK, distances=distances, mask_BTS=mask_BTS, dropout=lambda p: p
    )
    return mixed_BHTK.transpose(1, 2)


def with_gradients(function, case, tensors):
    mixed = function(case, *tensors)
    weights = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(mixed.dtype)
    return mixed, *torch.autograd.grad((mixed * weights).sum(), tensors)


@given(cases())
@settings(max_examples=80, deadline=None)
def test_attention_is_the_formula_with_gradients(case):
    found, expected = (with_gradients(way, case, leaves(case)) for way in (by_kernels, by_the_formula))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_attention_in_float32_is_within_rounding():
    case = (2, 150, 150, 2, 41, None, None, True, 0)
    found = with_gradients(by_kernels, case, leaves(case, torch.float32))
    expected = with_gradients(by_the_formula, case, leaves(case))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=2e-5 * float(theirs.detach().abs().max()))


def test_attention_gives_the_same_bits_again():
    case = (3, 40, 33, 3, 8, [40, 3, 0], 30, True, 0)
    first, second = (with_gradients(by_kernels, case, leaves(case)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_attention_drops_probabilities_and_scales_the_others():
    """Values that are unit vectors make the mixture the probabilities themselves."""
    B, M, T, H, K = 4, 20, 30, 2, 50
    case = (B, M, T, H, K, None, None, True, 0)
    query, memory, key_value, *rest = leaves(case)
    unit_BSHK = torch.eye(K, dtype=torch.float64)[None, :, None].expand(B, K, H, K)
    memory = torch.stack([memory[:, :, 0], unit_BSHK[:, :M]], 2)
    key_value = torch.stack([key_value[:, :, 0], unit_BSHK[:, M:]], 2)
    probability = by_kernels(case, query, memory, key_value, *rest)
    torch.manual_seed(0)
    kept = by_kernels(case, query, memory, key_value, *rest, dropout=0.25)
    seen = probability > 0
    zero = (kept == 0) & seen
    torch.testing.assert_close(kept, torch.where(zero, 0, probability / 0.75), rtol=0, atol=1e-12)
    assert float(zero.sum() / seen.sum()) == pytest.approx(0.25, abs=0.01)
    lanes_apart = zero[0] != zero[1]
    assert bool(lanes_apart.any())


def test_gradients_go_through_the_mask_that_was_drawn():
    case = (2, 5, 6, 2, 3, [5, 2], None, True, 0)

    def seeded(*tensors):
        torch.manual_seed(7)
        return by_kernels(case, *tensors, dropout=0.4)

    assert torch.autograd.gradcheck(seeded, leaves(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_has_its_rate_and_the_same_mask_backwards(dtype):
    torch.manual_seed(0)
    values = torch.ones(301, 333, dtype=dtype, requires_grad=True)
    result = dropped(values, 0.1)
    assert result.unique().tolist() == pytest.approx([0.0, 1 / 0.9])
    assert float((result == 0).double().mean()) == pytest.approx(0.1, abs=0.005)
    rows = (result == 0).double().mean(1)
    assert float(rows.std()) == pytest.approx((0.1 * 0.9 / 333) ** 0.5, rel=0.2)  # as independent cells have it
    (gradient,) = torch.autograd.grad(result.sum(), values)
    assert torch.equal(gradient, result)
    assert not torch.equal(dropped(values, 0.1), result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_relu_and_dropout_in_one_go(dtype):
    dropout = Dropout(0.3, locked=False).train()
    values = torch.randn(123, 457, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()
    torch.manual_seed(0)
    result = dropout.after_relu(values, 1)
    kept = result != 0
    torch.testing.assert_close(result, torch.where(kept, values.relu() / 0.7, 0), rtol=1e-6, atol=0)
    assert float(kept.sum() / (values > 0).sum()) == pytest.approx(0.7, abs=0.01)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    (gradient,) = torch.autograd.grad((result * weights).sum(), values)
    torch.testing.assert_close(gradient, torch.where(kept, weights / 0.7, 0), rtol=1e-6, atol=0)
    strange = torch.tensor([float("nan"), float("-inf"), -0.0, 0.0], dtype=dtype)
    assert dropout.after_relu(strange, 0).isnan().tolist() == [True, False, False, False]


KINDS = [
    {},
    {"norm": "pre", "final_norm": True},
    {"norm": "pre_keys", "encoding": "absolute", "memory": 0},
    {"share_biases": False},
    {"same_length": True},
    {"clamp_len": 3},
    {"encoding": "shaw"},
    {"encoding": "shaw_biased"},
    {"encoding": "absolute", "memory": 0},
    {"initial_memory": "zeros"},
    {"neighbours": 3},
    {"neighbours": 9, "same_length": True},
    {"neighbours": 4, "norm": "pre", "final_norm": True, "attention_dropout": 0.0},
    {"neighbours": 2, "encoding": "shaw"},
    {"ngrams": (2, 3), "ngram_rows": 11, "d_ngram": 5},
]


@pytest.mark.parametrize("changes", KINDS, ids=lambda changes: "-".join(map(str, changes.values())) or "plain")
def test_a_model_learns_the_same_with_and_without_the_kernels(changes, monkeypatch):
    def learned():
        model = build(train=True, **changes)
        tokens = random_tokens(model, lanes=3, length=8)
        memory: Memory | None = None
        if model.config.memory and model.config.initial_memory == "empty":
            memory = random_memory(model, lanes=3, length=6, valid=[6, 2, 0])
        output = model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory)
        output.loss_BT.sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {"loss": output.loss_BT, "memory": output.memory.layers[-1], **gradients}

    found = learned()
    monkeypatch.setattr(native, "usable", lambda like: False)
    expected = learned()
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_kernels_are_really_used(monkeypatch):
    """Or the comparison above would compare torch with itself."""
    called = []
    call = doors._call
    monkeypatch.setattr(doors, "_call", lambda name, *rest, **more: (called.append(name), call(name, *rest, **more)))
    model = build(train=True, dropout=0.1)
    tokens = random_tokens(model, lanes=2, length=5)
    model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT.sum().backward()
    assert set(called) == {"attend_forward", "attend_backward", "drop", "relu_drop", "relu_drop_backward"}


def test_a_mask_says_the_same_in_both_ways():
    mask = Mask(memory=4, segment=3, valid_B=torch.tensor([4, 1]), visible_distance=None, device=torch.device("cpu"))
    first_seen_B = (~mask.cells_BTS).float().argmax(2)[:, 0]
    assert mask.lowest_B.tolist() == first_seen_B.tolist() == [0, 3]
