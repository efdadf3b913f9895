"""Runs of tokens: each has the row that its own tokens say, wherever the text is cut, and what cannot be is refused."""

import pytest
import torch

from small_models import build, random_tokens
from transformer_xl.config import ModelConfig
from transformer_xl.errors import ConfigError, InputError
from transformer_xl.model.ngrams import BITS, FIRST, NO_TOKEN, SECOND, SPREAD, rows_of

RUNS = {"ngrams": (2, 4), "ngram_rows": 11, "d_ngram": 5}


def spelled_out(run: list[int], rows: int) -> int:
    """The hash, with numbers that have no end; the last token first."""
    value = 0
    for token in reversed(run):
        value = (value * SPREAD + token + 1) & BITS
    value = ((value ^ (value >> 15)) * FIRST) & BITS
    value = ((value ^ (value >> 12)) * SECOND) & BITS
    return (value ^ (value >> 15)) % rows


@pytest.mark.parametrize("vocabulary", [13, 267_735])
def test_every_run_has_the_row_that_its_tokens_say(vocabulary):
    tokens = torch.randint(vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    recent = torch.tensor([[NO_TOKEN, NO_TOKEN, 5], [1, 2, 3]])
    found = rows_of(tokens, recent, orders=(2, 3, 4), rows=1009)
    for lane in range(2):
        text = [*recent[lane].tolist(), *tokens[lane].tolist()]
        for order, rows_BT in zip((2, 3, 4), found, strict=True):
            expected = [spelled_out(text[3 + t - order + 1 : 3 + t + 1], 1009) for t in range(9)]
            assert rows_BT[lane].tolist() == expected


def test_runs_are_spread_over_the_rows():
    pairs = torch.cartesian_prod(torch.arange(64), torch.arange(64))
    (rows_BT,) = rows_of(pairs[:, 1:], pairs[:, :1], orders=(2,), rows=4096)
    assert len(rows_BT.unique()) > 0.55 * 4096  # chance gives 63 %


@torch.no_grad()
def test_without_weights_it_is_the_model_without():
    plain, with_runs = build(memory=6), build(memory=6, **RUNS)
    with_runs.load_state_dict(plain.state_dict(), strict=False)
    with_runs.ngrams.initialise()
    tokens = random_tokens(plain, lanes=2, length=7)
    torch.testing.assert_close(with_runs(tokens).hidden_BTD, plain(tokens).hidden_BTD, rtol=0, atol=0)


@torch.no_grad()
def test_lanes_forget_their_tokens_and_are_chosen_with_them():
    model = build(memory=6, **RUNS)
    memory = model(random_tokens(model, lanes=2, length=5)).memory
    assert (memory.recent_BP >= 0).all()
    assert memory.reset([1]).recent_BP.tolist()[1] == [NO_TOKEN] * 3
    assert torch.equal(memory.truncated(0).recent_BP, memory.recent_BP)  # they are no part of what attention remembers
    assert memory.limited(torch.tensor([2, 0])).recent_BP.eq(NO_TOKEN).tolist() == [[True, False, False], [True] * 3]
    assert torch.equal(memory.select([1, 0]).recent_BP, memory.recent_BP.flip(0))


def test_memory_with_other_tokens_than_its_model_has_is_refused():
    model, plain = build(memory=6, **RUNS), build(memory=6)
    tokens = random_tokens(model, lanes=1, length=3)
    with pytest.raises(InputError, match="3 recent tokens where this model has 0"):
        plain(tokens, memory=model.start_memory(1))
    with pytest.raises(InputError, match="0 recent tokens where this model has 3"):
        model(tokens, memory=plain.start_memory(1))
    wrong = model.start_memory(1)
    wrong.recent_BP[0, 0] = 99
    with pytest.raises(InputError, match="recent"):
        model(tokens, memory=wrong)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("ngrams", {"ngrams": (1,), "ngram_rows": 5, "d_ngram": 5}),
        ("ngrams", {"ngrams": (3, 2), "ngram_rows": 5, "d_ngram": 5}),
        ("ngrams", {"ngrams": (2, 2), "ngram_rows": 5, "d_ngram": 5}),
        ("ngrams", {"ngrams": (9,), "ngram_rows": 5, "d_ngram": 5}),
        ("ngram_rows", {"ngrams": (2,), "d_ngram": 5}),
        ("d_ngram", {"ngrams": (2,), "ngram_rows": 5}),
        ("ngram_rows", {"ngram_rows": 5}),
    ],
)
def test_orders_and_tables_that_do_not_go_together_are_refused(field, changes):
    with pytest.raises(ConfigError, match=rf"^model\.{field}: "):
        ModelConfig(vocabulary=10, **changes)
