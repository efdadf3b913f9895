"""Training, top to bottom. Everything that changes is in `Session`; everything that is kept is in the run's folder."""

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from transformer_xl.checkpoint import About, RunFolder, Window, write_checkpoint
from transformer_xl.checkpoint.adapter_file import Adapter
from transformer_xl.checkpoint.run_folder import ADAPTER_FILE
from transformer_xl.config import RunConfig
from transformer_xl.console import progress, say
from transformer_xl.data.feeding.lanes import Segment
from transformer_xl.data.store import Store
from transformer_xl.devices import AUTO, choose_device, choose_precision, computing_on
from transformer_xl.errors import ConfigError, TransformerXLError
from transformer_xl.evaluation import UNIT_NAMES
from transformer_xl.files import atomic_file
from transformer_xl.model.adapters import factors, merged
from transformer_xl.model.products import multiplies_bfloat16
from transformer_xl.training.card import draw_curve, write_card
from transformer_xl.training.clock import Clock, now
from transformer_xl.training.gains import Gain, measure_gains
from transformer_xl.training.lifetime import StopRequest, only_trainer, stop_on_signals
from transformer_xl.training.origin import Origin
from transformer_xl.training.ranks import ALONE, Ranks
from transformer_xl.training.recording import Metrics, peak_memory_mb, write_environment
from transformer_xl.training.resuming import start_or_resume
from transformer_xl.training.session import Measured, Session
from transformer_xl.training.step import Update, take_step
from transformer_xl.training.stuck import TrainingStuck, find_stuck, lowered
from transformer_xl.training.tracking import TrackerName, Tracking
from transformer_xl.training.validating import validate

CHECKPOINTS_KEPT = 2
TRIES = 4


class TrainingStopped(TransformerXLError):
    """Training cannot go on."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    step: int
    validation: Measured | None
    stopped_by: signal.Signals | None
    """Who asks without a signal counts as SIGTERM."""
    gains: tuple[Gain, ...] = ()
    """Of a run that began with another's weights, once it is finished."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What `on_step` is told after each."""

    step: int
    progress: float
    """How much of training is over, from 0 to 1."""
    loss_nats: float
    """Mean of this step's tokens."""
    rate: float
    tokens: int
    seconds: float
    """Scored tokens, and time in steps, since training began."""
    stop: Callable[[], None] = field(repr=False)
    """Asks training to stop after this step; everything is saved."""


OnStep = Callable[[Step], object]


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
        clock, validation, told = Clock(session, started_at=started_at), None, False
        if "valid" not in store.splits:
            say(f"{store.folder} has no valid split: nothing is validated, and the newest checkpoint is the one to use")
        with progress("training", total=session.config.training.steps, unit="steps") as advance:
            advance(session.position)
            while not stop.agree(ranks) and not session.over:
                began_at, before = now(), session.position
                if session.lanes.at_start:
                    session.memories = [None] * training.accumulation
                segment = session.lanes.next()
                update = take_step(session, segment)
                session.step += 1
                if not update.taken and training.precision != "float16":  # float16 finds its scale by overflowing
                    refuse_or_count(session, update)
                if update.taken:
                    session.average.update(session.model, step=session.step)
                record_step(session, update, segment, seconds=now() - began_at)
                time_to_save = clock.after_step()
                if session.step % training.log_every == 0 or session.over:
                    found = find_stuck(session.window, session.config.training, step=session.step)
                    if found is not None and found.early and stuck == "stop":
                        raise TrainingStuck(str(found))
                    if found is not None and not told:
                        say(str(found))
                        told = True
                    write_window(session, update, metrics, store)
                advance(session.position - before, note=live_note(session, update, store))
                if on_step is not None:
                    on_step(told_of(session, update, stop))

                stepped_at = now()
                validates = due(session, training.validate_every) and "valid" in store.splits
                if validates:
                    validation = validate(session, run, store, metrics, stop)
                if due(session, training.save_every) or time_to_save or is_best(session, validation):
                    saves_at = clock.stamp()
                    save(session, run, store, validation, origin)
                    clock.saved(validating=saves_at - stepped_at if validates else None, saving=now() - saves_at)
        if stop.signal and ranks.from_first(lambda: session.step not in run.steps()):
            clock.stamp()
            save(session, run, store, validation, origin)
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


def told_of(session: Session, update: Update, stop: StopRequest) -> Step:
    return Step(
        step=session.step,
        progress=min(1.0, session.position / session.config.training.steps),
        loss_nats=update.nats / max(1, update.tokens),
        rate=update.rate,
        tokens=session.tokens,
        seconds=session.seconds,
        stop=stop.ask,
    )


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


