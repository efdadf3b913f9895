"""Training, top to bottom. Everything that changes is in `Session`; everything that is kept is in the run's folder."""

import math
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformer_xl.checkpoint import About, RunFolder, Window, write_checkpoint
from transformer_xl.config import EvaluationConfig, RunConfig
from transformer_xl.console import progress, say
from transformer_xl.data.feeding.lanes import Segment
from transformer_xl.data.store import Store
from transformer_xl.decoding import Sampling, generate, start_tokens
from transformer_xl.errors import TransformerXLError
from transformer_xl.evaluation import UNIT_NAMES, Figures, evaluate, make_rule
from transformer_xl.files import write_text
from transformer_xl.model import AnyModel
from transformer_xl.training.card import draw_curve, write_card
from transformer_xl.training.lifetime import StopAsked, StopRequest, only_trainer, stop_on_signals
from transformer_xl.training.optimisation import PLATEAU_FACTOR
from transformer_xl.training.ranks import ALONE, Ranks
from transformer_xl.training.recording import Metrics, peak_memory_mb, write_environment
from transformer_xl.training.resuming import start_or_resume
from transformer_xl.training.session import Measured, Session
from transformer_xl.training.step import Update, take_step
from transformer_xl.training.stuck import TrainingStuck, find_stuck, lowered

CHECKPOINTS_KEPT = 2
TRIES = 4
SAMPLE_TOKENS = 200


