"""What computes attention here, and whether it computes the paper's formula: for the shape of every preset, in every type the device has, both ways.

The oracle is `model/reference.py` in float64 on the processor, which shares no line with what it judges.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from transformer_xl import native
from transformer_xl.config import ModelConfig
from transformer_xl.doctor.setting import (
    CUTOFFS,
    ISSUE,
    LANES,
    SEGMENT,
    WORDS,
    Result,
    Setting,
    differences,
    drawn_model,
    drawn_tokens,
    joined,
    one_layer,
    worst,
)
from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import Attention, Backend, Mask, backend_of, segment_attention
from transformer_xl.model.layer import Layer
from transformer_xl.model.reference import reference_attend
from transformer_xl.native.cuda import OLDEST

REPEATED = ModelConfig(
    vocabulary=WORDS,
    n_layer=2,
    d_model=256,
    n_head=4,
    d_head=64,
    d_inner=512,
    memory=SEGMENT,
    cutoffs=CUTOFFS,
    dropout=0.1,
    attention_dropout=0.1,
)
BY_TORCH: Backend = "torch"
"""Checked beside what was chosen: whatever no kernel knows is computed by it, on every device."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A way in which this device computes, and how far from exact arithmetic it may be: a share of each result's norm."""

    name: str
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    matrix_products: str = "highest"
    """As `torch.set_float32_matmul_precision` has it; high: TF32."""
    within: float

    @property
    def computes_in(self) -> torch.dtype:
        return self.autocast or self.weights

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.matrix_products)
        try:
            with torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None):
                yield
        finally:
            torch.set_float32_matmul_precision(before)


def precisions(device: torch.device) -> list[Precision]:
    """Those that the device has. On a processor half precision is a matter of products alone, and attention is computed in float32."""
    float32 = Precision(name="float32", within=1e-5)
    if device.type == "mps":
        return [float32]
    found = [float32, Precision(name="float64", weights=torch.float64, within=1e-11)]
    if device.type == "cuda":
        found.append(Precision(name="float16", autocast=torch.float16, within=1e-2))
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST:
        found.append(Precision(name="tf32", matrix_products="high", within=1e-2))
        found.append(Precision(name="bfloat16", autocast=torch.bfloat16, within=5e-2))
    return found


# --- who computes, and why


def paths(setting: Setting) -> Result:
    """Of each preset: who attends while it is trained and while it is read, in each precision."""
    found: dict[str, dict[str, Any]] = {}
    slow: list[str] = []
    fastest = {"cpu": "native", "cuda": "triton"}.get(setting.device.type, "torch")
    for name, config in setting.models.items():
        ways: dict[str, dict[str, str]] = {"training": {}, "reading": {}, "why": {}}
        for precision in precisions(setting.device):
            told = torch.empty(0, device=setting.device, dtype=precision.weights)
            with precision.on(setting.device):
                by = backend_of("attention", config, told, training=True)
                # Whatever has no kernels that keep keys and values is read by torch's own operations.
                reads = "native" if backend_of("layers", config, told) == "native" else "torch"
            reason = why(by, config, setting.device, precision)
            ways["training"][precision.name], ways["reading"][precision.name] = by, reads
            ways["why"][precision.name] = reason
        found[name] = ways
        known = fastest == "torch" or native.supports("tiles" if fastest == "triton" else "attention", config)
        slow += [name] * (known and fastest not in ways["training"].values())
    found |= {name: {"why": {"all": "a recurrent model has no attention"}} for name in setting.recurrent}
    if slow:
        return Result(
            status="failed",
            figure=f"{len(slow)} of {len(found)} presets slow",
            sentence=f"the kernels know the shapes of {joined(slow)}, and are not used: {missing(setting.device)}",
            remedy=remedy(setting.device),
            details=found,
        )
    counted = Counter(ways["training"]["float32"] for ways in found.values() if "training" in ways)
    told_of = ", ".join(f"{count} by {by}" for by, count in sorted(counted.items()))
    return Result(status="ok", figure=f"float32: {told_of}" if counted else "no preset attends", details=found)


def why(by: str, config: ModelConfig, device: torch.device, precision: Precision) -> str:
    if by in ("native", "triton"):
        return "the kernels know this shape and type"
    if config.attention_dropout and "attention" in config.locked_dropout:
        return "no kernel holds a mask of probabilities over time"
    kernel: native.Kernel = "tiles" if device.type == "cuda" else "attention"
    if device.type in ("cpu", "cuda") and not native.supports(kernel, config):
        return "the kernels do not know this shape (native/capabilities.py)"
    if device.type == "cuda" and precision.name in ("float32", "float64"):
        return f"exact {precision.name} runs on no tensor core: torch's fused attention"
    return missing(device)


def missing(device: torch.device) -> str:
    if device.type == "cpu":
        return "there is no C++ compiler, or it could not build the kernels"
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return "the card is older than compute capability 8.0"
    return "Triton could not build the kernels, or they computed something else; what it said is in the JSON"


def remedy(device: torch.device) -> str:
    if device.type == "cpu":
        return "install g++ or clang++, or name one in CXX; torch computes the same more slowly"
    return "install the triton that came with this torch, and a newer driver; torch's fused attention computes the same and keeps more in memory"


# --- against the formula


