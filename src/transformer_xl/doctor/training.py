"""Whether training on this device is the training of the processor: the same losses, the same run after a stop, and how often a step waits."""

import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import EvaluationConfig, RecurrentConfig, RunConfig
from transformer_xl.devices import choose_precision
from transformer_xl.doctor.kernels import Precision
from transformer_xl.doctor.setting import ISSUE, SMALL, SMALL_MODEL, Result, Setting, joined
from transformer_xl.model import TransformerXL
from transformer_xl.model.products import multiplies_bfloat16
from transformer_xl.model.reference import reference_attend
from transformer_xl.presets import find_preset
from transformer_xl.training.loop import train
from transformer_xl.training.session import Session
from transformer_xl.training.step import take_step

STEPS = 20
APART = {"float32": 2e-3, "bfloat16": 5e-2}
"""Nats by which the losses of a step may differ: rounding grows from step to step."""
STOPPED_AT, ENDS_AT = 6, 12
MOST_WAITS = 1.0
EXACT = Precision(name="float32", within=0.0)
"""Without TF32, which a process may have been allowed."""


def small_runs() -> dict[str, RunConfig]:
    """The paper's layer with its adaptive softmax and its optimiser, all that came after it with Muon, and the recurrent ones; without dropout, whose
    draws differ from device to device."""
    beyond = find_preset("bytes").run
    sizes = {"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "memory": 24, "ngram_rows": 1024}
    muon = replace(SMALL.training, optimiser="muon", learning_rate=1e-2)
    runs = {
        "paper": replace(SMALL, model=replace(SMALL_MODEL, cutoffs=(100, 115), div_val=2)),
        "modern": replace(SMALL, model=replace(beyond.model, **sizes), training=muon),  # type: ignore[arg-type]
    }
    lstm = RecurrentConfig(vocabulary=256, cell="lstm", n_layer=2, d_model=32, d_hidden=48, init_std=0.2)
    for model in (lstm, replace(lstm, cell="qrnn")):
        runs[model.cell] = RunConfig(model=model, training=SMALL.training, evaluation=EvaluationConfig(segment=24))
    return runs


def steps(setting: Setting) -> Result:
    """Twenty steps on the device, as it trains and in float32, beside the same by the formula on the processor in float64."""
    found: dict[str, float] = {}
    wrong = []
    for name, config in small_runs().items():
        expected = losses(config, setting, device=torch.device("cpu"), exact=True)
        for precision in trained_in(setting.device):
            asked = replace(config, training=replace(config.training, precision=precision))
            with EXACT.on(setting.device) if precision == "float32" else nullcontext():
                there = losses(asked, setting, device=setting.device)
            apart = [abs(one - other) for one, other in zip(there, expected, strict=True)]
            found[f"{name}, {precision}"] = max(apart)
            if not max(apart) <= APART[precision] or not there[-1] < there[0]:
                first = next((step for step, gap in enumerate(apart, 1) if not gap <= APART[precision]), STEPS)
                wrong.append(f"{name} in {precision}: {max(apart):.1e} nats apart, from step {first} on")
    if wrong:
        return Result(
            status="failed",
            figure=f"{len(wrong)} wrong",
            sentence=f"{STEPS} steps of training go elsewhere than on the processor: {joined(wrong)}",
            remedy=f"do not train on {setting.device}; see which check above failed, too; {ISSUE}",
            details=found,
        )
    name, apart_most = max(found.items(), key=lambda item: item[1])
    return Result(
        status="ok", figure=f"{len(found)} trainings, at most {apart_most:.0e} nats apart ({name})", details=found
    )


def trained_in(device: torch.device) -> list[Literal["float32", "bfloat16"]]:
    half = choose_precision(device) == "bfloat16" or (device.type == "cpu" and multiplies_bfloat16())
    return ["float32", "bfloat16"] if half else ["float32"]


def losses(config: RunConfig, setting: Setting, *, device: torch.device, exact: bool = False) -> list[float]:
    """Mean nats of each step."""
    session = Session.fresh(config, store=setting.store, device=device)
    if exact:
        session.model.double()
        if isinstance(session.model, TransformerXL):
            session.model.attend = reference_attend
    found = []
    for _ in range(STEPS):
        update = take_step(session, session.lanes.next())
        session.step += 1
        found.append(update.nats / update.tokens)
    return found


# --- stopped, and gone on


def resuming(setting: Setting) -> Result:
    """A run that is stopped in the middle and goes on, beside one that is not: the same files, to the bit."""
    training = replace(SMALL.training, precision=choose_precision(setting.device), steps=ENDS_AT, average="ema")
    config = replace(SMALL, model=replace(SMALL_MODEL, dropout=0.1, attention_dropout=0.1), training=training)
    at_once, in_parts = setting.folder / "at-once", setting.folder / "in-parts"
    how: dict[str, Any] = {"store": setting.store, "device": str(setting.device)}

    def stop(now: Any) -> None:
        if now.step == STOPPED_AT:
            now.stop()

    whole = train(config, folder=at_once, **how)
    stopped_at = train(config, folder=in_parts, on_step=stop, **how).step
    if whole.step != ENDS_AT or not STOPPED_AT <= stopped_at < ENDS_AT:
        raise KeyboardInterrupt  # a signal was there first, and training took it for its own
    train(config, folder=in_parts, **how)
    files = ("model.safetensors", "training.safetensors")
    different = [name for name in files if _bytes(at_once, name) != _bytes(in_parts, name)]
    if different:
        return Result(
            status="failed",
            figure="other bits",
            sentence=f"a run stopped at step {stopped_at} and gone on differs at step {ENDS_AT} from one that was not: {joined(different)}",
            remedy="stopped runs go on, but not to the bit. If the check of determinism failed too, mend that first; otherwise "
            + ISSUE,
        )
    return Result(status="ok", figure=f"stopped at {stopped_at} of {ENDS_AT}: the same bits")


def _bytes(folder: Path, name: str) -> bytes:
    return (RunFolder(folder).checkpoint_at(ENDS_AT) / name).read_bytes()


# --- waiting


def waits(setting: Setting) -> Result:
    """How often a step of the loop makes the host wait for the device, by CUDA's own count."""
    if setting.device.type != "cuda":
        return Result(
            status="skipped",
            figure="not measurable here",
            sentence=f"torch counts waits for CUDA alone; {setting.device.type} cannot be asked",
        )
    training = replace(SMALL.training, precision=choose_precision(setting.device), log_every=STEPS)
    first, last = STEPS // 2, STEPS - 2

    def watch(now: Any) -> None:
        if now.step in (first, last):
            torch.cuda.set_sync_debug_mode("warn" if now.step == first else "default")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            how: dict[str, Any] = {"store": setting.store, "device": str(setting.device), "on_step": watch}
            train(replace(SMALL, training=training), folder=setting.folder / "watched", **how)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchroniz" in str(one.message))
    share = sum(places.values()) / (last - first)
    details = {"per step": share, "places": dict(places)}
    if share > MOST_WAITS:
        return Result(
            status="failed",
            figure=f"{share:g} a step",
            sentence=f"a step waits {share:g} times for the device, where {MOST_WAITS:g} is enough: {joined([*places])}",
            remedy=f"training is slower than it need be, and right; {ISSUE}",
            details=details,
        )
    return Result(status="ok", figure=f"{share:g} a step", details=details)
