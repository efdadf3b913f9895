"""What the steps have found, in order, for everybody who wants to know: the session's counts, the clock, metrics.jsonl, the live line, `on_step`.

On a processor each step is told of at once. On a device its numbers are read when the next step is already queued there, so that it never stands still;
before anything is validated, saved or ended, all that is known is told.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from transformer_xl.checkpoint import Window
from transformer_xl.console import Advance, say
from transformer_xl.data.feeding.lanes import Segment
from transformer_xl.data.store import Store
from transformer_xl.errors import TransformerXLError
from transformer_xl.evaluation import UNIT_NAMES
from transformer_xl.training.clock import Clock, now
from transformer_xl.training.lifetime import StopRequest
from transformer_xl.training.recording import Metrics, peak_memory_mb
from transformer_xl.training.session import Session
from transformer_xl.training.step import Update
from transformer_xl.training.stuck import TrainingStuck, find_stuck


class TrainingStopped(TransformerXLError):
    """Training cannot go on."""


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
    """Asks training to stop after this step, or after the next where a device has already begun it; everything is saved."""


OnStep = Callable[[Step], object]


@dataclass(kw_only=True)
class Reports:
    session: Session
    store: Store
    metrics: Metrics
    clock: Clock
    stop: StopRequest
    stuck: Literal["say", "stop"]
    on_step: OnStep | None
    advance: Advance
    time_to_save: bool = False
    """As the clock has it, since it was last asked."""
    _waiting: deque[tuple[Update, Segment]] = field(default_factory=deque)
    _shown: float = 0.0
    _began_at: float = 0.0
    _told: bool = False

    def __post_init__(self) -> None:
        self.advance(self.session.position)
        self._shown = self.session.position

    def begin(self) -> None:
        """A step begins; what lies between it and the last is not counted as time in steps."""
        self._began_at, self.time_to_save = now(), False

    def add(self, update: Update, segment: Segment, *, at_once: bool) -> None:
        """`at_once`: everything must be known now, because something is done with it."""
        self._waiting.append((update, segment))
        while self._waiting and (at_once or not self.session.late or len(self._waiting) > 1 or self._must_know()):
            self._tell(*self._waiting.popleft())

    def finish(self) -> None:
        while self._waiting:
            self._tell(*self._waiting.popleft())

    def _must_know(self) -> bool:
        return self.time_to_save or self.session.over

    def _tell(self, update: Update, segment: Segment) -> None:
        session, training = self.session, self.session.config.training
        if not update.taken and training.precision != "float16":  # float16 finds its scale by overflowing
            refuse_or_count(session, update)
        record_step(session, update, segment, seconds=now() - self._began_at)
        self._began_at = now()
        asked = update.asked if session.ranks.count > 1 else session.asks()
        self.stop.hear(asked)
        self.time_to_save |= self.clock.after_step(asked)
        if update.step % training.log_every == 0 or (session.over and update.step == session.step):
            self._look_whether_stuck(update)
            write_window(session, update, self.metrics, self.store)
        self.advance(session.position - self._shown, note=live_note(session, update, self.store))
        self._shown = session.position
        if self.on_step is not None:
            self.on_step(told_of(session, update, self.stop))

    def _look_whether_stuck(self, update: Update) -> None:
        found = find_stuck(self.session.window, self.session.config.training, step=update.step)
        if found is not None and found.early and self.stuck == "stop":
            raise TrainingStuck(str(found))
        if found is not None and not self._told:
            say(str(found))
            self._told = True


def refuse_or_count(session: Session, update: Update) -> None:
    what = f"the loss of step {update.step}" if not math.isfinite(update.nats) else f"a gradient of step {update.step}"
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
            step=update.step,
            loss_nats=window.nats / window.tokens,
            **of_bytes,
            frequency_nats=window.frequency_nats / window.tokens,
            tokens=session.tokens,
            rate=update.rate,
            gradient_norm=window.norm / window.steps,
            tokens_per_second=window.tokens / window.seconds,
            seconds=session.seconds,
            peak_memory_mb=peak_memory_mb(session.device),
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
    return f"loss {nats:.3f}  {shown}  {speed:,.0f} tokens/s  {peak_memory_mb(session.device):,.0f} MB"


def told_of(session: Session, update: Update, stop: StopRequest) -> Step:
    return Step(
        step=update.step,
        progress=min(1.0, session.position / session.config.training.steps),
        loss_nats=update.nats / max(1, update.tokens),
        rate=update.rate,
        tokens=session.tokens,
        seconds=session.seconds,
        stop=stop.ask,
    )
