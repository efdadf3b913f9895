"""What only training sees: dropout in each place, locked or not; auxiliary losses; half loss; initialisation; norms."""

import pytest
import torch

from small_models import build, random_tokens
from transformer_xl import native
from transformer_xl.config import DROPOUT_SITES
from transformer_xl.model.dropout import Dropout, word_dropout


@pytest.mark.parametrize("site", DROPOUT_SITES)
def test_each_dropout_acts_in_training_alone(site):
    model = build(train=True, **{f"{site}_dropout": 0.5})
    tokens = random_tokens(model, lanes=2, length=6)
    torch.manual_seed(0)
    first = model(tokens).hidden_BTD
    second = model(tokens).hidden_BTD
    assert not torch.equal(first, second)
    model.eval()
    torch.testing.assert_close(model(tokens).hidden_BTD, build()(tokens).hidden_BTD, rtol=0, atol=0)


@pytest.mark.parametrize("site", DROPOUT_SITES)
def test_each_dropout_can_be_locked_over_time(site, monkeypatch):
    """The mask that a locked site draws is one value long along time, and no other site's is."""
    masks = []
    forward = Dropout.forward

    def spy(self, values, time_axis):
        result = forward(self, values, time_axis)
        if self.rate:
            dropped = (result == 0) & (values != 0)
            first = dropped.narrow(time_axis, 0, 1)
            possible = (values != 0).all(dim=time_axis, keepdim=True)
            masks.append(bool(((dropped == first) | ~possible).all()))
        return result

    monkeypatch.setattr(Dropout, "forward", spy)
    monkeypatch.setattr(native, "usable", lambda like: False)  # the kernels drop inside their attention
    tokens = random_tokens(build(), lanes=2, length=6)
    torch.manual_seed(3)
    build(train=True, locked_dropout=(site,), **{f"{site}_dropout": 0.5})(tokens)
    assert masks
    assert all(masks)
    masks.clear()
    torch.manual_seed(3)
    build(train=True, **{f"{site}_dropout": 0.5})(tokens)
    assert not all(masks)


def test_dropout_keeps_the_expectation():
    torch.manual_seed(0)
    for locked in (False, True):
        values = Dropout(0.25, locked=locked)(torch.ones(400, 3, 200), 1)
        assert values.mean().item() == pytest.approx(1.0, abs=0.02)
        assert values.unique().tolist() == pytest.approx([0.0, 1 / 0.75])


def test_word_dropout_takes_a_word_wherever_it_occurs():
    torch.manual_seed(0)
    tokens = torch.tensor([[0, 1, 2, 3] * 5] * 3)
    factor = word_dropout(tokens, rate=0.5, vocabulary=4, like=torch.ones(1)).squeeze(-1)
    for word in range(4):
        assert len(set(factor[tokens == word].tolist())) == 1
    assert set(factor.unique().tolist()) == {0.0, 2.0}


def test_one_mask_of_positions_serves_every_lane():
    """One mask of R serves every lane and layer: lanes with equal tokens stay equal when only R is dropped."""
    model = build(train=True, position_dropout=0.5)
    tokens = random_tokens(model, lanes=1, length=5).expand(2, 5)
    output = model(tokens).hidden_BTD
    torch.testing.assert_close(output[0], output[1], rtol=0, atol=1e-13)


def test_auxiliary_layers_fade_with_progress():
    model = build(train=True, auxiliary_layers=True, n_layer=4)
    tokens = random_tokens(model, lanes=2, length=6)

    def auxiliary(progress):
        return model(tokens[:, :-1], targets_BT=tokens[:, 1:], progress=progress).auxiliary_loss

    # Layer l of 4 counts until l/8 of training: 3 lower layers at the start, 2 after 1/8, 1 after 2/8, none after 3/8.
    values = [auxiliary(progress).item() for progress in (0.0, 0.125, 0.25, 0.375)]
    assert values[0] > values[1] > values[2] > values[3] == 0.0
    model.eval()
    assert auxiliary(0.0) is None


def test_auxiliary_targets_look_further_ahead():
    model = build(train=True, auxiliary_targets=1)
    tokens = random_tokens(model, lanes=2, length=6)
    output = model(tokens[:, :-1], targets_BT=tokens[:, 1:])
    logits = model.auxiliary_classifiers[0](output.hidden_BTD[:, :-1])
    expected = 0.5 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
    torch.testing.assert_close(output.auxiliary_loss, expected)


@torch.no_grad()
def test_half_loss_scores_the_recent_part():
    model = build(memory=0)
    tokens = random_tokens(model, lanes=2, length=9)
    full = model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT
    half = model(tokens[:, :-1], targets_BT=tokens[:, 5:]).loss_BT
    torch.testing.assert_close(half, full[:, 4:], rtol=0, atol=1e-12)


def test_initialisation_is_the_published_one():
    from transformer_xl.config import ModelConfig
    from transformer_xl.model import TransformerXL

    torch.manual_seed(0)
    config = ModelConfig(
        vocabulary=2000,
        n_layer=2,
        d_model=128,
        n_head=4,
        d_head=32,
        d_inner=512,
        cutoffs=(500,),
        div_val=2,
        projections="always",
    )
    model = TransformerXL(config)
    for name, parameter in model.named_parameters():
        if "norm.weight" in name:
            assert parameter.mean().item() == pytest.approx(1.0, abs=0.01)
            assert parameter.std().item() == pytest.approx(0.02, rel=0.25)
        elif "projections" in name:
            assert parameter.std().item() == pytest.approx(0.01, rel=0.1), name
        elif "bias_PHK" in name or parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.15), name
        else:
            assert parameter.eq(0).all(), name


@torch.no_grad()
def test_pre_norm_with_and_without_final_norm():
    plain, final = build(norm="pre"), build(norm="pre", final_norm=True)
    tokens = random_tokens(plain, lanes=1, length=4)
    final.load_state_dict(plain.state_dict(), strict=False)
    final.final_norm.weight.fill_(1.0)
    final.final_norm.bias.zero_()
    expected = torch.nn.functional.layer_norm(plain(tokens).hidden_BTD, (8,), eps=1e-5)
    torch.testing.assert_close(final(tokens).hidden_BTD, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_pre_keys_leaves_the_query_as_it_is():
    """The authors' absolute encodings, pre-norm: keys and values are normalised, the query is not."""
    pre, keys = build(norm="pre", encoding="absolute", memory=0), build(norm="pre_keys", encoding="absolute", memory=0)
    tokens = random_tokens(pre, lanes=1, length=4)
    assert (pre(tokens).hidden_BTD - keys(tokens).hidden_BTD).abs().max() > 1e-6
    for model in (pre, keys):  # with an identity norm on already normalised input the two are one
        model.attend = lambda query, key, value, **rest: value[:, :, -query.shape[2] :]
    torch.testing.assert_close(pre(tokens).hidden_BTD, keys(tokens).hidden_BTD, rtol=0, atol=1e-12)