def is_best(session: Session, validation: Measured | None) -> bool:
    """Measured at this very step, and lower than ever before."""
    if validation is None or validation.step != session.step or not math.isfinite(validation.figures.loss_nats):
        return False
    return session.best_nats is None or validation.figures.loss_nats < session.best_nats


def refuse_or_count(session: Session, update: Update) -> None:
    what = (
        f"the loss of step {session.step}" if not math.isfinite(update.nats) else f"a gradient of step {session.step}"
    )
    if session.config.training.non_finite == "stop":
        raise TrainingStopped(
            f"{what} is not finite, and the weights were not changed by it; go on with a lower training.learning_rate, or with"
            " training.non_finite skip"
        )
    session.skipped += 1


def record_step(session: Session, update: Update, segment: Segment, *, seconds: float) -> None:
    session.seconds += seconds
    window = session.window
    window.seconds += seconds
    if update.taken:
        session.tokens += update.tokens
        window.nats, window.tokens = window.nats + update.nats, window.tokens + update.tokens
        window.norm, window.steps = window.norm + update.norm, window.steps + 1
        window.frequency_nats += session.frequencies.nats(segment.targets)


def write_window(session: Session, update: Update, metrics: Metrics, store: Store) -> None:
    window = session.window
    if window.tokens:
        bits = window.nats / window.tokens / math.log(2)
        of_bytes = {"bits_per_byte": bits / bytes_of_a_token(store)} if store.manifest.unit == "bits_per_byte" else {}
        metrics.write(
            "train",
            step=session.step,
            loss_nats=window.nats / window.tokens,
            **of_bytes,
            frequency_nats=window.frequency_nats / window.tokens,
            tokens=session.tokens,
            rate=update.rate,
            gradient_norm=window.norm / window.steps,
            tokens_per_second=window.tokens / window.seconds,
            seconds=session.seconds,
            peak_memory_mb=peak_memory_mb(),
            skipped=session.skipped,
        )
    session.window = Window()


def bytes_of_a_token(store: Store) -> float:
    """On average over train."""
    train = store.split("train")
    return train.bytes / len(train)


def live_note(session: Session, update: Update, store: Store) -> str:
    nats, unit = update.nats / max(1, update.tokens), store.manifest.unit
    if unit == "perplexity_per_word":
        shown = f"perplexity {math.exp(min(nats, 50)):.1f}"
    else:
        per = bytes_of_a_token(store) if unit == "bits_per_byte" else 1.0
        shown = f"{UNIT_NAMES[unit]} {nats / math.log(2) / per:.3f}"
    speed = session.tokens / max(session.seconds, 1e-9)
    return f"loss {nats:.3f}  {shown}  {speed:,.0f} tokens/s  {peak_memory_mb():,.0f} MB"


def lay_out_adapter(run: RunFolder) -> None:
    """That of the checkpoint to use, at a place that stays."""
    made = run.chosen_checkpoint() / ADAPTER_FILE
    if made.is_file():
        with atomic_file(run.adapter) as file:
            file.write(made.read_bytes())


def save(
    session: Session, run: RunFolder, store: Store, validation: Measured | None, origin: Origin | None = None
) -> None:
    """Last and best are kept, and one before the last to fall back on; older ones go."""
    best = is_best(session, validation)
    loss = validation.figures.loss_nats if validation is not None and validation.step == session.step else None
    if best:
        session.best_nats = loss
    weights, state = session.weights_to_use(), session.state()
    if not session.ranks.first:
        return
    about = About(
        corpus=store.manifest.name,
        rule=store.manifest.rule,
        unit=store.manifest.unit,
        data=store.place,
        step=session.step,
        validation_nats=loss,
    )
    adapter = None
    if origin is not None and origin.rank is not None:
        told = {"base": origin.fingerprint, "corpus": store.manifest.name, "step": session.step}
        adapter = Adapter(rank=origin.rank, factors=factors(weights), **told)  # type: ignore[arg-type]
    write_checkpoint(
        run.checkpoint_at(session.step),
        config=session.config,
        about=about,
        weights=merged(weights),
        tokenizer=store.tokenizer,
        training=state,
        adapter=adapter,
    )
    if best and loss is not None:
        run.set_best(session.step, loss_nats=loss)
    run.prune(keep=CHECKPOINTS_KEPT)
