"""The recurrent baselines against plain loops in float64, and the state they carry."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_xl.config import ModelConfig, RecurrentConfig, RunConfig, TrainingConfig
from transformer_xl.errors import ConfigError, InputError
from transformer_xl.model import Recurrent, parameter_count
from transformer_xl.model.scan import linear_scan

CELLS = [("lstm", 1), ("qrnn", 1), ("qrnn", 2)]


def build(cell: str, window: int = 1, **changes: object) -> Recurrent:
    torch.manual_seed(0)
    fields = {"vocabulary": 13, "n_layer": 3, "d_model": 6, "d_hidden": 9, "init_std": 0.5, "projection_init_std": 0.5}
    model = Recurrent(RecurrentConfig(cell=cell, window=window, **(fields | changes))).double()  # type: ignore[arg-type]
    return model.eval()


def tokens(lanes: int = 3, length: int = 21) -> Tensor:
    return torch.randint(13, (lanes, length), generator=torch.Generator().manual_seed(1))


def plain_lstm(model: Recurrent, x_BTX: Tensor) -> Tensor:
    for layer in model.layers:
        into_XX, recurrent_XX, into_X, recurrent_X = layer.lstm.parameters()
        hidden_BX = cell_BX = x_BTX.new_zeros(x_BTX.shape[0], recurrent_XX.shape[1])
        outs = []
        for x_BX in x_BTX.unbind(1):
            gates = F.linear(x_BX, into_XX, into_X) + F.linear(hidden_BX, recurrent_XX, recurrent_X)
            enter, forget, new, out = gates.chunk(4, dim=-1)
            cell_BX = forget.sigmoid() * cell_BX + enter.sigmoid() * new.tanh()
            hidden_BX = out.sigmoid() * cell_BX.tanh()
            outs.append(hidden_BX)
        x_BTX = torch.stack(outs, dim=1)
    return x_BTX


def plain_qrnn(model: Recurrent, x_BTX: Tensor) -> Tensor:
    for layer in model.layers:
        width = layer.gates.weight.shape[0] // 3
        cell_BX = x_BTX.new_zeros(x_BTX.shape[0], width)
        before_BX = torch.zeros_like(x_BTX[:, 0])
        outs = []
        for x_BX in x_BTX.unbind(1):
            seen = torch.cat([before_BX, x_BX], dim=-1) if layer.window == 2 else x_BX
            new, forget, out = layer.gates(seen).chunk(3, dim=-1)
            cell_BX = forget.sigmoid() * cell_BX + (1 - forget.sigmoid()) * new.tanh()
            outs.append(out.sigmoid() * cell_BX)
            before_BX = x_BX
        x_BTX = torch.stack(outs, dim=1)
    return x_BTX


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 64, 67, 130, 520])
def test_the_scan_is_the_loop_in_values_and_gradients(length):
    generator = torch.Generator().manual_seed(length)
    shape = (2, length, 3)
    factor, added = (torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    start = torch.rand(2, 3, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.rand(shape, generator=generator, dtype=torch.float64)
    state, states = start, []
    for t in range(length):
        state = factor[:, t] * state + added[:, t]
        states.append(state)
    looped, scanned = torch.stack(states, dim=1), linear_scan(factor, added, start)
    torch.testing.assert_close(scanned, looped, rtol=0, atol=1e-12)
    inputs = (factor, added, start)
    expected = torch.autograd.grad((looped * weight).sum(), inputs)
    found = torch.autograd.grad((scanned * weight).sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("cell", "window"), CELLS)
def test_layers_are_the_plain_loop_in_values_and_gradients(cell, window):
    model, tokens_BT = build(cell, window), tokens()
    plain = plain_lstm if cell == "lstm" else plain_qrnn
    targets_BT = tokens_BT.roll(-1, dims=1)
    output = model(tokens_BT, targets_BT=targets_BT)
    hidden_BTD = plain(model, model.vocabulary.embed(tokens_BT))
    torch.testing.assert_close(output.hidden_BTD, hidden_BTD, rtol=0, atol=1e-12)
    parameters = list(model.parameters())
    found = torch.autograd.grad(output.loss_BT.sum(), parameters)
    expected = torch.autograd.grad(model.vocabulary.loss(hidden_BTD, targets_BT).sum(), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("cell", "window"), CELLS)
def test_the_state_carries_everything_from_segment_to_segment(cell, window):
    model, tokens_BT = build(cell, window), tokens()
    whole = model(tokens_BT).hidden_BTD
    state, parts = None, []
    for start, stop in ((0, 1), (1, 9), (9, 21)):
        output = model(tokens_BT[:, start:stop], memory=state)
        state, parts = output.memory, [*parts, output.hidden_BTD]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12)
    assert not any(part.requires_grad for part in state.layers)


@pytest.mark.parametrize(("cell", "window"), CELLS)
def test_a_reset_lane_starts_anew_and_the_others_go_on(cell, window):
    model, tokens_BT = build(cell, window), tokens()
    state = model(tokens_BT[:, :10]).memory.reset([1]).select([2, 1])
    kept = type(state).from_tensors(state.tensors())
    hidden = model(tokens_BT[[2, 1], 10:], memory=kept).hidden_BTD
    torch.testing.assert_close(hidden[0], model(tokens_BT).hidden_BTD[2, 10:], rtol=0, atol=1e-12)
    torch.testing.assert_close(hidden[1], model(tokens_BT[1:2, 10:]).hidden_BTD[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("cell", "window"), CELLS)
def test_weights_are_dropped_in_training_once_for_the_whole_segment(cell, window):
    model, tokens_BT = build(cell, window, n_layer=1, weight_dropout=0.5), tokens()
    still = model(tokens_BT).hidden_BTD
    model.train()
    torch.manual_seed(3)
    dropped = model(tokens_BT).hidden_BTD
    assert not torch.allclose(dropped, still)
    weight = model.layers[0].lstm.weight_hh_l0 if cell == "lstm" else model.layers[0].gates.weight
    torch.manual_seed(3)
    with torch.no_grad():
        weight.copy_(F.dropout(weight, 0.5))
    torch.testing.assert_close(model.eval()(tokens_BT).hidden_BTD, dropped, rtol=0, atol=1e-12)


def test_dropout_masks_are_held_over_time():
    model = build("lstm", n_layer=1, output_dropout=0.5).train()
    gone_BTD = model(tokens()).hidden_BTD == 0
    assert gone_BTD.any()
    assert torch.equal(gone_BTD, gone_BTD[:, :1].expand_as(gone_BTD))
    assert not torch.equal(gone_BTD[0], gone_BTD[1])


def test_adaptive_softmax_gives_a_distribution():
    model = build("qrnn", 2, cutoffs=(4, 8), div_val=2)
    total = model.log_probabilities(model(tokens()).hidden_BTD).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_counts_parameters_without_building():
    config = RecurrentConfig(vocabulary=100, cell="lstm", n_layer=2, d_model=8, d_hidden=10)
    layers = 4 * 10 * (8 + 10 + 2) + 4 * 8 * (10 + 8 + 2)
    assert parameter_count(config) == 100 * 8 + 100 + layers


def test_refuses_what_a_state_cannot_do():
    model = build("lstm")
    with pytest.raises(InputError, match=r"overlap: 3 .* lstm"):
        model(tokens(), overlap=3)
    with pytest.raises(InputError, match="memory: 64 is for attention"):
        model.set_lengths(memory=64)
    with pytest.raises(InputError, match="memory: shapes"):
        model(tokens(), memory=model.start_memory(2))
    with pytest.raises(ConfigError, match=r"training\.context: 8 is for attention, and the lstm has none"):
        RunConfig(model=model.config, training=TrainingConfig(context=8))
    with pytest.raises(ConfigError, match=r"model\.window: 3"):
        RecurrentConfig(vocabulary=5, cell="qrnn", window=3)  # type: ignore[arg-type]
    assert not ModelConfig(vocabulary=5).recurrent
