"""One thread that owns a model: between any two pieces of reading for one request it writes a token for all others.

    submit -> task  read 512 tokens . read . read . draw the first token -> lanes
              task                  .      .
              lanes   step . step   . step .  ...                           (all texts of all requests, one step each)

A piece of work that raises fails its own request. A step of the lanes that raises or never comes back, or a change of who is in them, makes every
text in it a suspect, because an engine that was left half changed is never read with again: each is begun anew, alone, up to the token after the last
one it told (the same tokens: chance is its own), and only then joins the others again. Who fails alone was to blame; who never does, but fails again
and again with others, is written alone to its end. A thread that never comes back cannot be ended, only left: another one takes over everything but
the work it is stuck in. So it does for a thread that has died.

After a failure, and when it takes over, a thread proves that it can still answer: it reads one token. Until that works the model is not well, and the
proof is tried again every second.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Literal

from transformer_xl.batching.events import Done, Event, Failed, Mailbox, Outbox, Wrote
from transformer_xl.batching.lanes import LANES, Lanes, Writing
from transformer_xl.batching.orders import Order, Piece
from transformer_xl.inference.reader import CHUNK

log = logging.getLogger("transformer_xl.batching")

JOIN_SECONDS = 1.0
PROOF_SECONDS = 1.0
"""Between two proofs, while they fail."""
MOST_SUSPECTED = 3
"""A text that was in more failed steps than this, though each time it passed alone, joins the others no more."""
STEP_TOKENS = CHUNK // LANES
"""A token drawn alone takes about as long as so many that are read: no text that is begun anew keeps all others waiting."""
FAILED = Failed(status=500, message="the model failed on this request; nothing of it was kept")
TOO_LATE = Failed(status=504, message="the model took too long over this request; ask for less, or try again")


@dataclass
class Counts:
    """Of one model."""

    tokens_read: int = 0
    tokens_written: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    threads_abandoned: int = 0
    threads_died: int = 0


State = Literal["ok", "stuck", "dead", "not answering"]


class Task:
    """Work in pieces; what it returns is told the request as done, None where its texts tell it all."""

    def __init__(self, pieces: Generator[Piece, None, object], *, mailbox: Mailbox) -> None:
        self.pieces, self.mailbox = pieces, mailbox
        self.ready: Lanes | None = None
        """Lanes that wait for room."""


@dataclass(frozen=True)
class Work:
    """What the thread is at: one value, so that whoever looks never sees the half of it."""

    on: Task | list[Writing] | None
    """A task, the texts whose lanes are being read or changed, or the proof that it can answer."""
    since: float


def _over(mailbox: Mailbox) -> bool:
    """Nobody waits for it, or it is too late."""
    return mailbox.cancelled or mailbox.deadline < time.monotonic()


class Scheduler:
    def __init__(self, name: str, *, counts: Counts, proof: Callable[[], object]) -> None:
        """`proof` does a little of what every request needs, and raises where that fails."""
        self.name, self.counts = name, counts
        self.lanes = Lanes()
        self.answers = True
        """Whether the last proof worked."""
        self._proof = proof
        self._prove_at: float | None = None
        """When the next proof is due; None: there is no doubt."""
        self._tasks: deque[Task] = deque()
        self._outbox = Outbox()
        self._turn = threading.Condition()
        self._closed = False
        self._work: Work | None = None
        self._thread = threading.Thread(target=self._run, name=f"txl-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, task: Task) -> None:
        with self._turn:
            self._tasks.append(task)
            self._turn.notify()

    def write(self, order: Order, writings: list[Writing]) -> None:
        """Texts that go on from one prompt."""
        self.submit(Task(order.pieces(writings), mailbox=writings[0].mailbox))

    def wake(self) -> None:
        """Something was cancelled. Whoever waits for its turn goes at once, however long the thread is at its piece: its place is given to others."""
        with self._turn:
            if not self._closed:
                self._drop_tasks()
            self._turn.notify()

    def close(self) -> bool:
        """Ends the thread after the piece it is at. Whether it did end."""
        with self._turn:
            self._closed = True
            self._turn.notify()
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)
        return not self._thread.is_alive()

    @property
    def under_way(self) -> int:
        """Texts and tasks that this thread still has."""
        return len(self.lanes) + len(self._tasks)

    def state(self, *, patience_seconds: float) -> State:
        """Takes no lock: it is asked often."""
        work = self._work
        if not self._thread.is_alive():
            return "dead"
        if work is not None and time.monotonic() - work.since > patience_seconds:
            return "stuck"
        return "ok" if self.answers else "not answering"

    def replaced(self) -> "Scheduler":
        """Another thread that goes on with everything but the work this one is stuck in, or died of; if that is the lanes, all of them are suspects."""
        dead = not self._thread.is_alive()
        with self._turn:
            work = self._work
            if work is None and not dead:  # it has just come back
                return self
            self._closed = True
            other = Scheduler(self.name, counts=self.counts, proof=self._proof)
            other.answers, other._prove_at = False, time.monotonic()
            other._outbox = self._outbox
            other._tasks.extend(task for task in self._tasks if work is None or task is not work.on)
            if work is None:  # nobody knows what it died of
                other._suspect(self.lanes.writers)
            elif isinstance(work.on, list):
                other._suspect(work.on)
            else:
                other.lanes = self.lanes
            if work is not None and isinstance(work.on, Task):
                other._outbox.put(work.on.mailbox, 0, FAILED if dead else TOO_LATE)
        log.error("%s: the model's thread is %s; another takes over", self.name, "dead" if dead else "stuck")
        if dead:
            self.counts.threads_died += 1
        else:
            self.counts.threads_abandoned += 1
        other._outbox.send()
        try:
            other.start()
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # the system has none to give: it is as good as dead, and is replaced in its turn
            log.error("%s: no thread can be started (%s)", self.name, error)
        return other

    # --- on the thread; what others may look at or take away changes under the lock only, and nothing that takes long is done under it

    def _run(self) -> None:
        try:
            while self._awake():
                self._drop()
                self._read()
                self._write()
        except BaseException as error:
            log.critical("%s: the model's thread died", self.name, exc_info=error)

    def _awake(self) -> bool:
        """Waits for work, or until a proof is due. Whether there is a next round."""
        with self._turn:
            while not self._closed and not self.under_way and not self._in_doubt():
                self._turn.wait(None if self._prove_at is None else max(0.0, self._prove_at - time.monotonic()))
            if self._closed:  # for good, or because another thread has taken over
                return False
        if self._in_doubt():
            self._prove()
        return True

    def _in_doubt(self) -> bool:
        return self._prove_at is not None and time.monotonic() >= self._prove_at

    def _doubt(self) -> None:
        """After a failure."""
        if self._prove_at is None:
            self._prove_at = time.monotonic()

    def _prove(self) -> None:
        if not self._begin(None):
            return
        works = True
        try:
            self._proof()
        except BaseException:
            works = False
            if self.answers:
                log.exception("%s: the model cannot answer", self.name)
        with self._turn:
            if self._closed:
                return
            self.answers = works
            self._prove_at = None if self.answers else time.monotonic() + PROOF_SECONDS
            self._work = None

    def _drop(self) -> None:
        """Lets go what nobody waits for, and what is too late."""
        with self._turn:
            if self._closed:
                return
            self._drop_tasks()
            gone = [writing for writing in self.lanes.writers if _over(writing.mailbox)]
            for writing in gone:
                self._outbox.put(writing.mailbox, writing.index, TOO_LATE)
            self._outbox.send()
        if gone:
            staying = [writing for writing in self.lanes.writers if writing not in gone]
            self._with_lanes(staying, lambda: self.lanes.leave(gone))

    def _drop_tasks(self) -> None:
        """With the lock. Of the one that the thread is at, only the rest."""
        at = None if self._work is None else self._work.on
        for task in [task for task in self._tasks if task is not at and _over(task.mailbox)]:
            self._tasks.remove(task)
            self._outbox.put(task.mailbox, 0, TOO_LATE)
        self._outbox.send()

    def _first(self) -> Task | None:
        """Whose turn it is, of those that somebody still waits for."""
        with self._turn:
            if self._closed:
                return None
            self._drop_tasks()
            return self._tasks[0] if self._tasks else None

    def _read(self) -> None:
        """Some pieces of tasks, together about as long as one long piece."""
        read, waiting = 0, 0
        while read < CHUNK and (task := self._first()) is not None and waiting < len(self._tasks):
            if task.ready is None:
                read += self._advance(task)
                waiting = 0
            joining = task.ready
            fits = joining is not None and len(self.lanes) + len(joining) <= LANES
            if joining is not None and fits:
                self._join(task, joining)
            with self._turn:
                if self._closed:
                    return
                if fits:
                    continue
                waiting += joining is not None
                if self._tasks and self._tasks[0] is task:
                    self._tasks.rotate(-1)

    def _join(self, task: Task, joining: Lanes) -> None:
        """All that is left of the task are its texts."""
        texts = [*self.lanes.writers, *joining.writers]
        self._with_lanes(texts, lambda: self.lanes.take(joining), instead_of=task)

    def _advance(self, task: Task) -> int:
        """One piece of it. About as long as reading how many tokens that was."""
        if not self._begin(task):
            return 0
        piece: object = None
        over = failed = False
        try:
            piece = next(task.pieces)
        except StopIteration as finished:
            piece, over = finished.value, True
        except BaseException:  # no longer held than this block: it holds everything that failed
            over = failed = True
            log.exception("%s: a request failed", self.name)
        with self._turn:
            if self._closed:
                return 0
            if over:
                self._tasks.remove(task)
            if failed:
                self._outbox.put(task.mailbox, 0, FAILED)
                self._doubt()
            elif over and piece is not None:
                self._outbox.put(task.mailbox, 0, Done(result=piece))
            elif isinstance(piece, Lanes):
                task.ready = piece
            elif isinstance(piece, list):
                self._tell(piece)
            self._outbox.send()
            self._work = None
        if isinstance(piece, int):
            self.counts.tokens_read += piece
            return piece
        return STEP_TOKENS

    def _write(self) -> None:
        if not len(self.lanes):
            return
        started_at = time.monotonic()
        self._with_lanes(self.lanes.writers, self.lanes.step)
        self.counts.steps += 1
        self.counts.step_seconds += time.monotonic() - started_at

    def _with_lanes(
        self,
        texts: list[Writing],
        do: Callable[[], list[tuple[Writing, Event]] | None],
        *,
        instead_of: Task | None = None,
    ) -> None:
        """A step of the lanes, or a change of who is in them; `texts` are those that must go on somehow if it fails."""
        texts = list(texts)
        if not self._begin(texts, instead_of=instead_of):
            return
        events: list[tuple[Writing, Event]] | None = None
        failed = False
        try:
            events = do()
        except BaseException:
            failed = True
            log.exception("%s: a step of %d texts failed", self.name, len(texts))
        with self._turn:
            if self._closed:
                return
            if failed:
                self.lanes = Lanes()
                self._suspect(texts)
                self._doubt()
            self._tell(events or ())
            self._outbox.send()
            self._work = None

    def _begin(self, on: Task | list[Writing] | None, *, instead_of: Task | None = None) -> bool:
        """Whether there is still anything to do for this thread. `instead_of`: a task that ends with this."""
        with self._turn:
            task = on if isinstance(on, Task) else instead_of
            if self._closed or (task is not None and task not in self._tasks):  # it was dropped meanwhile
                return False
            if instead_of is not None:
                self._tasks.remove(instead_of)
            self._work = Work(on, time.monotonic())
            return True

    def _tell(self, events: Iterable[tuple[Writing, Event]]) -> None:
        for writing, event in events:
            self._outbox.put(writing.mailbox, writing.index, event)
            if isinstance(event, Wrote):
                self.counts.tokens_written += event.drawn

    def _suspect(self, writings: Iterable[Writing]) -> None:
        for writing in writings:
            again = writing.anew()
            told = writing.mailbox.drawn[writing.index]
            alone = writing.wish.tokens if again.suspected > MOST_SUSPECTED else told
            self._tasks.append(Task(writing.restart([again], alone=alone), mailbox=writing.mailbox))
