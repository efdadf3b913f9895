"""A kernel says what it can do: every field of a configuration is declared for each, and what nobody declared is computed by torch."""

from dataclasses import dataclass, fields, replace

import pytest
import torch

from small_models import build, random_tokens
from transformer_xl import native
from transformer_xl.config import ModelConfig
from transformer_xl.inference import Engine
from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import backend_of
from transformer_xl.native import doors
from transformer_xl.native.capabilities import KERNELS


@dataclass(frozen=True, kw_only=True)
class ConfigOfTomorrow(ModelConfig):
    squared_relu: bool = False
    """Made up: shapes a layer, and no kernel has heard of it."""


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_field_is_declared(kernel):
    assert set(KERNELS[kernel]) == {field.name for field in fields(ModelConfig)}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_field_that_nobody_declared_is_refused_even_where_it_is_off(kernel):
    known = build(memory=4).config
    told = {field.name: getattr(known, field.name) for field in fields(known)}
    assert native.supports(kernel, known)
    assert not native.supports(kernel, ConfigOfTomorrow(**told))
    assert not native.supports(kernel, ConfigOfTomorrow(**told, squared_relu=True))


def test_a_model_with_an_undeclared_field_calls_no_kernel_that_knows_layers(monkeypatch):
    called = []
    call = doors._call
    monkeypatch.setattr(doors, "_call", lambda name, *rest, **more: (called.append(name), call(name, *rest, **more)))
    known = build(memory=4, train=True)
    told = {field.name: getattr(known.config, field.name) for field in fields(known.config)}
    model = TransformerXL(ConfigOfTomorrow(**told)).double()
    model.load_state_dict(known.state_dict())
    tokens_BT = random_tokens(model, lanes=2, length=6)
    model(tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:]).loss_BT.sum().backward()
    engine = Engine(model.eval(), lanes=2)
    assert not engine.writes
    losses = [engine.score(tokens_BT), engine.score(tokens_BT[:, :1])]
    assert set(called) <= {"linear", "drop", "relu_drop", "relu_drop_backward"}
    usual = Engine(known.eval(), lanes=2)
    for ours, theirs in zip(losses, [usual.score(tokens_BT), usual.score(tokens_BT[:, :1])], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10, equal_nan=True)
    assert native.library() is None or {"step", "attend"} <= set(called), "the usual model is read by the kernels"


def test_backends_are_chosen_by_configuration_device_and_dtype():
    if native.library() is None:
        pytest.skip("no C++ compiler here")
    config, like = build(memory=4).config, torch.zeros(1)
    assert backend_of("attention", config, like) == "native"
    assert backend_of("attention", config, like.half()) == "torch"
    assert backend_of("attention", config, like.to("meta")) == "torch"
    held = replace(config, attention_dropout=0.1, locked_dropout=("attention",))
    assert backend_of("attention", held, like, training=True) == "torch"
    assert backend_of("attention", held, like) == "native"
    biased = replace(config, encoding="shaw_biased", learned_positions=8)
    assert (backend_of("attention", biased, like), backend_of("layers", biased, like)) == ("torch", "native")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert backend_of("attention", config, like) == "torch"
