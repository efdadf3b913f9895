"""Products by oneDNN are F.linear's, values and gradients, up to the rounding of float32; and nothing else is handed to it."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from small_models import build
from transformer_xl.model import products

ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where it is the faster one."""
    if ONEDNN is None or not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "_onednn", lambda: ONEDNN)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def with_gradients(by: object, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    result = by(*leaves)  # type: ignore[operator]
    weights = drawn(*result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), leaves)]


@pytest.mark.parametrize("shape", [(17, 8, 5), (2048, 192, 96), (33, 1, 7), (40, 31, 1)])
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_are_those_of_float64(onednn: None, shape: tuple[int, int, int], biased: bool) -> None:
    P, columns, rows = shape
    exact = [drawn(P, columns), drawn(rows, columns), *([drawn(rows)] if biased else [])]
    found = with_gradients(products.linear, [tensor.float() for tensor in exact])
    for mine, theirs in zip(found, with_gradients(F.linear, exact), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=2e-6 * float(theirs.abs().max()) + 1e-7)


def test_lanes_and_views_keep_their_shape(onednn: None) -> None:
    x_BTD, weight = drawn(3, 40, 12, dtype=torch.float32), drawn(12, 9, dtype=torch.float32).t()
    for x in (x_BTD, x_BTD.transpose(0, 1), x_BTD[:, ::2]):
        torch.testing.assert_close(products.linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)


def test_only_what_learns_gets_a_gradient(onednn: None) -> None:
    x, weight = drawn(32, 8, dtype=torch.float32), drawn(4, 8, dtype=torch.float32).requires_grad_()
    products.linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


def test_matrices_of_any_layout_are_multiplied(onednn: None) -> None:
    a, b = drawn(40, 24, dtype=torch.float32), drawn(24, 60, dtype=torch.float32)
    for left, right in ((a, b), (a, b.t().contiguous().t()), (b.t(), a.t())):
        torch.testing.assert_close(products.matmul(left, right), left @ right, rtol=1e-5, atol=1e-5)


def test_other_types_few_rows_and_autocast_stay_with_torch(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products._Linear, "apply", lambda *_: pytest.fail("oneDNN was asked"))
    weight = drawn(4, 8)
    assert products.linear(drawn(64, 8), weight).dtype == torch.float64
    products.linear(drawn(products.FEW_ROWS, 8, dtype=torch.float32), weight.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert products.linear(drawn(64, 8, dtype=torch.float32), weight.float()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "about", "asked"),
    [
        ("AVX512", "vendor_id\t: AuthenticAMD\n", True),
        ("AVX512", "vendor_id\t: GenuineIntel\n", False),
        ("AVX2", "vendor_id\t: AuthenticAMD\n", False),
        ("AVX512", "nothing known", False),
    ],
)
def test_it_is_asked_by_processor(monkeypatch: pytest.MonkeyPatch, capability: str, about: str, asked: bool) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: about)
    assert (products._onednn.__wrapped__() is not None) == (asked and torch.backends.mkldnn.is_available())


def test_text_of_any_length_asks_for_few_shapes(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape is a program that is made and kept: a session fed in pieces of all lengths must not gather them."""
    asked = []
    apply = products._Linear.apply
    monkeypatch.setattr(products._Linear, "apply", lambda *given: (asked.append(len(given[0])), apply(*given))[1])
    weight = drawn(4, 8, dtype=torch.float32)
    with torch.no_grad():
        for length in range(1, 200):
            products.linear(drawn(length, 8, dtype=torch.float32), weight)
    assert asked == [64, 128, 192]


@pytest.mark.parametrize("shape", [(17, 8, 5), (2048, 192, 96), (33, 1, 7)])
@pytest.mark.parametrize("biased", [True, False])
def test_rounded_factors_give_the_products_of_what_they_were_rounded_to(
    shape: tuple[int, int, int], biased: bool
) -> None:
    """The oracle multiplies the same bfloat16 numbers in float64; what is left is the rounding of the result."""
    P, columns, rows = shape
    x, weight = drawn(P, columns).bfloat16().double(), drawn(rows, columns).bfloat16().double()
    exact = [x, weight, *([drawn(rows)] if biased else [])]
    with products.rounded(torch.bfloat16):
        found = with_gradients(products.linear, [tensor.float() for tensor in exact])
    for mine, theirs in zip(found, with_gradients(F.linear, exact), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=6e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize(("about", "fast"), [("flags: avx512_bf16", True), ("flags: amx_bf16", True), ("avx2", False)])
def test_bfloat16_is_for_processors_that_multiply_it(monkeypatch: pytest.MonkeyPatch, about: str, fast: bool) -> None:
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: about)
    assert products.multiplies_bfloat16.__wrapped__() == (fast and torch.backends.mkldnn.is_available())


def test_rounding_ends_where_it_was_asked_for_and_leaves_other_types_alone() -> None:
    x, weight = drawn(40, 64), drawn(24, 64)
    with products.rounded(torch.bfloat16):
        assert torch.equal(products.linear(x, weight), F.linear(x, weight))  # float64: the oracle's own type
        coarse = products.linear(x.float(), weight.float())
        with products.rounded(None):
            fine = products.linear(x.float(), weight.float())
    assert (coarse.double() - F.linear(x, weight)).abs().max() > 1e-3
    for exact in (fine, products.linear(x.float(), weight.float())):
        torch.testing.assert_close(exact.double(), F.linear(x, weight), rtol=0, atol=1e-4)


def test_what_is_saved_for_the_way_back_is_rounded_too_and_needs_no_second_asking() -> None:
    """The backward pass may run outside of the block, and computes as the forward pass did."""
    x, weight = drawn(40, 64).float().requires_grad_(), drawn(24, 64).float().requires_grad_()
    with products.rounded(torch.bfloat16):
        result = products.linear(x, weight)
    result.sum().backward()
    expected = weight.detach().bfloat16().float().sum(0).expand(40, -1)
    torch.testing.assert_close(x.grad, expected, rtol=8e-3, atol=1e-2)


@pytest.mark.parametrize(
    "vocabulary", [{"vocabulary": 60}, {"vocabulary": 4096}, {"vocabulary": 60, "cutoffs": (10, 30)}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_alone_are_rounded_where_that_is_asked_for(vocabulary: dict[str, object], dtype: torch.dtype) -> None:
    """A whole model: its losses are the same bits, its gradients those of float32 but for eight bits of each factor; float64 rounds nothing."""
    model = build(**vocabulary).to(dtype)
    tokens = torch.randint(60, (1, 41), generator=torch.Generator().manual_seed(1))

    def found() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        loss_BT = model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT
        loss_BT.mean().backward()
        return loss_BT.detach().clone(), [
            weight.grad.clone() for weight in model.parameters() if weight.grad is not None
        ]

    plain_BT, plain = found()
    with products.gradients_rounded(torch.bfloat16):
        rounded_BT, rounded = found()
    assert torch.equal(plain_BT, rounded_BT)
    assert len(plain) == len(rounded)
    if dtype == torch.float64:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(rounded, plain, strict=True))
        return
    differ = 0
    for mine, theirs in zip(rounded, plain, strict=True):
        assert mine.dtype == torch.float32
        assert float((mine - theirs).norm()) <= 0.02 * float(theirs.norm()) + 1e-7
        differ += not torch.equal(mine, theirs)
    assert differ > len(plain) / 2
    again_BT, again = found()
    assert torch.equal(again_BT, plain_BT)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, plain, strict=True))
