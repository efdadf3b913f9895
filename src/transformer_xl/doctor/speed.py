"""How fast a training step is here, beside the device's own peak and beside what NVIDIA published of its code; and whether it takes the memory that is
estimated. By arithmetic and clock: a busy machine is a slower one."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from transformer_xl.benchmarks.workloads import CLUSTER_SHARES, Workload, work_of_training
from transformer_xl.config import DROPOUT_SITES, ModelConfig, RunConfig
from transformer_xl.data.feeding.lanes import Segment
from transformer_xl.devices import choose_precision
from transformer_xl.doctor.setting import ISSUE, LANES, SEGMENT, Result, Setting, drawn_tokens, one_layer
from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import backend_of
from transformer_xl.presets import find_preset
from transformer_xl.training.footprint import footprint_of, per_lane
from transformer_xl.training.session import Session
from transformer_xl.training.step import take_step

STATED = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "V100": 125e12}
"""Operations a second in half precision without sparsity, by the makers' data sheets; the first name that a card's name holds."""
WARM_UP, TIMED = 2, 5
LEAST_SHARE = 0.04
"""Of the peak. NVIDIA's code reaches 9 to 16 % of an A100's; less than half of the lower says that something is in the way."""
SECONDS_OF_A_PEAK = 0.5
ESTIMATE_WITHIN = 1.15


@dataclass(frozen=True, kw_only=True)
class Timed:
    name: str
    run: RunConfig
    published: int | None = None
    """Tokens a second of NVIDIA's code on one A100 of 40 GB in mixed precision: README of DeepLearningExamples' Transformer-XL, PyTorch 20.06."""


def timed_on(device: torch.device) -> list[Timed]:
    """On CUDA what NVIDIA timed; elsewhere what the demo trains."""
    if device.type != "cuda":
        return [Timed(name="bytes", run=find_preset("bytes").run)]
    standard, large = (find_preset(f"wikitext-103-{size}").run for size in ("standard", "large"))
    sizes = {"d_model": 512, "n_head": 8, "d_head": 64, "d_inner": 2048, "memory": 192}
    base = replace(
        standard,
        model=replace(standard.model, **sizes),  # type: ignore[arg-type]
        training=replace(standard.training, segment=192, lanes=32),
    )
    large = replace(large, training=replace(large.training, lanes=16))
    return [
        Timed(name="NVIDIA's base", run=base, published=59_961),
        Timed(name="wikitext-103-large", run=large, published=25_084),
    ]


def training_speed(setting: Setting) -> Result:
    device, details = setting.device, dict[str, Any]()
    figures, wrong = [], []
    for timed in timed_on(device):
        asked = choose_precision(device) if device.type == "cuda" else timed.run.training.precision
        dtype = torch.bfloat16 if asked == "bfloat16" else torch.float32
        peak = measured_peak(device, dtype)
        run, seconds, memory = fitting(
            replace(timed.run, training=replace(timed.run.training, precision=asked)), setting
        )
        peak = max(peak, measured_peak(device, dtype))  # before and after: machines warm up, and others come and go
        lanes, segment = run.training.lanes, run.training.segment
        tokens, rate = lanes * segment / seconds, operations(run) / seconds
        found: dict[str, Any] = {"tokens_per_second": tokens, "lanes": lanes, "precision": asked}
        found |= {"operations_per_second": rate, "measured_peak": peak, "share_of_measured_peak": rate / peak}
        told = f"{timed.name} {tokens:,.0f} tokens/s, {rate / peak:.0%} of the measured peak"
        if stated := stated_peak(device):
            found |= {"stated_peak": stated, "share_of_stated_peak": rate / stated}
            told += f", {rate / stated:.0%} of the stated one"
        if timed.published:
            found["published_a100_tokens_per_second"] = timed.published
            told += f" (NVIDIA's code on an A100: {timed.published:,})"
        wrong += [f"{told}: far below what the device can do"] * (rate / peak < LEAST_SHARE)
        if memory is not None:
            count = estimated(run, device)
            found |= {"peak_memory_bytes": memory, "estimated_bytes": count}
            told += f", {memory / 1e9:.1f} GB where {count / 1e9:.1f} are estimated"
            wrong += [f"{told}: more than was estimated"] * (memory > count * ESTIMATE_WITHIN)
        details[timed.name] = found
        figures.append(told)
    if wrong:
        return Result(
            status="failed",
            figure="; ".join(figures),
            sentence="; ".join(wrong),
            remedy="see that nothing else runs on the machine, then look at the checks of paths, waits and memory; if they are green, "
            + ISSUE,
            details=details,
        )
    return Result(status="ok", figure="; ".join(figures), details=details)


def operations(run: RunConfig) -> float:
    """Of a training step, as docs/scaling.md counts them."""
    assert isinstance(run.model, ModelConfig)
    lanes, segment = run.training.lanes, run.training.segment
    work = Workload(name="a step", kind="training", config=run.model, segment=segment, batch=lanes)
    return work_of_training(work).flops


def fitting(run: RunConfig, setting: Setting) -> tuple[RunConfig, float, int | None]:
    """With as many of the lanes as fit: that run, the seconds of its steps (the median), and the device's highest memory."""
    while True:
        try:
            return (run, *steps_of(run, setting))
        except torch.OutOfMemoryError:
            if run.training.lanes == 1:
                raise
            run = replace(run, training=replace(run.training, lanes=run.training.lanes // 2))


def steps_of(run: RunConfig, setting: Setting) -> tuple[float, int | None]:
    device = setting.device
    on_card = device.type == "cuda"
    if on_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    session = Session.fresh(run, store=setting.store, device=device)
    draw, taken = np.random.default_rng(0), []
    for _ in range(WARM_UP + TIMED):
        segment = drawn_segment(run, draw)
        began_at = finished(device)
        take_step(session, segment)
        session.step += 1
        taken.append(finished(device) - began_at)
    return float(np.median(taken[WARM_UP:])), torch.cuda.max_memory_allocated(device) if on_card else None


def finished(device: torch.device) -> float:
    """The time when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def drawn_segment(run: RunConfig, draw: np.random.Generator) -> Segment:
    """Words fall into the clusters as WikiText-103's do; within one, all alike."""
    B, T, edges = run.training.lanes, run.training.segment, run.model.cluster_edges
    shares = np.array(CLUSTER_SHARES[: run.model.clusters])
    cluster = draw.choice(len(shares), size=(B, T + 1), p=shares / shares.sum())
    low, high = np.array(edges[:-1])[cluster], np.array(edges[1:])[cluster]
    tokens_BT = draw.integers(low, high)
    nowhere = {"positions": np.zeros((B, T), dtype=np.int64), "document_starts": np.zeros((B, T), dtype=bool)}
    return Segment(tokens=tokens_BT[:, :-1], targets=tokens_BT[:, 1:], **nowhere)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of one square product."""
    size = 8192 if device.type == "cuda" else 1024
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def seconds(times: int, act: Callable[[], Any]) -> float:
        began_at = finished(device)
        for _ in range(times):
            act()
        return (finished(device) - began_at) / times

    def act() -> Any:
        return one @ other

    seconds(2, act)
    once = seconds(1, act)
    best = min(seconds(max(1, int(SECONDS_OF_A_PEAK / 5 / once)), act) for _ in range(5))
    return 2 * size**3 / best


def stated_peak(device: torch.device) -> float | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for known, peak in STATED.items() if known in name), None)


# --- memory


def estimated(run: RunConfig, device: torch.device) -> int:
    """By the attention that it is trained with."""
    assert isinstance(run.model, ModelConfig)
    half = run.training.precision == "bfloat16" and device.type == "cuda"
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
        by = backend_of("attention", run.model, torch.empty(0, device=device), training=True)
    return footprint_of(run, by=by).total


def memory(setting: Setting) -> Result:
    """What one layer more keeps for the way back, beside what `txl presets --memory` counts."""
    found, wrong = dict[str, dict[str, Any]](), []
    for name in [name for name in ("enwik8-12l", "wikitext-103-standard", "bytes") if name in setting.models]:
        rates = {f"{site}_dropout": None for site in DROPOUT_SITES if site != "attention"}
        config = one_layer(setting.models[name], dropout=0.1, **rates)
        three, two = (kept_bytes(replace(config, n_layer=layers), setting) for layers in (3, 2))
        by = backend_of("attention", config, torch.empty(0, device=setting.device), training=True)
        # Relative keys stand there once for all lanes.
        counted = 4 * (
            LANES * per_lane(config, T=SEGMENT, by=by) + (config.memory + SEGMENT) * config.n_head * config.d_head
        )
        found[name] = {"kept_bytes": three - two, "estimated_bytes": counted, "by": by}
        if three - two > counted * ESTIMATE_WITHIN:
            wrong.append(f"a layer of {name} keeps {(three - two) / 1e6:.2f} MB where {counted / 1e6:.2f} are counted")
    if wrong:
        return Result(
            status="failed",
            figure=f"{len(wrong)} above the estimate",
            sentence="; ".join(wrong),
            remedy=f"take fewer lanes at once (training.accumulation) than txl presets --memory says; {ISSUE}",
            details=found,
        )
    shares = ", ".join(f"{name} {one['kept_bytes'] / one['estimated_bytes']:.0%}" for name, one in found.items())
    return Result(status="ok", figure=f"of the estimate: {shares}" if found else "no preset to count", details=found)


def kept_bytes(config: ModelConfig, setting: Setting) -> int:
    """All that autograd keeps of a segment after a memory, weights left out."""
    model = TransformerXL(config).train().to(setting.device)
    tokens_BT = drawn_tokens(LANES, 3 * SEGMENT + 1).to(setting.device)
    past = None
    for place in (0, SEGMENT):
        past = model(tokens_BT[:, place : place + SEGMENT], memory=past).memory
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens_BT[:, 2 * SEGMENT : -1], targets_BT=tokens_BT[:, 2 * SEGMENT + 1 :], memory=past)
    return sum(kept.values())
