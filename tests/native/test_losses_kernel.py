"""The kernel of a loss over a vocabulary: against torch's own arithmetic, and refusals of what it is not made for."""

import pytest
import torch

from transformer_xl import native
from transformer_xl.errors import InputError
from transformer_xl.model.softmax import slow_loss

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Of what is told in each. A gradient of bfloat16 may be rounded to the number beside."""


def parts(P, V, logits, *, seed=0):
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if logits is torch.bfloat16 else logits
    logits_PV, bias_V = (6 * torch.randn(P, V, generator=draw)).to(logits), torch.randn(V, generator=draw).to(dtype)
    target_P = torch.randint(V, (P,), generator=draw)
    target_P[::5] = -1
    return logits_PV, bias_V, target_P


@pytest.mark.parametrize("logits", TOLERANCE)
@pytest.mark.parametrize(("P", "V"), [(1, 1), (2, 3), (40, 16), (33, 4096), (7, 2051)])
def test_losses_and_gradients_are_those_of_torch(logits, P, V):
    logits_PV, bias_V, target_P = parts(P, V, logits)
    theirs_PV, mine_V, theirs_V = logits_PV.clone(), torch.ones_like(bias_V), torch.ones_like(bias_V)
    found = native.softmax_loss(logits_PV, bias_V, target_P, of_bias_V=mine_V)
    expected = slow_loss(theirs_PV, bias_V, target_P, of_bias_V=theirs_V)
    exactly = {"rtol": TOLERANCE[bias_V.dtype], "atol": TOLERANCE[bias_V.dtype] * P}
    torch.testing.assert_close(found, expected, **exactly)
    torch.testing.assert_close(mine_V, theirs_V, **exactly)
    torch.testing.assert_close(logits_PV, theirs_PV, rtol=TOLERANCE[logits], atol=2e-6)
    assert not logits_PV[::5].any()


@pytest.mark.parametrize("logits", TOLERANCE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(logits, bad):
    """Training refuses a loss that is no number; it must be told."""
    logits_PV, bias_V, target_P = parts(6, 40, logits)
    logits_PV[3, 7] = bad
    found = native.softmax_loss(logits_PV, bias_V, target_P, of_bias_V=torch.zeros_like(bias_V))
    assert found.isfinite().tolist() == [place != 3 for place in range(6)]


def test_logits_far_apart():
    """exp of the difference is nothing, and nothing becomes infinite."""
    logits_PV, bias_V = torch.tensor([[3e4, -3e4, 0.0]]), torch.zeros(3)
    for target, loss in ((0, 0.0), (1, 6e4)):
        given_PV = logits_PV.clone()
        found = native.softmax_loss(given_PV, bias_V, torch.tensor([target]), of_bias_V=torch.zeros(3))
        assert found.tolist() == [loss]
        assert given_PV.tolist() == [[1.0 - (target == 0), -1.0 * (target == 1), 0.0]]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_deal_the_rows(threads):
    before = torch.get_num_threads()
    parts_of = parts(33, 300, torch.float32)
    expected_V, found_V = torch.zeros(300), torch.zeros(300)
    expected = slow_loss(parts_of[0].clone(), *parts_of[1:], of_bias_V=expected_V)
    try:
        torch.set_num_threads(threads)
        found = native.softmax_loss(*parts_of, of_bias_V=found_V)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_V, expected_V, rtol=1e-5, atol=1e-5)


def test_what_it_is_not_made_for():
    logits_PV, bias_V, target_P = parts(4, 9, torch.float32)
    for changed in (
        {"logits_PV": logits_PV.t()},
        {"logits_PV": logits_PV[0]},
        {"logits_PV": logits_PV.half()},
        {"logits_PV": logits_PV.bfloat16(), "bias_V": bias_V.double()},
        {"logits_PV": logits_PV[:, :0].contiguous(), "bias_V": bias_V[:0], "of_bias_V": bias_V[:0]},
        {"bias_V": bias_V[:8]},
        {"bias_V": bias_V.double()},
        {"target_P": target_P.int()},
        {"target_P": target_P[:3]},
        {"of_bias_V": bias_V.double()},
    ):
        given = {"logits_PV": logits_PV, "bias_V": bias_V, "target_P": target_P, "of_bias_V": bias_V.clone()} | changed
        with pytest.raises(InputError, match="kernel"):
            native.softmax_loss(**given)
    for wrong in (-2, 9):
        before = logits_PV.clone()
        with pytest.raises(InputError, match="outside"):
            native.softmax_loss(logits_PV, bias_V, torch.tensor([0, 1, wrong, 2]), of_bias_V=bias_V.clone())
        assert torch.equal(logits_PV, before)
