"""One gradient for a table that is read at the input and by the loss: the same numbers as autograd's sum of many."""

import pytest
import torch

from small_models import build, random_tokens
from transformer_xl.model import vocabulary
from transformer_xl.model.protocol import NOT_A_TARGET

KINDS = [
    {"cutoffs": (4, 7, 10)},
    {"cutoffs": (5,), "word_dropout": 0.3},
    {},
    {"cutoffs": (4, 7), "auxiliary_layers": True},
]


def learned(changes, monkeypatch, *, passes, many_words):
    monkeypatch.setattr(vocabulary, "MANY_WORDS", many_words)
    model = build(train=True, **changes)
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


def test_nothing_is_shared_where_nobody_learns():
    with torch.no_grad():
        assert build(vocabulary=30_000).vocabulary.table_gradient(torch.zeros(1, 1)) is None
    model = build(vocabulary=30_000)
    model.vocabulary.tables[0].requires_grad_(False)
    assert model.vocabulary.table_gradient(torch.zeros(1, 1)) is None
    assert build(vocabulary=30_000, tie_embeddings=False).vocabulary.table_gradient(torch.zeros(1, 1)) is None
    assert build(vocabulary=30_000, d_embed=5).vocabulary.table_gradient(torch.zeros(1, 1)) is None
