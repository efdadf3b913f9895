"""One of our models in a process of its own: trained by the loop that everybody uses, as its configuration says, for so long; then judged.

The requests and answers are those of `peer_worker`, with a whole configuration as the model.
"""

import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer_xl.benchmarks.learning.peer_worker import answer_with
from transformer_xl.checkpoint import RunFolder, load_checkpoint
from transformer_xl.config import RunConfig
from transformer_xl.config.fields import read
from transformer_xl.console import be_quiet
from transformer_xl.data.store import Store, open_store
from transformer_xl.evaluation import evaluate, make_rule
from transformer_xl.model import AnyModel, parameter_count
from transformer_xl.training import train
from transformer_xl.training.recording import read_metrics

CALIBRATION_SHARE = 0.04
"""Of the time, spent before it starts on finding out how long a step takes."""
FIRST_STEPS = 6
LONGEST_WARM_UP = 0.2
"""Of all steps: a preset's warm-up is counted in steps, and made for more of them."""


def learn(request: dict[str, Any]) -> dict[str, Any]:
    processor_at = time.process_time()
    store, seconds = open_store(request["store"]), request["seconds"]
    config = read(RunConfig, request["model"], name="")
    config = replace(config, training=replace(config.training, seed=request["seed"]))
    with tempfile.TemporaryDirectory(prefix="txl-learning-") as name:
        folder = Path(name)
        config = for_seconds(config, seconds=seconds, store=store, folder=folder)
        every = math.ceil(config.training.steps / request["marks"])
        watched = {"validate_every": every, "log_every": every, "validation_tokens": request["valid_bytes"]}
        config = replace(config, training=replace(config.training, save_every=0, **watched))
        train(config, store=store, folder=folder / "run")
        curve, trained = curve_of(RunFolder(folder / "run"))
        model = last_model(RunFolder(folder / "run"))
        test = request["test_bytes"]
        return {
            "parameters": parameter_count(config.model),
            "seconds": trained["seconds"],
            "steps": trained["step"],
            "bytes": trained["tokens"],
            "curve": curve,
            "valid": bits_per_byte(model, config, store, split="valid", tokens=request["valid_bytes"]),
            "test": bits_per_byte(model, config, store, split="test", tokens=test) if test else None,
            "cpu_seconds": time.process_time() - processor_at,
        }


def for_seconds(config: RunConfig, *, seconds: float, store: Store, folder: Path) -> RunConfig:
    """With as many steps as take so long. The loop counts steps, so some are timed first, on weights that are thrown away; this is the one place that
    knows, and would go if the loop were ended by the clock."""
    roughly = seconds_of_a_step(config, steps=FIRST_STEPS, store=store, folder=folder / "first")
    steps = max(FIRST_STEPS, 2 * math.ceil(CALIBRATION_SHARE * seconds / roughly))
    a_step = seconds_of_a_step(config, steps=steps, store=store, folder=folder / "second")
    count = max(1, round(seconds / a_step))
    warm_up = min(config.training.warm_up, math.ceil(LONGEST_WARM_UP * count))
    return replace(config, training=replace(config.training, steps=count, warm_up=warm_up))


def seconds_of_a_step(config: RunConfig, *, steps: int, store: Store, folder: Path) -> float:
    """In the later half of so many."""
    only_train = tuple(split for split in store.manifest.splits if split.name == "train")
    without_valid = Store(folder=store.folder, manifest=replace(store.manifest, splits=only_train))
    training = replace(config.training, steps=steps, validate_every=0, save_every=0, log_every=steps // 2)
    train(replace(config, training=training), store=without_valid, folder=folder)
    lines = [line for line in read_metrics(RunFolder(folder).metrics) if line["kind"] == "train"]
    return float((lines[-1]["seconds"] - lines[0]["seconds"]) / (lines[-1]["step"] - lines[0]["step"]))


def curve_of(run: RunFolder) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Valid bits at so many minutes, and the last line about training."""
    lines = list(read_metrics(run.metrics))
    trained = {line["step"]: line for line in lines if line["kind"] == "train"}
    curve = [
        {
            "minutes": trained[line["step"]]["seconds"] / 60,
            "bytes": trained[line["step"]]["tokens"],
            "valid": line["bits_per_byte"],
        }
        for line in lines
        if line["kind"] == "validation"
    ]
    return curve, trained[max(trained)]


def last_model(run: RunFolder) -> AnyModel:
    """The weights at the end, not the best on valid: the others are given no choice either."""
    return load_checkpoint(run.checkpoint_at(max(run.steps()))).model


def bits_per_byte(model: AnyModel, config: RunConfig, store: Store, *, split: str, tokens: int) -> float:
    text = store.split(split)
    text = text.first(min(tokens, len(text)))
    return evaluate(model, text, rule=make_rule(model, config.evaluation, tokens=len(text))).bits_per_token


if __name__ == "__main__":
    be_quiet()
    answer_with(learn)
