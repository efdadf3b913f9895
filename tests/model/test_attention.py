"""Fast attention against the slow one that spells the paper's terms out: values and every gradient, in float64."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import build, random_memory, random_tokens
from transformer_xl.model.attention import (
    Mask,
    attend,
    from_neighbours,
    fused_attend,
    relative_shift,
    segment_attention,
)
from transformer_xl.model.encodings import Distances
from transformer_xl.model.reference import attention_terms, reference_attend

CLOSE = {"rtol": 0, "atol": 1e-10}


@st.composite
def cases(draw):
    lanes, memory, segment = draw(st.integers(1, 3)), draw(st.integers(0, 7)), draw(st.integers(1, 6))
    valid = draw(st.none() | st.lists(st.integers(0, memory), min_size=lanes, max_size=lanes))
    visible = draw(st.none() | st.integers(0, memory + segment))
    pieces = draw(st.sampled_from(["relative", "shaw", "shaw_biased", "distance alone", "plain"]))
    return lanes, memory, segment, valid, visible, pieces, draw(st.integers(0, 2**16))


def leaves(lanes, memory, segment, pieces, seed):
    generator = torch.Generator().manual_seed(seed)
    H, K, S = 2, 3, memory + segment

    def leaf(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    named = {"query": leaf(lanes, H, segment, K), "key": leaf(lanes, H, S, K), "value": leaf(lanes, H, S, K)}
    if pieces not in ("distance alone", "plain"):
        named["relative_key_HSK"] = leaf(H, S, K)
    if pieces in ("relative", "shaw_biased"):
        named["content_bias_HK"] = leaf(H, K)
    if pieces == "relative":
        named["position_bias_HK"] = leaf(H, K)
    if pieces in ("shaw_biased", "distance alone"):
        named["distance_bias_HS"] = leaf(H, S)
    return named


@given(cases())
@settings(max_examples=150, deadline=None)
def test_fast_equals_reference_with_gradients(case):
    lanes, memory, segment, valid, visible, pieces, seed = case
    mask_BTS = Mask(
        memory=memory,
        segment=segment,
        valid_B=None if valid is None else torch.tensor(valid),
        visible_distance=visible,
        device=torch.device("cpu"),
    ).cells_BTS
    answers = []
    for function in (attend, partial(fused_attend, dropout=0.0), reference_attend):
        named = leaves(lanes, memory, segment, pieces, seed)
        tables = {name: value for name, value in named.items() if name not in ("query", "key", "value")}
        mixed = function(
            named["query"],
            named["key"],
            named["value"],
            distances=Distances(**tables),
            mask_BTS=mask_BTS,
            **({} if isinstance(function, partial) else {"dropout": lambda probability: probability}),
        )
        weights = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        (mixed * weights).sum().backward()
        answers.append((mixed.detach(), {name: value.grad for name, value in named.items()}))
    *others, (slow, slow_gradients) = answers
    for fast, fast_gradients in others:
        torch.testing.assert_close(fast, slow, **CLOSE)
        for name, gradient in slow_gradients.items():
            torch.testing.assert_close(
                fast_gradients[name], gradient, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("changes", [{}, {"same_length": True}, {"clamp_len": 3}, {"norm": "pre"}])
def test_a_gpu_says_what_the_processor_says(changes):
    answers = []
    for device in ("cpu", "cuda"):
        model = build(**changes).to(device)
        tokens = random_tokens(model, lanes=2, length=9).to(device)
        memory = random_memory(model, lanes=2, length=6, valid=[6, 2]).to(device)
        loss = model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory).loss_BT
        loss.sum().backward()
        answers.append([loss.detach().cpu(), *(weight.grad.cpu() for weight in model.parameters())])
    for mine, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@st.composite
def model_cases(draw):
    memory = draw(st.integers(1, 7))
    encoding = draw(st.sampled_from(["relative", "shaw", "shaw_biased"]))
    changes = {
        "memory": memory,
        "encoding": encoding,
        "clamp_len": draw(st.sampled_from([0, 1, 3, 5])),
        "same_length": draw(st.booleans()),
        "same_length_keys": draw(st.sampled_from(["memory", "memory+1"])),
        "norm": draw(st.sampled_from(["post", "pre"])),
        "share_biases": encoding != "relative" or draw(st.booleans()),
    }
    lanes, length = draw(st.integers(1, 3)), draw(st.integers(0, memory))
    valid = draw(st.lists(st.integers(0, length), min_size=lanes, max_size=lanes))
    return changes, lanes, length, valid, draw(st.integers(1, 5))


@given(model_cases())
@settings(max_examples=60, deadline=None)
def test_models_agree_through_memory_with_all_gradients(case):
    """W_kE and W_v are reached through memory positions too; the memory itself never is."""
    changes, lanes, length, valid, segment = case
    answers = []
    for function in (attend, reference_attend):
        model = build(**changes)
        model.attend = function
        memory = random_memory(model, lanes=lanes, length=length, valid=valid)
        for layer in memory.layers:
            layer.requires_grad_()
        tokens = random_tokens(model, lanes=lanes, length=segment + 1)
        output = model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory)
        output.loss_BT.sum().backward()
        assert all(layer.grad is None for layer in memory.layers)
        assert not any(layer.requires_grad for layer in output.memory.layers)
        answers.append(
            (output.loss_BT.detach(), {name: parameter.grad for name, parameter in model.named_parameters()})
        )
    *others, (slow, slow_gradients) = answers
    for fast, fast_gradients in others:
        torch.testing.assert_close(fast, slow, **CLOSE)
        for name, gradient in slow_gradients.items():
            torch.testing.assert_close(
                fast_gradients[name], gradient, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_gradients_of_keys_and_values_come_through_memory():
    """With the segment's own contribution held still, what is left of W_kE's and W_v's gradient comes from memory positions."""
    model = build(n_layer=1)
    tokens = random_tokens(model, lanes=1, length=3)
    gradients = []
    for seed in (1, 2):
        model.zero_grad()
        memory = random_memory(model, lanes=1, length=4, seed=seed)
        model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory).loss_BT.sum().backward()
        gradients.append(model.layers[0].key_value.weight.grad.clone())
    key, value = (gradients[0] - gradients[1]).abs().chunk(2)
    assert key.max() > 1e-6
    assert value.max() > 1e-6


