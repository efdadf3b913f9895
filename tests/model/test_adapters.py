"""Adapters beside a model, merged into it, and read by the engines: one function, to 1e-10; and only they learn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from small_models import build, random_memory, random_tokens
from transformer_xl.config import RecurrentConfig
from transformer_xl.errors import ConfigError
from transformer_xl.inference import make_reader
from transformer_xl.model import build_model
from transformer_xl.model.adapters import DOWN, UP, attach, factor_shapes, factors, merged, merged_in_place
from transformer_xl.model.products import Linear

CLOSE = {"rtol": 0, "atol": 1e-10}


def adapted(model, *, rank: int = 2, seed: int = 3):
    """With factors large enough that every mistake in them shows."""
    attach(model, rank=rank)
    torch.manual_seed(seed)
    for name, factor in model.named_parameters():
        if name in factors({name: factor}):
            factor.data = torch.randn_like(factor)
    return model


@st.composite
def models(draw):
    encoding = draw(st.sampled_from(["relative", "shaw", "shaw_biased", "per_layer"]))
    more = {"ngrams": (2, 4), "ngram_rows": 11, "d_ngram": 5, "neighbours": 3}
    return build(
        encoding=encoding,
        memory=0 if encoding == "per_layer" else 6,
        norm=draw(st.sampled_from(["post", "pre"])),
        cutoffs=draw(st.sampled_from([(), (4, 9)])),
        initial_memory=draw(st.sampled_from(["empty", "zeros"])),
        **draw(st.sampled_from([{}, more])),
    )


@given(model=models(), rank=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_merged_equals_beside_by_forward_and_by_the_engine(model, rank):
    adapted(model, rank=rank)
    tokens = random_tokens(model, lanes=2, length=5)
    memory = random_memory(model, lanes=2, length=6) if model.config.memory else None
    with torch.no_grad():
        beside = model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory)
        with merged_in_place(model):
            together = model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory)
            reader = make_reader(model, lanes=2, sight="segment", window=5)
            read_BTD = reader.read(tokens)
        alone = model(tokens)
    torch.testing.assert_close(together.loss_BT, beside.loss_BT, **CLOSE)
    torch.testing.assert_close(together.hidden_BTD, beside.hidden_BTD, **CLOSE)
    torch.testing.assert_close(read_BTD, alone.hidden_BTD, **CLOSE)
    other = build_model(model.config).double().eval()
    other.load_state_dict(merged(model.state_dict()))
    with torch.no_grad():
        again = other(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory)
    assert torch.equal(again.loss_BT, together.loss_BT)


def test_the_kernels_read_what_the_adapters_add():
    model = adapted(build(n_layer=3, memory=8), rank=3)
    tokens = random_tokens(model, lanes=1, length=12)
    reader = None
    with torch.no_grad():
        with merged_in_place(model):
            reader = make_reader(model, lanes=1, sight="segment")
            read_BTD = torch.cat([reader.read(tokens[:, place : place + 1]) for place in range(12)], dim=1)
        memory, parts = None, []
        for place in range(12):
            output = model(tokens[:, place : place + 1], memory=memory)
            memory = output.memory
            parts.append(output.hidden_BTD)
    assert reader.linear.compiled
    torch.testing.assert_close(read_BTD, torch.cat(parts, dim=1), **CLOSE)


def test_a_new_adapter_changes_nothing_and_a_merge_is_undone_to_the_bit():
    model = build()
    tokens = random_tokens(model, lanes=2, length=6)
    before, weights = model(tokens).hidden_BTD, {name: value.clone() for name, value in model.state_dict().items()}
    attach(model, rank=4)
    assert torch.equal(model(tokens).hidden_BTD, before)
    adapted_weights = {name: value.clone() for name, value in adapted(model).state_dict().items()}
    with merged_in_place(model):
        assert set(model.state_dict()) == set(weights)
        assert not torch.equal(model(tokens).hidden_BTD, before)
    after = model.state_dict()
    assert after.keys() == adapted_weights.keys()
    assert all(torch.equal(after[name], value) for name, value in adapted_weights.items())
    assert all(torch.equal(after[name], value) for name, value in weights.items())


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_reaches_the_adapters_alone_and_is_that_of_the_merged_matrix(recompute):
    model = adapted(build(train=True), rank=3)
    model.recompute = recompute
    tokens = random_tokens(model, lanes=2, length=6)
    model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT.sum().backward()
    given_one = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert given_one == set(factors(dict(model.named_parameters())))
    plain = build_model(model.config).double()
    plain.load_state_dict(merged(model.state_dict()))
    plain(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT.sum().backward()
    for name, linear in plain.named_modules():
        if isinstance(linear, Linear):
            adapter = model.get_submodule(name).adapter
            torch.testing.assert_close(adapter.up_OR.grad, linear.weight.grad @ adapter.down_RI.T, **CLOSE)
            torch.testing.assert_close(adapter.down_RI.grad, adapter.up_OR.T @ linear.weight.grad, **CLOSE)


def test_in_float32_the_product_is_the_rounded_one_by_every_library():
    """Enough rows that oneDNN is asked where it is the faster."""
    torch.manual_seed(0)
    model = build(d_model=32, d_inner=48, d_head=16).float()
    adapted(model, rank=4)
    linear = model.layers[0].inner
    values = torch.randn(4, 64, 32)
    exact = F.linear(values.double(), merged(model.double().state_dict())["layers.0.inner.weight"], linear.bias)
    torch.testing.assert_close(model.float().layers[0].inner(values).double(), exact, rtol=1e-4, atol=1e-4)


def test_the_mean_of_down_times_down_is_one():
    torch.manual_seed(0)
    model = build(d_model=64, d_head=32)
    attach(model, rank=8)
    down_RI = model.layers[0].query.adapter.down_RI.detach()
    assert (down_RI.T @ down_RI).diagonal().mean() == pytest.approx(1, abs=0.2)


def test_factors_are_named_and_shaped_as_told():
    model = build()
    shapes = factor_shapes(model, rank=2)
    attach(model, rank=2)
    found = {name: tuple(value.shape) for name, value in factors(model.state_dict()).items()}
    assert found == shapes
    assert len(shapes) == 2 * 5 * model.config.n_layer
    assert {name.removesuffix(UP).removesuffix(DOWN).split(".", 2)[2] for name in shapes} == {
        *("query", "key_value", "attention_output", "inner", "outer")
    }


@pytest.mark.parametrize("rank", [0, -1, 7, 10**30])
def test_a_rank_that_no_matrix_has_is_refused(rank):
    with pytest.raises(ConfigError, match="the narrowest matrix of this model has 6; take 1 to 6"):
        attach(build(), rank=rank)


def test_a_recurrent_model_has_no_adapters():
    model = build_model(RecurrentConfig(vocabulary=13, cell="lstm", n_layer=2, d_model=8, d_hidden=6))
    with pytest.raises(ConfigError, match="this is an lstm; train all its weights, without an adapter"):
        attach(model, rank=2)
