"""One gradient for a table that is read at the input and by the loss: the same numbers as autograd's sum of many."""

import pytest
import torch

from small_models import build, random_tokens
from transformer_xl.config import NOT_A_TARGET
from transformer_xl.model import table_gradient, vocabulary

KINDS = [
    {"cutoffs": (4, 7, 10)},
    {"cutoffs": (5,), "word_dropout": 0.3},
    {},
    {"cutoffs": (4, 7), "auxiliary_layers": True},
    {"cutoffs": (2, 8), "d_model": 10},
]


def learned(changes, monkeypatch, *, passes, many_words, dtype=torch.float64):
    monkeypatch.setattr(vocabulary, "MANY_WORDS", many_words)
    model = build(train=True, **changes).to(dtype)
    assert (model.vocabulary.table_gradient(torch.zeros(1, 1)) is None) == (many_words > 13)
    torch.manual_seed(5)
    losses, memory = [], None
    for number in range(passes):
        tokens = random_tokens(model, lanes=2, length=7, seed=number)
        targets = tokens[:, 1:].clone()
        targets[targets >= 10] = 9  # the last tail of three has no target
        targets[0, 2] = NOT_A_TARGET
        output = model(tokens[:, :-1], targets_BT=targets, memory=memory)
        memory = output.memory
        total = output.loss_BT.sum()
        (total if output.auxiliary_loss is None else total + output.auxiliary_loss).backward()
        losses.append(output.loss_BT.detach())
    return {"losses": torch.stack(losses), **{name: weight.grad for name, weight in model.named_parameters()}}


@pytest.mark.parametrize("changes", KINDS, ids=lambda changes: "-".join(map(str, changes)) or "plain")
@pytest.mark.parametrize("passes", [1, 2])
def test_one_gradient_is_the_sum_of_many(changes, passes, monkeypatch):
    found = learned(changes, monkeypatch, passes=passes, many_words=1)
    expected = learned(changes, monkeypatch, passes=passes, many_words=1000)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("changes", [kind for kind in KINDS if "word_dropout" not in kind], ids=str)
def test_under_autocast_it_rounds_as_autograd_does(changes, monkeypatch):
    """Both are compared with what is exact: the one gradient may be off by what the sum of many is off, and is as precise as its table."""
    how = {"passes": 1, "monkeypatch": monkeypatch}
    exact = learned(changes, many_words=1000, **how)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = learned(changes, many_words=1, dtype=torch.float32, **how)
        sums = learned(changes, many_words=1000, dtype=torch.float32, **how)
    rounded = 0.0
    for name, expected in exact.items():
        assert found[name].dtype == torch.float32
        off, allowed = ((one[name].double() - expected).norm() / expected.norm() for one in (found, sums))
        assert off <= 2 * allowed + 0.01, f"{name}: {off:.4f} where autograd's sum is {allowed:.4f} off"
        assert off < 0.1 or allowed > 0.05, name
        rounded = max(rounded, float(off))
    assert rounded > 1e-4, "nothing was rounded"


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 5, 3), (9, 1003, 41), (64, 130, 16), (65, 130, 16)])
def test_few_vectors_times_a_large_matrix(shape, dtype, few, monkeypatch):
    """Forwards and backwards, by the kernels and by torch."""
    monkeypatch.setattr(table_gradient.native, "FEW", few)
    P, V, E = shape
    generator = torch.Generator().manual_seed(0)
    x, matrix, bias, gradient = (
        torch.randn(sizes, generator=generator, dtype=torch.float64) for sizes in ((P, E), (V, E), (V,), (P, V))
    )
    close = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-3, "check_dtype": False}
    found = torch.full((V, E), float("nan"), dtype=dtype)
    arguments = (part.to(dtype) for part in (gradient, x, matrix))
    torch.testing.assert_close(table_gradient._back(*arguments, found), gradient @ matrix, **close)
    torch.testing.assert_close(found, gradient.t() @ x, **close)
    arguments = (part.to(dtype) for part in (x, matrix, bias))
    torch.testing.assert_close(table_gradient._linear(*arguments), x @ matrix.t() + bias, **close)


def test_a_gradient_given_back_is_written_over(monkeypatch):
    monkeypatch.setattr(vocabulary, "MANY_WORDS", 1)
    model = build(train=True, cutoffs=(4, 7, 10))
    tokens = random_tokens(model, lanes=2, length=7)

    def gradient(model):
        model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT.sum().backward()
        return model.vocabulary.tables[0].grad

    first = gradient(model)
    expected, place = first.clone(), first.data_ptr()
    first.fill_(torch.nan)
    del first
    model.vocabulary.give_back_gradient()
    model.zero_grad()
    again = gradient(model)
    assert again.data_ptr() == place
    assert torch.equal(again, expected)
    model.zero_grad()
    assert gradient(model).data_ptr() != place  # given back once, used once: `again` is ours
    assert torch.equal(again, expected)


def test_few_positions_and_thousands_of_words():
    """Products are so small then that each further gradient of the table's size costs more; and what was given back is used again."""
    model = build(train=True, vocabulary=vocabulary.FEWEST)
    few, many = (torch.zeros(1, count, dtype=torch.int64) for count in (7, vocabulary.FEW_POSITIONS + 1))
    for tokens, in_one_piece in ((many, False), (few, True)):
        model(tokens, targets_BT=tokens).loss_BT.sum().backward()
        model.vocabulary.give_back_gradient()
        assert (model.vocabulary.spare_gradient is not None) == in_one_piece
    assert build(train=True, vocabulary=vocabulary.FEWEST - 1).vocabulary.table_gradient(few) is None


def test_nothing_is_shared_where_nobody_learns():
    with torch.no_grad():
        assert build(vocabulary=30_000).vocabulary.table_gradient(torch.zeros(1, 1)) is None
    model = build(vocabulary=30_000)
    model.vocabulary.tables[0].requires_grad_(False)
    assert model.vocabulary.table_gradient(torch.zeros(1, 1)) is None
    assert build(vocabulary=30_000, tie_embeddings=False).vocabulary.table_gradient(torch.zeros(1, 1)) is None
    assert build(vocabulary=30_000, d_embed=5).vocabulary.table_gradient(torch.zeros(1, 1)) is None
