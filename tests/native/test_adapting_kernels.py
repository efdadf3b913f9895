"""The kernels of learning while reading: against plain arithmetic, and refusals of what they are not made for."""

import pytest
import torch

from transformer_xl import native
from transformer_xl.errors import InputError

SHAPES = ((100, 200), (7,), (3, 5, 5000))
"""The last is several tasks, and none is whole vectors."""
DTYPES = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float64: {"rtol": 1e-13, "atol": 1e-13}}


def drawn(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("beside", [{}, {"inverse": 1}, {"inverse": 1, "back": 2}])
def test_weights_go_a_step_and_a_little_back(dtype, decay, beside):
    weights, trained, found = drawn(dtype, 3), drawn(dtype, 4), [*drawn(dtype, 5)]
    found[1] = None  # a weight without gradient goes back only
    tensors = {name: drawn(dtype, seed) for name, seed in beside.items()}
    expected = []
    for place, (weight, origin, gradient) in enumerate(zip(weights, trained, found, strict=True)):
        step = 0 if gradient is None else gradient * (tensors["inverse"][place] if "inverse" in tensors else 1)
        moved = weight - 0.1 * step
        expected.append(moved + (tensors["back"][place] if "back" in tensors else decay) * (origin - moved))
    assert native.MovingWeights(weights, trained, **tensors).move(found, rate=0.1, decay=decay)
    torch.testing.assert_close(weights, expected, **DTYPES[dtype])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [(0, 0, 0), (2, 4, 4999), (1, 1, 3)])
def test_a_gradient_that_is_not_finite_moves_nothing(bad, place):
    weights, found = drawn(torch.float32, 1), drawn(torch.float32, 2)
    before = [weight.clone() for weight in weights]
    moving = native.MovingWeights(weights, drawn(torch.float32, 3))
    found[2][place] = bad
    assert not moving.move(found, rate=0.1, decay=0.1)
    assert all(map(torch.equal, weights, before))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("theta", [0.0, 0.3, 20.0])
@pytest.mark.parametrize(("past", "size"), [(263, 100), (263, 1000), (0, 30), (5, 1)])
def test_what_a_cache_gives(dtype, theta, past, size):
    """A softmax of the columns that are seen; where there are none, no number."""
    T, S = 70, 333
    generator = torch.Generator().manual_seed(0)
    score_TS = torch.randn(T, S, generator=generator, dtype=dtype) * 9
    next_S, target_T = (torch.randint(5, (count,), generator=generator) for count in (S, T))
    seen_TS = torch.ones(T, S, dtype=torch.bool).tril_(past - 1).triu_(past - size)
    weight_TS = torch.softmax((score_TS * max(theta, 1e-30)).masked_fill(~seen_TS, -torch.inf), dim=1)
    expected = (weight_TS * (next_S == target_T[:, None])).sum(1)
    found = native.recall(score_TS, next_S, target_T, past=past, size=size, theta=theta)
    torch.testing.assert_close(found, expected, **DTYPES[dtype], equal_nan=True)
    assert bool(found[0].isnan()) == (past == 0)


def test_what_they_are_not_made_for():
    weights = drawn(torch.float32, 1)
    for wrong in (
        (weights, drawn(torch.float64, 2)),
        (weights, [weight[:1] for weight in weights]),
        (weights, weights[:2]),
        ([weights[0].t(), *weights[1:]], weights),
    ):
        with pytest.raises(InputError, match="a kernel was given"):
            native.MovingWeights(*wrong)
    moving = native.MovingWeights(weights, weights)
    with pytest.raises(InputError, match="a gradient"):
        moving.move([weights[0].double(), None, None], rate=1.0, decay=0.0)
    score_TS, next_S, target_T = torch.randn(4, 9), torch.zeros(9, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    for wrong in (
        (score_TS, next_S[:8], target_T),
        (score_TS, next_S, target_T.int()),
        (score_TS[0], next_S, target_T),
    ):
        with pytest.raises(InputError, match="kernel"):
            native.recall(*wrong, past=5, size=9, theta=1.0)
    for past, size in ((6, 9), (-1, 9), (5, 0)):
        with pytest.raises(InputError, match="outside of its memory"):
            native.recall(score_TS, next_S, target_T, past=past, size=size, theta=1.0)