class TrainingStopped(TransformerXLError):
    """Training cannot go on."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    step: int
    validation: Measured | None
    stopped_by: signal.Signals | None


def train(
    config: RunConfig,
    *,
    store: Store,
    folder: Path,
    resume: str = "auto",
    device: str = "cpu",
    command: str = "",
    ranks: Ranks = ALONE,
    stuck: Literal["say", "stop"] = "say",
) -> Outcome:
    """Trains until `config.training.steps`, or until asked to stop; either way everything is saved. All `ranks` call it alike. `stuck`: what to do when
    nothing is learned."""
    run, training = RunFolder(folder), config.training
    ranks.check(config)
    with only_trainer(run, ranks=ranks), stop_on_signals() as stop:
        session = start_or_resume(run, config, store=store, resume=resume, device=ranks.device(device), ranks=ranks)
        write_environment(run, command=command, ranks=ranks)
        metrics = Metrics(run, from_step=session.step, ranks=ranks)
        validation: Measured | None = None
        told = False
        if "valid" not in store.splits:
            say(f"{store.folder} has no valid split: nothing is validated, and the newest checkpoint is the one to use")
        with progress("training", total=training.steps, unit="steps") as advance:
            advance(session.step)
            while not stop.agree(ranks) and session.step < training.steps:
                started_at = time.perf_counter()
                if session.lanes.at_start:
                    session.memories = [None] * training.accumulation
                segment = session.lanes.next()
                update = take_step(session, segment)
                session.step += 1
                if not update.taken and training.precision != "float16":  # float16 finds its scale by overflowing
                    refuse_or_count(session, update)
                if update.taken:
                    session.average.update(session.model, step=session.step)
                record_step(session, update, segment, seconds=time.perf_counter() - started_at)
                if session.step % training.log_every == 0 or session.step == training.steps:
                    found = find_stuck(session.window, training, step=session.step)
                    if found is not None and found.early and stuck == "stop":
                        raise TrainingStuck(str(found))
                    if found is not None and not told:
                        say(str(found))
                        told = True
                    write_window(session, update, metrics)
                advance(1, note=live_note(session, update, unit=store.manifest.unit))

                if due(session, training.validate_every) and "valid" in store.splits:
                    validation = validate(session, run, store, metrics, stop)
                if due(session, training.save_every) or is_best(session, validation):
                    save(session, run, store, validation)
        if stop.signal and ranks.from_first(lambda: session.step not in run.steps()):
            save(session, run, store, validation)
        metrics.close()
        if ranks.first:
            draw_curve(run, unit=store.manifest.unit)
            write_card(run, session=session, store=store, command=command)
        return Outcome(step=session.step, validation=validation, stopped_by=stop.signal)


def train_unstuck(config: RunConfig, *, folder: Path, **how: Any) -> Outcome:
    """`train`, begun again with a lower rate where nothing is learned; the last try is left to run."""
    for _ in range(TRIES - 1):
        try:
            return train(config, folder=folder, stuck="stop", **how)
        except TrainingStuck as error:
            say(f"{error}; doing so")
            RunFolder(folder).forget_checkpoints()
            config = replace(config, training=lowered(config.training))
    return train(config, folder=folder, **how)


def due(session: Session, every: int) -> bool:
    return session.step == session.config.training.steps or bool(every and session.step % every == 0)


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


def write_window(session: Session, update: Update, metrics: Metrics) -> None:
    window = session.window
    if window.tokens:
        metrics.write(
            "train",
            step=session.step,
            loss_nats=window.nats / window.tokens,
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


def live_note(session: Session, update: Update, *, unit: str) -> str:
    nats = update.nats / max(1, update.tokens)
    shown = (
        f"perplexity {math.exp(min(nats, 50)):.1f}"
        if unit == "perplexity_per_word"
        else f"bpc {nats / math.log(2):.3f}"
    )
    speed = session.tokens / max(session.seconds, 1e-9)
    return f"loss {nats:.3f}  {shown}  {speed:,.0f} tokens/s  {peak_memory_mb():,.0f} MB"


def validate(session: Session, run: RunFolder, store: Store, metrics: Metrics, stop: StopRequest) -> Measured | None:
    """On the first tokens of the valid split, with the lengths of training; then a sample of text, for people. A request to stop ends it.

    Rank 0 does it, and tells the others what it found.
    """
    config, unit = session.config, store.manifest.unit
    split = store.split("valid")
    if config.training.validation_tokens:
        split = split.first(config.training.validation_tokens)
    model = config.model
    lengths = EvaluationConfig(
        segment=config.training.segment, memory=model.memory, clamp_len=model.clamp_len, same_length=model.same_length
    )

    def measure(model: AnyModel) -> Figures | None:
        try:
            with progress("validating", total=len(split) - 1, unit="tokens") as advance:
                rule = make_rule(model, lengths, tokens=len(split))
                found = evaluate(model, split, rule=rule, advance=stop.interrupting(advance))
                sample(model, session, run, store)
                return found
        except StopAsked:
            return None

    with session.model_to_use() as model_to_use:
        found = session.ranks.from_first(lambda: measure(model_to_use))
    if found is None:
        return None
    metrics.write("validation", step=session.step, loss_nats=found.loss_nats, bits_per_byte=found.bits_per_byte)
    say(f"step {session.step}: valid {UNIT_NAMES[unit]} {found.value(unit):.4f}")
    if config.training.schedule == "plateau" and session.best_nats is not None and found.loss_nats >= session.best_nats:
        session.rate_scale = max(session.rate_scale * PLATEAU_FACTOR, config.training.floor)
    return Measured(step=session.step, figures=found)


def sample(model: AnyModel, session: Session, run: RunFolder, store: Store) -> None:
    prompt = start_tokens(store.tokenizer, "")
    drawn = list(generate(model, prompt, tokens=SAMPLE_TOKENS, sampling=Sampling(seed=session.config.training.seed)))
    path = run.made("samples") / f"step-{session.step:08d}.txt"
    write_text(path, store.tokenizer.decode(drawn) + "\n")


def save(session: Session, run: RunFolder, store: Store, validation: Measured | None) -> None:
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
        data=str(store.folder.resolve()),
        step=session.step,
        validation_nats=loss,
    )
    write_checkpoint(
        run.checkpoint_at(session.step),
        config=session.config,
        about=about,
        weights=weights,
        tokenizer=store.tokenizer,
        training=state,
    )
    if best and loss is not None:
        run.set_best(session.step, loss_nats=loss)
    run.prune(keep=CHECKPOINTS_KEPT)
