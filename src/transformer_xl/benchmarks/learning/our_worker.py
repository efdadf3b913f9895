"""One of our models in a process of its own: trained by the loop that everybody uses, as its configuration says, for so long; then judged.

The requests and answers are those of `peer_worker`, with a whole configuration as the model.
"""

import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformer_xl.benchmarks.learning.peer_worker import answer_with
from transformer_xl.checkpoint import RunFolder, load_checkpoint
from transformer_xl.config import RunConfig
from transformer_xl.config.fields import read
from transformer_xl.config.run import LONGEST_WARM_UP
from transformer_xl.console import be_quiet
from transformer_xl.data.store import Store, open_store
from transformer_xl.evaluation import evaluate, make_rule
from transformer_xl.model import AnyModel, parameter_count
from transformer_xl.training import train
from transformer_xl.training.clock import seconds_of_a_step
from transformer_xl.training.recording import read_metrics
from transformer_xl.training.reporting import Step

CPU = torch.device("cpu")
CALIBRATION_SHARE = 0.08
"""Of the time, spent before it starts on finding out how long a step takes."""


def learn(request: dict[str, Any]) -> dict[str, Any]:
    processor_at = time.process_time()
    store, seconds = open_store(request["store"]), request["seconds"]
    config = read(RunConfig, request["model"], name="")
    config = replace(config, training=replace(config.training, seed=request["seed"]))
    with tempfile.TemporaryDirectory(prefix="txl-learning-") as name:
        folder = Path(name)
        clock = time.process_time if request["one_core"] else None
        a_step = seconds_of_a_step(config, store=store, device=CPU, within=CALIBRATION_SHARE * seconds, clock=clock)
        config = for_seconds(config, seconds=seconds, a_step=a_step)
        every = math.ceil(config.training.steps / request["marks"])
        watched = {"validate_every": every, "log_every": every, "validation_tokens": request["valid"]["tokens"]}
        config = replace(config, training=replace(config.training, save_every=0, save_minutes=0.0, **watched))
        own = OwnTime(every)
        train(config, store=store, folder=folder / "run", device="cpu", on_step=own.told)
        trained, validated = told_by(RunFolder(folder / "run"))
        if request["one_core"]:  # the loop tells time by the clock on the wall
            trained = {step: {**line, "seconds": own.seconds(step)} for step, line in trained.items()}
        last = trained[max(trained)]
        model = last_model(RunFolder(folder / "run"))
        test = request["test"]
        return {
            "parameters": parameter_count(config.model),
            "seconds": last["seconds"],
            "steps": last["step"],
            "tokens": last["tokens"],
            "curve": curve_of(trained, validated, **request["valid"]),
            "valid": bits_per_byte(model, config, store, split="valid", **request["valid"]),
            "test": bits_per_byte(model, config, store, split="test", **test) if test else None,
            "cpu_seconds": time.process_time() - processor_at,
        }


class OwnTime:
    """The processor's time in steps. What lies between two is the second's, but where a validation lies there, too: such a step counts as the others do in the
    mean."""

    def __init__(self, every: int) -> None:
        self._every, self._told_at = every, list[float]()

    def told(self, step: Step) -> None:
        self._told_at.append(time.process_time())

    def seconds(self, steps: int) -> float:
        """Of the first so many."""
        between = np.diff(self._told_at[:steps])
        alone = between[np.arange(1, len(between) + 1) % self._every != 0]
        return steps * float(alone.mean()) if len(alone) else 0.0


def for_seconds(config: RunConfig, *, seconds: float, a_step: float) -> RunConfig:
    """With as many steps as take so long, and a warm-up that leaves time for the rest. The others' clocks stand still while they are validated, too, so
    it is the steps that are counted here, and not the minutes."""
    count = max(1, round(seconds / a_step))
    warm_up = min(config.training.warm_up, math.ceil(LONGEST_WARM_UP * count))
    return replace(config, training=replace(config.training, steps=count, warm_up=warm_up))


def told_by(run: RunFolder) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """The lines about training, by step, and those about validation."""
    lines = list(read_metrics(run.metrics))
    return {line["step"]: line for line in lines if line["kind"] == "train"}, [
        line for line in lines if line["kind"] == "validation"
    ]


def curve_of(
    trained: dict[int, dict[str, Any]], validated: list[dict[str, Any]], *, tokens: int, bytes: int
) -> list[dict[str, float]]:
    """Valid bits per byte at so many minutes. Valid was so many tokens that stand for so many bytes."""
    return [
        {
            "minutes": trained[line["step"]]["seconds"] / 60,
            "tokens": trained[line["step"]]["tokens"],
            "valid": line["loss_nats"] / math.log(2) * (tokens - 1) / bytes,
        }
        for line in validated
    ]


def last_model(run: RunFolder) -> AnyModel:
    """The weights at the end, not the best on valid: the others are given no choice either."""
    return load_checkpoint(run.checkpoint_at(max(run.steps()))).model


def bits_per_byte(model: AnyModel, config: RunConfig, store: Store, *, split: str, tokens: int, bytes: int) -> float:
    text = store.split(split).first(tokens)
    found = evaluate(model, text, rule=make_rule(model, config.evaluation, tokens=tokens))
    return found.bits_per_token * (tokens - 1) / bytes


if __name__ == "__main__":
    be_quiet()
    answer_with(learn)
