"""One token's step with shapes that never change against the engine's own: the same numbers, one graph for `torch.compile`, one address for every buffer."""

import pytest
import torch

from small_models import build, random_tokens
from transformer_xl import native
from transformer_xl.inference import Engine, cache

KINDS = [
    {},
    {"same_length": True},
    {"same_length": True, "same_length_keys": "memory"},
    {"clamp_len": 3},
    {"encoding": "shaw"},
    {"encoding": "shaw_biased"},
    {"initial_memory": "zeros"},
    {"norm": "pre", "final_norm": True},
    {"neighbours": 3},
    {"neighbours": 9, "same_length": True},
    {"ngrams": (2, 3), "ngram_rows": 11, "d_ngram": 5},
]


@pytest.fixture(autouse=True)
def by_torch(monkeypatch):
    """Without the compiled kernels, and with so little room that the memory is moved every few tokens."""
    monkeypatch.setattr(native, "usable", lambda like: False)
    monkeypatch.setattr(cache, "ROOM", 4)


def static(engine: Engine, monkeypatch) -> Engine:
    """As it would be on CUDA."""
    usual = engine._through_torch
    monkeypatch.setattr(
        engine, "_through_torch", lambda hidden: (engine._through_one_step if hidden.shape[1] == 1 else usual)(hidden)
    )
    return engine


@pytest.mark.parametrize("sight", ["last", "segment"])
@pytest.mark.parametrize("changes", KINDS, ids=lambda changes: "-".join(map(str, changes.values())) or "plain")
def test_the_same_numbers_token_by_token(changes, sight, monkeypatch):
    model = build(**changes)
    usual, ours = Engine(model, lanes=3, sight=sight), static(Engine(model, lanes=3, sight=sight), monkeypatch)
    tokens_BT = random_tokens(model, lanes=3, length=40)
    pieces = (tokens_BT[:, :4], *tokens_BT[:, 4:].split(1, dim=1))
    for count, piece_BT in enumerate(pieces):
        if count == 9:
            usual.reset([1])
            ours.reset([1])
        torch.testing.assert_close(ours.read(piece_BT), usual.read(piece_BT), rtol=0, atol=1e-10)
    assert ours._one_token.steps == len(pieces) - 1, "it was made once"
    for mine, theirs in zip(ours.kept.tensors().values(), usual.kept.tensors().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_lanes_that_come_and_go_are_followed(monkeypatch):
    model = build()
    tokens_BT = random_tokens(model, lanes=3, length=12)
    usual, ours = Engine(model, lanes=3), static(Engine(model, lanes=3), monkeypatch)
    for position in range(6):
        usual.read(tokens_BT[:, position : position + 1])
        ours.read(tokens_BT[:, position : position + 1])
    usual, ours = usual.select([2, 0]), static(ours.select([2, 0]), monkeypatch)
    for position in range(6, 12):
        piece_BT = tokens_BT[[2, 0], position : position + 1]
        torch.testing.assert_close(ours.read(piece_BT), usual.read(piece_BT), rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, {"neighbours": 3}, {"encoding": "shaw_biased"}], ids=str)
def test_torch_compile_takes_the_step_as_one_graph_once(changes, monkeypatch):
    graphs = []
    torch._dynamo.reset()  # another model is another graph

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    model = build(**changes)
    usual, ours = Engine(model, lanes=2), static(Engine(model, lanes=2), monkeypatch)
    tokens_BT = random_tokens(model, lanes=2, length=30)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for position in range(30):
            piece_BT = tokens_BT[:, position : position + 1]
            expected_B1D = usual.read(piece_BT)
            torch.testing.assert_close(ours.read(piece_BT), expected_B1D, rtol=0, atol=1e-10)
            if position == 0:
                step = ours._one_token.step
                ours._one_token.step = torch.compile(step, fullgraph=True, dynamic=False, backend=counting)
    assert len(graphs) == 1


def test_nothing_moves_and_nobody_waits(monkeypatch):
    """A CUDA graph writes where it was recorded, and a number that the host reads would end the recording."""
    model = build()
    ours = static(Engine(model, lanes=2), monkeypatch)
    tokens_BT = random_tokens(model, lanes=2, length=30)
    ours.read(tokens_BT[:, :1])
    places = [buffer.data_ptr() for buffer in (*ours.kept.keys, *ours.kept.values)]
    kept = ours._one_token
    for position in range(1, 30):
        ours.read(tokens_BT[:, position : position + 1])
    assert ours._one_token is kept
    assert [buffer.data_ptr() for buffer in (*ours.kept.keys, *ours.kept.values)] == places
    hidden_B1D, end_1, lowest_B = torch.zeros(2, 1, 8, dtype=torch.float64), torch.tensor([6]), torch.tensor([0, 3])
    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    monkeypatch.setattr(torch.Tensor, "__bool__", None)
    with torch.inference_mode():
        assert kept.step(hidden_B1D, end_1, lowest_B).shape == (2, 1, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_card_replays_what_it_recorded():
    model = build()
    tokens_BT = random_tokens(model, lanes=2, length=40)
    usual = Engine(model, lanes=2)
    expected = [usual.read(piece_BT) for piece_BT in tokens_BT.split(1, dim=1)]
    ours = Engine(model.cuda(), lanes=2)
    found = [ours.read(piece_BT.cuda()).cpu() for piece_BT in tokens_BT.split(1, dim=1)]
    assert ours._one_token._graph
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), rtol=0, atol=1e-10)
