"""Training, top to bottom. Everything that changes is in `Session`; everything that is kept is in the run's folder."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from transformer_xl.checkpoint import RunFolder
from transformer_xl.checkpoint.run_folder import ADAPTER_FILE
from transformer_xl.config import RunConfig
from transformer_xl.console import progress, say
from transformer_xl.data.store import Store
from transformer_xl.devices import AUTO, choose_device, choose_precision, computing_on
from transformer_xl.errors import ConfigError
from transformer_xl.files import atomic_file
from transformer_xl.model.products import multiplies_bfloat16
from transformer_xl.training.background import Background
from transformer_xl.training.card import draw_curve, write_card
from transformer_xl.training.clock import Clock, now
from transformer_xl.training.gains import Gain, measure_gains
from transformer_xl.training.lifetime import only_trainer, stop_on_signals
from transformer_xl.training.origin import Origin
from transformer_xl.training.ranks import ALONE, Ranks
from transformer_xl.training.recording import Metrics, write_environment
from transformer_xl.training.reporting import OnStep, Reports
from transformer_xl.training.resuming import start_or_resume
from transformer_xl.training.saving import is_best, save
from transformer_xl.training.session import Measured, Session
from transformer_xl.training.step import take_step
from transformer_xl.training.stuck import TrainingStuck, lowered
from transformer_xl.training.tracking import TrackerName, Tracking
from transformer_xl.training.validating import Cost, validate

TRIES = 4


@dataclass(frozen=True, kw_only=True)
class Outcome:
    step: int
    validation: Measured | None
    stopped_by: signal.Signals | None
    """Who asks without a signal counts as SIGTERM."""
    gains: tuple[Gain, ...] = ()
    """Of a run that began with another's weights, once it is finished."""


def train(
    config: RunConfig,
    *,
    store: Store,
    folder: Path,
    resume: str = "auto",
    device: str = AUTO,
    command: str = "",
    ranks: Ranks = ALONE,
    stuck: Literal["say", "stop"] = "say",
    on_step: OnStep | None = None,
    started_at: float | None = None,
    track: Sequence[TrackerName] = (),
    origin: Origin | None = None,
) -> Outcome:
    """Trains until its steps or minutes are over, or until asked to stop; either way everything is saved. All `ranks` call it alike. `stuck`: what to do
    when nothing is learned. `started_at`: from when minutes count, by `clock.now`; now, unless told. `track`: who else hears of the figures. `origin`:
    the run whose weights it begins with."""
    started_at = now() if started_at is None else started_at
    run, place = RunFolder(folder), ranks.device(choose_device(device))
    config = settled(config, place)
    training = config.training
    ranks.check(config)
    if origin is not None:
        origin.check(config)
        if origin.rank is not None and ranks.parallel == "fsdp":
            raise ConfigError(
                "`parallel=fsdp` gives each process its share of every weight, and an adapter is small; train it with `parallel=ddp`"
            )
    with only_trainer(run, ranks=ranks), stop_on_signals() as stop:
        how: dict[str, Any] = {"store": store, "device": place, "ranks": ranks, "origin": origin}
        session = start_or_resume(run, config, resume=resume, **how)
        say(f"{computing_on(place)}, in {training.precision}")
        write_environment(run, command=command, ranks=ranks)
        tracking = Tracking(track, run, config) if ranks.first else None
        metrics = Metrics(run, from_step=session.step, ranks=ranks, tracking=tracking)
        clock, cost, validation = Clock(session, started_at=started_at), Cost(), None
        session.asks = lambda: [*stop.asks(), *clock.asks()]
        if "valid" not in store.splits:
            say(f"{store.folder} has no valid split: nothing is validated, and the newest checkpoint is the one to use")
        progressing = progress("training", total=session.config.training.steps, unit="steps")
        with progressing as advance, Background() as saving:
            told: dict[str, Any] = {"metrics": metrics, "clock": clock, "stop": stop, "advance": advance}
            reports = Reports(session=session, store=store, stuck=stuck, on_step=on_step, **told)
            while not stop.agreed(ranks) and not session.over:
                reports.begin()
                if session.lanes.at_start:
                    session.memories = [None] * training.accumulation
                segment = session.lanes.next()
                update = take_step(session, segment)
                session.step += 1
                # On a device the weights are averaged as they are: as they were, where it left the update out.
                if session.late or update.taken:
                    session.average.update(session.model, step=session.step)
                acts = due(session, training.validate_every) or due(session, training.save_every)
                reports.add(update, segment, at_once=acts)

                stepped_at = now()
                saving.check()
                if due(session, training.validate_every) and "valid" in store.splits:
                    validation = validate(session, run, store, metrics, stop, cost)
                if due(session, training.save_every) or reports.time_to_save or is_best(session, validation):
                    saves_at, waits = clock.stamp(), clock.must_learn
                    save(session, run, store, validation, origin, saving)
                    if waits:
                        saving.wait()
                    validated = validation is not None and validation.step == session.step
                    validating = saves_at - stepped_at if validated else None
                    clock.saved(validating=validating, saving=now() - saves_at if waits else None)
            reports.finish()
            saving.wait()
            if stop.signal and ranks.from_first(lambda: session.step not in run.steps()):
                clock.stamp()
                save(session, run, store, validation, origin, saving)
        metrics.close()
        gains, stopped_by = list[Gain](), stop.signal
        if ranks.first:
            draw_curve(run, unit=store.manifest.unit)
            write_card(run, session=session, store=store, command=command)
            if origin is not None and origin.rank is not None:
                lay_out_adapter(run)
            if origin is not None and stop.signal is None:
                gains = measure_gains(run, origin, session=session, store=store, stop=stop)
                stopped_by = stop.heard
        return Outcome(step=session.step, validation=validation, stopped_by=stopped_by, gains=tuple(gains))


def settled(config: RunConfig, device: torch.device) -> RunConfig:
    """With the precision that this device computes in, where none is asked for, or one that it lacks."""
    asked = config.training.precision
    if device.type == "cpu" and asked == "bfloat16" and not multiplies_bfloat16():
        say("this processor has no products of bfloat16; computing in float32")
        asked = "float32"
    precision = choose_precision(device) if asked == "auto" else asked
    return replace(config, training=replace(config.training, precision=precision))


def train_unstuck(config: RunConfig, *, folder: Path, **how: Any) -> Outcome:
    """`train`, begun again with a lower rate where nothing is learned; the last try is left to run. All tries together have the minutes there are."""
    started_at, minutes = now(), config.training.minutes
    for _ in range(TRIES - 1):
        try:
            return train(config, folder=folder, stuck="stop", **how)
        except TrainingStuck as error:
            say(f"{error}; doing so")
            RunFolder(folder).forget_checkpoints()
            left = max(minutes / TRIES, minutes - (now() - started_at) / 60)
            config = replace(config, training=replace(lowered(config.training), minutes=left))
    return train(config, folder=folder, **how)


def due(session: Session, every: int) -> bool:
    return session.over or bool(every and session.step % every == 0)


def lay_out_adapter(run: RunFolder) -> None:
    """That of the checkpoint to use, at a place that stays."""
    made = run.chosen_checkpoint() / ADAPTER_FILE
    if made.is_file():
        with atomic_file(run.adapter) as file:
            file.write(made.read_bytes())