def formula(setting: Setting) -> Result:
    """What attention gives, and the gradient of all that goes into it, with a memory of which one lane has less."""
    off: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    known, nearest = shapes(setting.models), 0.0
    for names, config in known.items():
        exact = drawn_model(config)
        for precision in precisions(setting.device):
            expected = attended(exact, reference_attend, rounded=precision.computes_in)
            model = deepcopy(exact).to(setting.device, precision.weights)
            with precision.on(setting.device):
                chosen = backend_of("attention", config, like(model), training=True)
                found = {by: attended(model, by) for by in dict.fromkeys((chosen, BY_TORCH))}
            for by, values in found.items():
                part, share = worst(differences(values, expected))
                for name in names:
                    off.setdefault(name, {})[f"{precision.name} {by}"] = share
                nearest = max(nearest, share / precision.within)
                if not share <= precision.within:
                    wrong.append(f"{names[0]} in {precision.name} by {by}: {part} is {share:.1e} off")
    if wrong:
        return Result(
            status="failed",
            figure=f"{len(wrong)} wrong",
            sentence=f"attention is not the paper's formula: {joined(wrong)}",
            remedy=f"do not train or read with these on {setting.device}; {ISSUE}",
            details=off,
        )
    return Result(
        status="ok", figure=f"{len(known)} shapes, at most {nearest:.0%} of the rounding allowed", details=off
    )


def shapes(models: Mapping[str, ModelConfig]) -> dict[tuple[str, ...], ModelConfig]:
    """What is left of presets where only attention is looked at; those of one shape together."""
    names: dict[ModelConfig, list[str]] = {}
    for name, config in models.items():
        plain = one_layer(config, d_inner=8, cutoffs=(), div_val=1, projections="needed", tie_projections=())
        names.setdefault(plain, []).append(name)
    return {tuple(found): config for config, found in names.items()}


def like(model: TransformerXL) -> Tensor:
    return model.vocabulary.bias_V


def attended(
    model: TransformerXL,
    by: Backend | Attention,
    *,
    segment: int = SEGMENT,
    rounded: torch.dtype | None = None,
    unit_values: bool = False,
) -> dict[str, Tensor]:
    """What queries gather, and the gradients of all that goes in. `rounded`: to what queries, keys and values are rounded first, where autocast does not.
    `unit_values`: of key j the j-th unit vector, so that what a query gathers are its probabilities."""
    config, place = model.config, like(model)
    B, H, K, M, T = LANES, config.n_head, config.d_head, config.memory, segment
    generator = torch.Generator().manual_seed(3)
    query_BTX = torch.randn(B, T, H * K, generator=generator)
    weight_BTX = torch.randn(B, T, H * K, generator=generator).to(place.device)
    kept_BSX = torch.randn(B, M + T, 2 * H * K, generator=generator)
    if unit_values:
        kept_BSX[..., H * K :] = torch.eye(M + T, K)[None].repeat(1, 1, H)
    if torch.is_autocast_enabled(place.device.type):  # as products leave them
        rounded = torch.get_autocast_dtype(place.device.type)
    given = [part.to(rounded) if rounded else part for part in (query_BTX, kept_BSX[:, :M], kept_BSX[:, M:])]
    dtype = place.dtype if place.dtype == torch.float64 else given[0].dtype
    leaves = [part.to(place.device, dtype).requires_grad_() for part in given]
    mask = Mask(memory=M, segment=T, valid_B=torch.tensor([M, M // 3]), visible_distance=None, device=place.device)
    layer = cast(Layer, model.layers[0])
    learned = dict(model.encoding.named_parameters())
    if layer.neighbours_WX is not None:
        learned["neighbours"] = layer.neighbours_WX
    out_BTX = segment_attention(by, model.encoding.distances(M + T), mask)(layer, *leaves)
    sides = {name: side for name, side in zip(("queries", "memory", "segment"), leaves, strict=True) if side.numel()}
    wanted = {f"the gradient of {name}": leaf for name, leaf in {**sides, **learned}.items()}
    objective = (out_BTX.to(weight_BTX.dtype) * weight_BTX).sum()
    gradients = torch.autograd.grad(objective, list(wanted.values()), materialize_grads=True)
    return {"the result": out_BTX.detach(), **dict(zip(wanted, gradients, strict=True))}


# --- the same again


def lesson(model: TransformerXL) -> dict[str, Tensor]:
    """Losses and gradients of a second segment."""
    tokens_BT = drawn_tokens(LANES, 2 * SEGMENT + 1).to(like(model).device)
    memory = model(tokens_BT[:, :SEGMENT]).memory
    model.zero_grad(set_to_none=True)
    output = model(tokens_BT[:, SEGMENT:-1], targets_BT=tokens_BT[:, SEGMENT + 1 :], memory=memory)
    output.loss_BT.sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"losses": output.loss_BT.detach(), **{f"the gradient of {name}": grad for name, grad in gradients.items()}}


def determinism(setting: Setting) -> Result:
    """The same lesson three times, with dropout: the same bits."""
    different: dict[str, Any] = {}
    checked = 0
    for precision in precisions(setting.device):
        model = drawn_model(REPEATED).train().to(setting.device, precision.weights)
        first: dict[str, Tensor] = {}
        for _ in range(3):
            with seeded(setting.device), precision.on(setting.device):
                found = lesson(model)
            for name, value in found.items():
                checked += 1
                if not torch.equal(value, first.setdefault(name, value)):
                    different[f"{precision.name} {name}"] = float((value - first[name]).abs().max())
    if different:
        return Result(
            status="failed",
            figure=f"{len(different)} differ",
            sentence=f"the same step gives other bits each time: {joined(list(different))}",
            remedy="runs cannot be repeated to the bit here. Try CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment; if it stays, "
            + ISSUE,
            details=different,
        )
    return Result(status="ok", figure=f"{checked} results, the same bits", details={"results": checked})


@contextmanager
def seeded(device: torch.device, seed: int = 7) -> Iterator[None]:
    """Draws begin at the same place, and nobody else's are moved."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
