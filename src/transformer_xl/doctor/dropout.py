"""Whether dropout drops the same numbers on the way back as on the way there: at every place that has one."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import DROPOUT_SITES, ModelConfig
from transformer_xl.doctor.kernels import attended, like, precisions, seeded, shapes
from transformer_xl.doctor.setting import ISSUE, Result, Setting, differences, drawn_model, drawn_tokens, joined, worst
from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import Backend, backend_of
from transformer_xl.model.dropout import Dropout
from transformer_xl.model.reference import reference_attend

RATE = 0.3
REMEMBERED, SEEN = 8, 24
"""Memory and all keys of the attention whose probabilities are looked at: no more than its heads are wide."""
STEP = 1e-6
SLOPE_WITHIN = 1e-4


def masks(setting: Setting) -> Result:
    wrong = [*_of_values(setting), *_of_attention(setting), *_of_whole_models(setting)]
    if wrong:
        return Result(
            status="failed",
            figure=f"{len(wrong)} wrong",
            sentence=f"dropout draws another mask backwards than forwards: {joined(wrong)}",
            remedy=f"train with model.dropout and model.attention_dropout 0 on {setting.device} until it is mended; {ISSUE}",
            details={"wrong": wrong},
        )
    return Result(status="ok", figure="the same masks both ways")


def _of_values(setting: Setting) -> list[str]:
    """Of ones: what comes out is the mask itself, and so is the gradient."""
    wrong = []
    ways: dict[str, Callable[[Dropout, Tensor], Tensor]] = {
        "of a layer's values": lambda drop, ones: drop(ones, 1),
        "after the ReLU": lambda drop, ones: drop.after_relu(ones, 1),
    }
    for name, way in ways.items():
        for locked in (False, True):
            drop = Dropout(RATE, locked=locked).train()
            ones_BTD = torch.ones(3, 50, 70, device=setting.device, requires_grad=True)
            with seeded(setting.device):
                mask_BTD = way(drop, ones_BTD)
                (gradient_BTD,) = torch.autograd.grad(mask_BTD.sum(), ones_BTD)
            kept = float((mask_BTD > 0).double().mean())
            if not torch.equal(mask_BTD.detach(), gradient_BTD) or not abs(kept - (1 - RATE)) < 0.1:
                wrong.append(f"dropout {name}{', held over time' if locked else ''}")
    return wrong


def _of_attention(setting: Setting) -> list[str]:
    """The value of key j is the j-th unit vector: what a query gathers are its probabilities, and show the mask. With it, the formula has gradients."""
    wrong = []
    for names, config in shapes(setting.models).items():
        if config.d_head < SEEN:
            continue
        config = replace(config, memory=REMEMBERED, attention_dropout=RATE, neighbours=0)
        exact = drawn_model(config)
        for precision in precisions(setting.device):
            model = deepcopy(exact).train().to(setting.device, precision.weights)
            with precision.on(setting.device):
                by = backend_of("attention", config, like(model), training=True)
                shown, found = (_drawn(model, by, unit_values=unit) for unit in (True, False))
            B, T, _ = shown["the result"].shape
            shown_BHTK = shown["the result"].view(B, T, config.n_head, config.d_head).transpose(1, 2)
            kept_BHTS = (shown_BHTK[..., :SEEN] != 0).double().cpu() / (1 - RATE)
            expected = attended(exact, _under(kept_BHTS), segment=T, rounded=precision.computes_in)
            part, share = worst(differences(found, expected))
            if not share <= precision.within:
                wrong.append(f"attention's own for {names[0]} in {precision.name} by {by} ({part} is {share:.1e} off)")
    return wrong


def _drawn(model: TransformerXL, by: Backend, *, unit_values: bool) -> dict[str, Tensor]:
    with seeded(like(model).device):
        return attended(model, by, segment=SEEN - REMEMBERED, unit_values=unit_values)


def _under(kept_BHTS: Tensor) -> Callable[..., Tensor]:
    """The formula under a mask that somebody drew."""

    def masked(*given: Tensor, **seen: Any) -> Tensor:
        return reference_attend(*given, **{**seen, "dropout": lambda probability_BHTS: probability_BHTS * kept_BHTS})

    return masked


def _of_whole_models(setting: Setting) -> list[str]:
    """The slope that the gradient promises, beside two losses a little apart under the same draws: every place together, in float64."""
    if setting.device.type == "mps":  # which has no float64
        return []
    sizes = {"vocabulary": 40, "n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 48, "memory": 8}
    wrong = []
    for locked in ((), DROPOUT_SITES):
        rates = {"dropout": RATE, "attention_dropout": RATE, "word_dropout": RATE}
        model = drawn_model(ModelConfig(**sizes, **rates, locked_dropout=locked, init_std=0.2)).train()  # type: ignore[arg-type]
        model.to(setting.device)
        _loss(model).backward()  # type: ignore[no-untyped-call]
        generator = torch.Generator().manual_seed(4)
        weights = list(model.parameters())
        way = [torch.randn(weight.shape, generator=generator).to(weight) for weight in weights]
        steps = list(zip(weights, way, strict=True))
        promised = sum(float((weight.grad * step).sum()) for weight, step in steps if weight.grad is not None)
        losses = []
        with torch.no_grad():
            for sign in (1, -1):
                for weight, step in steps:
                    weight.add_(step, alpha=sign * STEP)
                losses.append(float(_loss(model)))
                for weight, step in steps:
                    weight.sub_(step, alpha=sign * STEP)
        slope = (losses[0] - losses[1]) / (2 * STEP)
        if not abs(slope - promised) <= SLOPE_WITHIN * max(1.0, abs(promised)):
            held = ", held over time" if locked else ""
            wrong.append(
                f"that of a whole model{held} (its loss rises by {slope:.6g}, and the gradient says {promised:.6g})"
            )
    return wrong


def _loss(model: TransformerXL) -> Tensor:
    tokens_BT = drawn_tokens(2, 13, seed=5, vocabulary=model.config.vocabulary).to(like(model).device)
    with seeded(like(model).device):
        loss_BT: Tensor = model(tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:]).loss_BT
    return loss_BT.sum()
