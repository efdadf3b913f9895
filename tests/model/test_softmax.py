"""The loss in pieces is cross-entropy: values and gradients in float64, whatever the pieces; and the model takes it where it says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from small_models import build
from transformer_xl import native
from transformer_xl.config import NOT_A_TARGET
from transformer_xl.model import products, softmax

DOUBLE = {"dtype": torch.float64}


def parts_of(P, E, V, *, seed, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(shape, generator=draw, **DOUBLE).to(dtype) for shape in ((P, E), (V, E), (V,))]
    target_P = torch.randint(V, (P,), generator=draw)
    target_P[torch.rand(P, generator=draw) < 0.2] = NOT_A_TARGET
    return [tensor.requires_grad_() for tensor in numbers], target_P, torch.rand(P, generator=draw, **DOUBLE).to(dtype)


def slowly(hidden_PE, target_P, *, table_VE, bias_V):
    logits_PV = F.linear(hidden_PE, table_VE, bias_V)
    return F.cross_entropy(logits_PV, target_P, reduction="none", ignore_index=NOT_A_TARGET)


def with_gradients(by, numbers, target_P, weight_P):
    hidden_PE, table_VE, bias_V = numbers
    loss_P = by(hidden_PE, target_P, table_VE=table_VE, bias_V=bias_V)
    return [loss_P.detach(), *torch.autograd.grad((loss_P * weight_P).sum(), numbers)]


@settings(max_examples=80, deadline=None)
@given(
    P=st.integers(1, 40),
    E=st.integers(1, 6),
    V=st.integers(2, 30),
    cached=st.integers(1, 400),
    seed=st.integers(0, 99),
    alike=st.booleans(),
    kernels=st.booleans(),
)
def test_it_is_cross_entropy_whatever_the_pieces(P, E, V, cached, seed, alike, kernels):
    """`alike`: every loss counts the same, so that what was found on the way forwards is enough."""
    numbers, target_P, weight_P = parts_of(P, E, V, seed=seed)
    weight_P = torch.full_like(weight_P, 0.3) if alike else weight_P
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "CACHED", cached)
        if not kernels:
            patch.setattr(native, "usable", lambda like: False)
        found = with_gradients(softmax.softmax_loss, numbers, target_P, weight_P)
    for mine, theirs in zip(found, with_gradients(slowly, numbers, target_P, weight_P), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_table_that_stands_still_costs_no_product(monkeypatch):
    """Beside an adapter."""
    numbers, target_P, _ = parts_of(20, 4, 9, seed=1)
    products_of, really = [], products.matmul
    monkeypatch.setattr(products, "matmul", lambda a, b, **how: products_of.append(a.shape) or really(a, b, **how))
    for learns, count in ((True, 3), (False, 2)):
        products_of.clear()
        numbers[1].requires_grad_(learns)
        softmax.softmax_loss(numbers[0], target_P, table_VE=numbers[1], bias_V=numbers[2]).sum().backward()
        assert len(products_of) == count
    assert numbers[1].grad is not None


@pytest.mark.parametrize("alike", [True, False])
def test_rounded_factors_stay_near(alike):
    numbers, target_P, weight_P = parts_of(300, 32, 4096, seed=1, dtype=torch.float32)
    weight_P = torch.full_like(weight_P, 0.5) if alike else weight_P
    exact = with_gradients(slowly, numbers, target_P, weight_P)
    with products.rounded(torch.bfloat16):
        found = with_gradients(softmax.softmax_loss, numbers, target_P, weight_P)
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0.04 * float(theirs.abs().max()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_many_words_has_the_losses_and_gradients_it_had(tied, monkeypatch):
    model = build(train=True, vocabulary=softmax.FEWEST, cutoffs=(), tie_embeddings=tied).double()
    tokens = torch.randint(softmax.FEWEST, (2, 9))
    monkeypatch.setattr(
        "transformer_xl.model.vocabulary.FEW_POSITIONS", 0
    )  # of which a shared table gets its gradient in one piece
    found = []
    for fewest in (softmax.FEWEST, 10**9):
        monkeypatch.setattr("transformer_xl.model.vocabulary.FEWEST", fewest)
        model.zero_grad()
        loss_BT = model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT
        loss_BT.sum().backward()
        found.append(
            (type(loss_BT.grad_fn.next_functions[0][0]).__name__, loss_BT, [w.grad for w in model.parameters()])
        )
    (name, mine, gradients), (other, theirs, expected) = found
    assert "SoftmaxLoss" in name
    assert "SoftmaxLoss" not in other
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for one, two in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
