"""The borders of a training process: one trainer to a run, and a stop that is asked for, not suffered."""

import signal as signals
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from transformer_xl.checkpoint import RunFolder
from transformer_xl.checkpoint.folder import CHECKSUMS, read_config
from transformer_xl.console import Advance
from transformer_xl.errors import CheckpointError
from transformer_xl.locks import only_holder
from transformer_xl.training.ranks import ALONE, Ranks

LONGEST_OWNER = 20
"""Digits of a process's number, which is all that a lock holds."""


@contextmanager
def only_trainer(run: RunFolder, *, ranks: Ranks = ALONE) -> Iterator[None]:
    """Rank 0 holds the run's lock."""
    if not ranks.first:
        yield
        return
    run.refuse_name()
    run.path.mkdir(parents=True, exist_ok=True)
    run.refuse_links()
    refuse_strangers(run)

    def taken(owner: str) -> CheckpointError:
        return CheckpointError(
            f"{run.path} is being trained by process {owner}; wait for it, stop it, or choose another `run=`"
        )

    with only_holder(run.lock, what=str(run.path), taken=taken):
        yield


def refuse_strangers(run: RunFolder) -> None:
    """A folder in which somebody keeps something else: its README.md and config.json are not ours to replace.

    A trainer writes its lock first, then the configuration, and checkpoints much later: it may be killed anywhere between.
    """
    ours = (run.config, run.environment, run.metrics, run.card, run.checkpoints)
    there = [path for path in ours if path.exists()]
    if not there and _is_no_lock(run):
        there = [run.lock]
    if not there or any((run.checkpoint_at(step) / CHECKSUMS).is_file() for step in run.steps()):
        return
    with suppress(CheckpointError):
        read_config(run.config)
        return
    raise CheckpointError(
        f"{run.path} holds no run, but a {there[0].name} of somebody's that training would replace; choose another `run=`, or an empty folder"
    )


def _is_no_lock(run: RunFolder) -> bool:
    """A lock holds nothing, or the number of a process."""
    if not run.lock.is_file():
        return run.lock.exists()
    written = run.lock.read_bytes() if run.lock.stat().st_size <= LONGEST_OWNER else b"?"
    return bool(written) and not written.isdigit()


class StopAsked(Exception):
    """Ends a long inner loop when the process was asked to stop."""


class StopRequest:
    """Which signal asked to stop, once one has."""

    heard: signals.Signals | None = None
    """By this process."""
    signal: signals.Signals | None = None
    """By any rank, as they last agreed: all must stop after the same step."""

    def ask(self) -> None:
        """As SIGTERM does, for whoever is no signal."""
        self.heard = signals.SIGTERM

    def asks(self) -> list[bool]:
        """What this rank asks all for: the first of `ranks.ASKED`."""
        return [self.heard == signals.SIGINT, self.heard == signals.SIGTERM]

    def hear(self, asked: Sequence[bool]) -> None:
        """What any rank asked for, as all ranks were told with the same step."""
        interrupted, terminated = asked[:2]
        self.signal = signals.SIGTERM if terminated else signals.SIGINT if interrupted else None

    def agreed(self, ranks: Ranks) -> signals.Signals | None:
        """One process need ask nobody."""
        if ranks.count == 1:
            self.signal = self.heard
        return self.signal

    def interrupting(self, advance: Advance) -> Advance:
        """`advance`, made to raise StopAsked once a stop was asked for."""

        def advance_or_stop(amount: float = 1, *, note: str | None = None) -> None:
            if self.heard:
                raise StopAsked
            advance(amount, note=note)

        return advance_or_stop


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGTERM and Ctrl-C become a request that the loop honours after its step; a second Ctrl-C stops at once. Signals come to the main thread alone: in
    another, a request is made by whoever has been handed it."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request.heard is not None and number == signals.SIGINT:
            raise KeyboardInterrupt
        request.heard = signals.Signals(number)

    before = {number: signals.signal(number, ask) for number in (signals.SIGTERM, signals.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signals.signal(number, handler)
