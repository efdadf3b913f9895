"""When training ends: after so many steps, or when so many minutes are over (`training.minutes`).

A schedule needs to know its end before time is over. So a few steps are timed first, and the schedule gets as many as would fit. A machine gets slower
and faster, so every step moves on the schedule by a pace that is found anew at marks, after each eighth of what is left:

    steps taken       0 .......... 60 .... 90 .. 110 . 120      half as fast from step 60 on
    on the schedule   0 .......... 60 ......... ........ 200    each step then moves further, and the end comes in time

Between two marks nothing depends on the clock. What is saved has the pace and the next mark, so a run that was killed takes the steps to that mark again
to the bit.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

from transformer_xl.checkpoint import Timetable
from transformer_xl.config import RunConfig
from transformer_xl.data.store import Store
from transformer_xl.errors import ConfigError
from transformer_xl.evaluation import make_rule
from transformer_xl.training.origin import Origin
from transformer_xl.training.ranks import ALONE, Ranks
from transformer_xl.training.session import Session, lanes_of
from transformer_xl.training.step import take_step
from transformer_xl.training.validating import evaluate_together, lengths_of_training, validation_split

WARM_UP_STEPS, FEWEST_TIMED, MOST_TIMED = 8, 2, 200
"""Those of warming up are slower: memory is allocated, kernels are chosen."""
TIMING_SECONDS = 3.0
TIMING_SHARE = 0.03
"""Timing ends after so many seconds, or this share of the time there is, whichever comes first."""
VALIDATION_SHARE = 0.03
"""Of the time: a validation by the clock reads no more than fits into it."""
CARD_SECONDS, CARD_SHARE = 2.0, 0.02
"""What drawing the curve and writing the card take at the end, or this share of the time where that is less."""
MARK_SHARE = 1 / 8
MOST_STEPS = 100_000_000
now = time.perf_counter


def steps_in(epochs: float, config: RunConfig, store: Store) -> int:
    """As many as read the text so many times."""
    if not 0 < epochs < math.inf:
        raise ConfigError(f"`epochs=` {epochs} is no number of times to read a text; give more than 0")
    lanes, training = lanes_of(config, store), config.training
    whole = lanes.segments_per_epoch or len(store.split("train")) / (training.lanes * training.segment)
    return min(max(1, round(epochs * whole)), MOST_STEPS)


def seconds_of_a_step(
    config: RunConfig,
    *,
    store: Store,
    device: torch.device,
    ranks: Ranks = ALONE,
    within: float = TIMING_SECONDS,
    clock: Callable[[], float] | None = None,
) -> float:
    """Measured on weights that are thrown away; by the clock on the wall if none is named."""
    return _time_steps(Session.fresh(config, store=store, device=device, ranks=ranks), within=within, clock=clock)


def _time_steps(session: Session, *, within: float, clock: Callable[[], float] | None = None) -> float:
    clock = clock or now
    ranks, started_at = session.ranks, clock()
    timed, timed_from = 0, started_at
    for number in range(WARM_UP_STEPS + MOST_TIMED):
        if session.lanes.at_start:
            session.memories = [None] * len(session.memories)
        _ = take_step(session, session.lanes.next()).taken  # for which a device is waited for
        session.average.update(session.model, step=session.step + number + 1)
        timed = number + 1 if timed_from == started_at else timed + 1
        late = clock() - started_at > within / 2
        # Slow steps are few, and the first of them is all the warming up there is time for.
        if timed_from == started_at and ranks.highest(int(number + 1 == WARM_UP_STEPS or late))[0]:
            timed, timed_from = 0, clock()
        elif timed >= FEWEST_TIMED and ranks.highest(int(clock() - started_at > within))[0]:
            break
    return ranks.from_first(lambda: max(1e-6, (clock() - timed_from) / max(1, timed)))


# --- by the clock


def make_timetable(
    config: RunConfig,
    *,
    store: Store,
    device: torch.device,
    ranks: Ranks,
    origin: Origin | None,
    step: int,
    seconds: float,
    spent: float,
) -> Timetable:
    """For what is left of `training.minutes` after `step` steps, `seconds` in them and `spent` in all. Measures, and counts that too."""
    started_at, budget = now(), 60 * config.training.minutes
    session = Session.fresh(config, store=store, device=device, ranks=ranks, origin=origin)
    a_step = _time_steps(session, within=min(TIMING_SECONDS, TIMING_SHARE * budget))
    tokens, validating = _tokens_to_validate(session, store, seconds=VALIDATION_SHARE * budget)
    used = spent + ranks.from_first(lambda: now() - started_at)
    left = (budget - used - _seconds_at_the_end(session, budget, validating=validating, saving=0.0)) / a_step
    steps = min(max(1, int(left)), MOST_STEPS)
    return Timetable(
        minutes=config.training.minutes,
        steps=step + steps,
        validation_tokens=tokens,
        validating=validating,
        saving=0.0,
        spent=spent,
        before=max(0.0, used - seconds),
        step=step,
        seconds=seconds,
        position=float(step),
        pace=1.0,
        mark=step + _to_the_mark(steps),
    )


def _tokens_to_validate(session: Session, store: Store, *, seconds: float) -> tuple[int, float]:
    """How many tokens of valid can be read in so many seconds, at most as many as were asked for; and how many seconds they take."""
    if "valid" not in store.splits:
        return 0, 0.0
    split, ranks = validation_split(session, store), session.ranks
    with session.model_to_use() as model:
        lengths = lengths_of_training(session.config)
        lanes = ranks.from_first(lambda: make_rule(model, lengths, tokens=len(split), ranks=ranks.count).lanes)
        some = split.first(max(2, 4 * lanes * lengths.segment))
        found = evaluate_together(session, model, some, lanes=min(lanes, len(some)))
        a_token = ranks.from_first(lambda: 0.0 if found is None else found.seconds / len(some))
    tokens = max(2, min(len(split), int(seconds / max(1e-12, a_token))))
    return tokens, tokens * a_token


def _to_the_mark(steps: float) -> int:
    return max(1, math.ceil(MARK_SHARE * steps))


class Clock:
    """Tells a session when it is over. Rank 0's counts."""

    def __init__(self, session: Session, *, started_at: float) -> None:
        """`started_at`: when the time that no timetable has counted yet began."""
        self._session, self._table = session, session.timetable
        self._spent, self._started_at = (0.0 if self._table is None else self._table.spent), started_at
        self._saved_at = now()

    def asks(self) -> list[bool]:
        """What rank 0 asks all for by its clock: the last of `ranks.ASKED`."""
        table, seconds = self._table, 60 * self._session.config.training.save_minutes
        self.stamp()
        to_save = bool(seconds) and now() - self._saved_at >= seconds
        late = table is not None and self._seconds_left(table) <= 0
        return [self._session.ranks.first and to_save, self._session.ranks.first and late]

    def after_step(self, asked: Sequence[bool]) -> bool:
        """Whether it is time to save. Where minutes decide: finds the pace at a mark, and ends what would come too late."""
        ranks, table = self._session.ranks, self._table
        to_save, late = asked[2:]
        if table is not None and not self._session.over:
            if late:
                self._mark(table, left=0)
            elif self._session.step >= table.mark:
                self._mark(table, left=ranks.from_first(lambda: self._steps_left(table)))
                # How long saving takes must be known before the end.
                return to_save or not table.saving
        return to_save

    def _seconds_left(self, table: Timetable) -> float:
        """For steps."""
        budget, ends = 60 * table.minutes, {"validating": table.validating, "saving": table.saving}
        return budget - table.spent - _seconds_at_the_end(self._session, budget, **ends)

    def _steps_left(self, table: Timetable) -> float:
        session = self._session
        a_step = max(1e-6, (session.seconds - table.seconds) / max(1, session.step - table.step))
        # What validations and saves have cost for each second in steps, they will cost again.
        a_step *= 1 + max(0.0, table.spent - table.before - session.seconds) / max(1e-6, session.seconds)
        return self._seconds_left(table) / a_step

    def _mark(self, table: Timetable, *, left: float) -> None:
        """From here on, `left` steps lead to the end of the schedule; with less than half of one left, it is here."""
        session = self._session
        table.position = session.position if left >= 0.5 else float(table.steps)
        table.step, table.seconds = session.step, session.seconds
        table.pace = (table.steps - table.position) / max(1, round(left))
        table.mark = session.step + _to_the_mark(left)

    def stamp(self) -> float:
        """Time goes on, also outside steps. Now."""
        if self._table is not None:
            self._table.spent = self._spent + now() - self._started_at
        return now()

    @property
    def must_learn(self) -> bool:
        """How long it takes until what is saved is on the disk: the end waits for that, and so somebody must have waited before."""
        return self._table is not None and not self._table.saving

    def saved(self, *, validating: float | None, saving: float | None) -> None:
        """It was saved, after a validation or without one; each took so many seconds. None: it was not waited for."""
        self._saved_at = now()
        if self._table is not None:
            self._table.validating = self._table.validating if validating is None else validating
            self._table.saving = self._table.saving if saving is None else saving


def _seconds_at_the_end(session: Session, budget: float, *, validating: float, saving: float) -> float:
    """What comes after the last step: a validation, a save, and the card; and, of a run that began with another's weights, what it gained (`gains`),
    which by the clock reads as many tokens as a validation does."""
    readings = 1 if session.origin is None else 2
    return readings * validating + saving + min(CARD_SECONDS, CARD_SHARE * budget)
