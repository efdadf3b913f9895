"""How good the model is by now: the first tokens of valid, with the lengths of training; then a sample of text, for people."""

import time
from typing import Any

from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import EvaluationConfig, RunConfig, TrainingConfig
from transformer_xl.console import Advance, progress, say
from transformer_xl.data.store import Split, Store
from transformer_xl.decoding import Sampling, generate, start_tokens
from transformer_xl.evaluation import UNIT_NAMES, Figures, make_rule, score_split
from transformer_xl.evaluation.scoring import figures_of, summed
from transformer_xl.files import write_text
from transformer_xl.model import AnyModel
from transformer_xl.training.lifetime import StopAsked, StopRequest
from transformer_xl.training.optimisation import PLATEAU_FACTOR
from transformer_xl.training.recording import Metrics
from transformer_xl.training.session import Measured, Session

SAMPLE_TOKENS = 200
VALIDATION_SHARE, WORTH_SAYING_SECONDS = 0.05, 20.0
"""Of the time, that validations may take before it is said; and less than so many seconds nobody need be told of."""


def validate(
    session: Session, run: RunFolder, store: Store, metrics: Metrics, stop: StopRequest, cost: "Cost"
) -> Measured | None:
    """On the first tokens of the valid split, with the lengths of training; then a sample of text, for people. A request to stop ends it.

    Every rank reads its share, and all know what was found.
    """
    config, unit, started_at = session.config, store.manifest.unit, time.perf_counter()
    split = validation_split(session, store)
    with session.model_to_use() as model:
        with progress("validating", total=(len(split) - 1) // session.ranks.count, unit="tokens") as advance:
            found = evaluate_together(session, model, split, advance=stop.interrupting(advance))
        if found is not None and session.ranks.first:
            sample(model, session, run, store)
    cost.add(time.perf_counter() - started_at, config.training, tokens=len(split))
    if found is None:
        return None
    metrics.write("validation", step=session.step, loss_nats=found.loss_nats, bits_per_byte=found.bits_per_byte)
    say(f"step {session.step}: valid {UNIT_NAMES[unit]} {found.value(unit):.4f}")
    if config.training.schedule == "plateau" and session.best_nats is not None and found.loss_nats >= session.best_nats:
        session.rate_scale = max(session.rate_scale * PLATEAU_FACTOR, config.training.floor)
    return Measured(step=session.step, figures=found)


def evaluate_together(
    session: Session, model: AnyModel, split: Split, *, lanes: int | None = None, advance: Advance | None = None
) -> Figures | None:
    """By the exact rule, each rank its share of the lanes: every token is scored once, by one of them. None where any rank was asked to stop."""
    ranks, started_at = session.ranks, time.perf_counter()
    asked: dict[str, Any] = {"tokens": len(split), "lanes": lanes, "ranks": ranks.count}
    # Each device may have other memory free; the lanes are the first's.
    rule = ranks.from_first(lambda: make_rule(model, lengths_of_training(session.config), **asked))
    nats, tokens, stopped = 0.0, 0, False
    try:
        own = ranks.share_of(rule.lanes)
        nats, tokens = summed(score_split(model, split, rule=rule, advance=advance, own=own))
    except StopAsked:
        stopped = True
    nats, found, stops = ranks.total(nats, tokens, stopped)
    seconds = time.perf_counter() - started_at
    return None if stops else figures_of(nats, int(found), split=split, rule=rule, seconds=seconds)


class Cost:
    """How much of the time since training started or went on is spent on validating; said once, where it is too much."""

    def __init__(self) -> None:
        self._started_at, self._seconds, self._told = time.perf_counter(), 0.0, False

    def add(self, seconds: float, training: TrainingConfig, *, tokens: int) -> None:
        self._seconds += seconds
        share = self._seconds / max(1e-9, time.perf_counter() - self._started_at)
        if self._told or share <= VALIDATION_SHARE or self._seconds < WORTH_SAYING_SECONDS:
            return
        self._told = True
        say(
            f"validating has taken {share:.0%} of the time so far, more than {VALIDATION_SHARE:.0%}: raise training.validate_every (it is"
            f" {training.validate_every:,}), or lower training.validation_tokens (each validation reads {tokens:,})"
        )


def sample(model: AnyModel, session: Session, run: RunFolder, store: Store) -> None:
    prompt = start_tokens(store.tokenizer, "")
    drawn = list(generate(model, prompt, tokens=SAMPLE_TOKENS, sampling=Sampling(seed=session.config.training.seed)))
    path = run.made("samples") / f"step-{session.step:08d}.txt"
    write_text(path, store.tokenizer.decode(drawn) + "\n")


def validation_split(session: Session, store: Store) -> Split:
    """As many tokens as the configuration asks for and the clock allows."""
    split, table, asked = store.split("valid"), session.timetable, session.config.training.validation_tokens
    split = split.first(asked) if asked else split
    return split.first(max(2, table.validation_tokens)) if table is not None else split


def lengths_of_training(config: RunConfig) -> EvaluationConfig:
    model = config.model
    return EvaluationConfig(
        segment=config.training.segment, memory=model.memory, clamp_len=model.clamp_len, same_length=model.same_length
    )