def test_shift_reads_a_view_and_places_each_distance():
    T, S = 3, 5
    by_distance = torch.arange(S - 1, -1, -1.0).expand(1, 1, T, S).contiguous()
    shifted = relative_shift(by_distance)
    assert shifted.data_ptr() == by_distance.data_ptr() + (T - 1) * by_distance.element_size()
    for i in range(T):
        for j in range(S - T + i + 1):
            assert shifted[0, 0, i, j] == (S - T + i) - j


def test_the_four_terms_are_the_papers():
    """One pair of query and key by hand: E W_q' W_kE E, E W_q' W_kR R, u W_kE E, v W_kR R."""
    named = leaves(1, 2, 2, "relative", 3)
    tables = {name: named[name] for name in ("relative_key_HSK", "content_bias_HK", "position_bias_HK")}
    terms = attention_terms(named["query"], named["key"], distances=Distances(**tables))
    query, key = named["query"][0, 1, 1], named["key"][0, 1, 0]  # head 1: query 1 is key 3, so key 0 is at distance 3
    relative_key = named["relative_key_HSK"][1, 0]
    assert terms.content[0, 1, 1, 0].item() == pytest.approx((query @ key).item())
    assert terms.content_distance[0, 1, 1, 0].item() == pytest.approx((query @ relative_key).item())
    assert terms.content_bias[0, 1, 1, 0].item() == pytest.approx((named["content_bias_HK"][1] @ key).item())
    assert terms.distance_bias[0, 1, 1, 0].item() == pytest.approx((named["position_bias_HK"][1] @ relative_key).item())


@pytest.mark.parametrize(("keys", "count"), [("memory", 4), ("memory+1", 5)])
def test_same_length_shows_every_query_the_published_count(keys, count):
    model = build(memory=4, same_length=True, same_length_keys=keys)
    mask = Mask(
        memory=4, segment=6, valid_B=None, visible_distance=model.config.visible_distance, device=torch.device("cpu")
    ).cells_BTS
    assert (~mask).sum(-1).tolist() == [[count] * 6]


@pytest.mark.parametrize("reach", [None, 0, 1, 5])
@torch.no_grad()
def test_neighbours_give_their_values_by_weight(reach):
    """Spelled out: each token gets its own value and those just before it, channel by channel, as far as it sees."""
    layer = build(neighbours=3).layers[0]
    value_BSX = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = from_neighbours(layer, value_BSX, segment=5, reach=reach)
    for lane, position, channel in itertools.product(range(2), range(5), range(6)):
        expected = sum(
            float(layer.neighbours_WX[n, channel] * value_BSX[lane, 2 + position - n, channel])
            for n in range(3)
            if 2 + position - n >= 0 and (reach is None or n <= reach)
        )
        assert float(found[lane, position, channel]) == pytest.approx(expected, abs=1e-12)


@torch.no_grad()
def test_neighbours_are_added_to_what_attention_gathers():
    """A layer that attends to nothing but zeros still passes its neighbours on."""
    model = build(neighbours=2, n_layer=1, memory=4)
    layer = model.layers[0]
    values = []
    product = lambda linear, x: values.append(linear(x)) or values[-1]  # noqa: E731
    model.attend = lambda query, key, value, **_: torch.zeros_like(query)
    tokens = random_tokens(model, lanes=1, length=3)
    mask = Mask(memory=0, segment=3, valid_B=None, visible_distance=None, device=torch.device("cpu"))
    by = segment_attention(model.attend, model.encoding.distances(3), mask)
    model.through_layers(model.enter(tokens), by, product=product)
    value_BTX = values[1][..., 6:]
    expected = value_BTX * layer.neighbours_WX[0]
    expected[:, 1:] += value_BTX[:, :-1] * layer.neighbours_WX[1]
    torch.testing.assert_close(values[2], layer.attention_output(expected), rtol=0, atol=1e-12)
