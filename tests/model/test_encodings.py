"""Order, five ways; and what half precision may not do to it."""

import math

import pytest
import torch

from small_models import build, random_tokens
from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.model import TransformerXL
from transformer_xl.model.encodings import sinusoid


def test_sinusoid_is_all_sines_then_all_cosines():
    table = sinusoid(torch.tensor([0, 3]), width=6, dtype=torch.float64)
    frequencies = [10000 ** -(2 * i / 6) for i in range(3)]
    expected = [math.sin(3 * f) for f in frequencies] + [math.cos(3 * f) for f in frequencies]
    torch.testing.assert_close(table[1], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)
    assert table[0].tolist() == [0, 0, 0, 1, 1, 1]


def test_four_thousand_positions_stay_distinct_under_bf16_autocast():
    model = TransformerXL(
        ModelConfig(vocabulary=20, n_layer=1, d_model=64, n_head=2, d_head=32, d_inner=64, memory=4000)
    ).eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        keys_HSK = model.encoding.distances(4000)[0].relative_key_HSK
        rows_SD = sinusoid(torch.arange(4000), width=64, dtype=torch.bfloat16)
    assert len(torch.unique(rows_SD, dim=0)) == 4000
    assert len(torch.unique(keys_HSK.transpose(0, 1).flatten(1), dim=0)) == 4000
    collided = torch.arange(4000, dtype=torch.bfloat16)  # what computing positions in half precision would have done
    assert len(torch.unique(collided)) < 1000


def test_bf16_changes_the_loss_by_no_more_than_rounding():
    """bf16 keeps 8 bits: each of 2 layers and the softmax may move a logit by parts in 2^8 of its size. A wrong dtype somewhere moves more."""
    torch.manual_seed(0)
    model = TransformerXL(
        ModelConfig(vocabulary=50, n_layer=2, d_model=64, n_head=4, d_head=16, d_inner=128, memory=64)
    ).eval()
    tokens = torch.randint(50, (2, 129))
    losses = []
    for enabled in (False, True):
        memory, parts = None, []
        for start in (0, 64):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                output = model(
                    tokens[:, start : start + 64], targets_BT=tokens[:, start + 1 : start + 65], memory=memory
                )
            assert output.loss_BT.dtype == torch.float32
            memory = output.memory
            parts.append(output.loss_BT)
        losses.append(torch.cat(parts, 1))
    exact, half = losses
    assert not torch.equal(exact, half)
    assert (exact - half).abs().max() < 4 * 2**-8 * exact.abs().max()
    assert (exact.mean() - half.mean()).abs() < 2**-8


@pytest.mark.parametrize("encoding", ["shaw", "shaw_biased"])
@torch.no_grad()
def test_keys_past_the_learned_distances_reuse_the_farthest_row(encoding):
    short = build(encoding=encoding, learned_positions=4, memory=0)
    long = build(encoding=encoding, learned_positions=9, memory=0)
    state = short.state_dict()
    for name in ("encoding.distance_key_NRHK", "encoding.distance_bias_NRH"):
        if name in state:
            last = state[name][:, -1:]
            state[name] = torch.cat([state[name], *[last] * 5], dim=1)
    long.load_state_dict(state)
    tokens = random_tokens(short, lanes=1, length=9)
    torch.testing.assert_close(short(tokens).hidden_BTD, long(tokens).hidden_BTD, rtol=0, atol=1e-12)
    clamped = build(encoding=encoding, learned_positions=9, clamp_len=4, memory=0)
    clamped.load_state_dict(state)
    torch.testing.assert_close(clamped(tokens).hidden_BTD, long(tokens).hidden_BTD, rtol=0, atol=1e-12)


@torch.no_grad()
def test_clamped_distances_look_alike():
    model = build(clamp_len=3)
    keys = model.encoding.distances(8)[0].relative_key_HSK  # column s is distance 7 - s
    assert all(torch.equal(keys[:, s], keys[:, 0]) for s in range(5))
    assert not torch.equal(keys[:, 5], keys[:, 4])


def test_shaw_as_published_has_two_terms_only():
    published, biased = build(encoding="shaw"), build(encoding="shaw_biased")
    assert {name for name, _ in published.encoding.named_parameters()} == {"distance_key_NRHK"}
    assert {name for name, _ in biased.encoding.named_parameters()} == {
        "distance_key_NRHK",
        "content_bias_NHK",
        "distance_bias_NRH",
    }


@torch.no_grad()
def test_absolute_positions_count_down_to_the_end_of_the_segment():
    model = build(encoding="absolute", memory=0, n_layer=1)
    hidden = torch.zeros(1, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(
        model.encoding.enter_first(hidden)[0], sinusoid(torch.tensor([2, 1, 0]), width=8, dtype=torch.float64)
    )


@torch.no_grad()
def test_per_layer_positions_are_added_in_every_layer():
    model = build(encoding="per_layer", memory=0, learned_positions=5)
    hidden = torch.zeros(1, 2, 8, dtype=torch.float64)
    for layer in range(2):
        torch.testing.assert_close(
            model.encoding.enter(hidden, layer=layer)[0], model.encoding.position_NRD[layer, [1, 0]]
        )
    with pytest.raises(InputError, match="6 tokens is longer than the 5 positions"):
        model(random_tokens(model, lanes=1, length=6))
