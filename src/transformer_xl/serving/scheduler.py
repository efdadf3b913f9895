"""One thread that owns a model: between any two pieces of reading for one request it writes a token for all others.

    submit -> task  read 512 tokens . read . read . draw the first token -> lanes
              task                  .      .
              lanes   step . step   . step .  ...                           (all texts of all requests, one step each)

A piece of work that raises fails its own request. A step of the lanes that raises, or never comes back, makes every text in it a suspect: each is
begun anew, alone, up to the token after the last one it told (the same tokens: chance is its own), and only then joins the others again. Who fails
alone was to blame. A thread that never comes back cannot be ended, only left: another one takes over everything but the work it is stuck in.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable

from transformer_xl.inference.reader import CHUNK
from transformer_xl.serving.events import Done, Event, Failed, Mailbox, Outbox, Wrote
from transformer_xl.serving.lanes import Lanes, Writing
from transformer_xl.serving.limits import LANES
from transformer_xl.serving.metrics import Counts
from transformer_xl.serving.orders import Order, Piece

log = logging.getLogger("transformer_xl.serving")

JOIN_SECONDS = 1.0
MOST_SUSPECTED = 3
"""A text that was in so many failed steps is refused, though each time it passed alone."""
FAILED = Failed(status=500, message="the model failed on this request; nothing of it was kept")
TOO_LATE = Failed(status=504, message="the model took too long over this request; ask for less, or try again")


class Task:
    """Work in pieces; what it returns is told the request as done, None where its texts tell it all."""

    def __init__(self, pieces: Generator[Piece, None, object], *, mailbox: Mailbox) -> None:
        self.pieces, self.mailbox = pieces, mailbox
        self.ready: Lanes | None = None
        """Lanes that wait for room."""


class Scheduler:
    def __init__(self, name: str, *, counts: Counts) -> None:
        self.name, self.counts = name, counts
        self.lanes = Lanes()
        self._tasks: deque[Task] = deque()
        self._outbox = Outbox()
        self._turn = threading.Condition()
        self._closed = False
        self._working_on: Task | Lanes | None = None
        self._working_since = 0.0
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
        """Something was cancelled."""
        with self._turn:
            self._turn.notify()

    def close(self) -> bool:
        """Ends the thread after the piece it is at. Whether it did end."""
        with self._turn:
            self._closed = True
            self._turn.notify()
        self._thread.join(JOIN_SECONDS)
        return not self._thread.is_alive()

    @property
    def under_way(self) -> int:
        """Texts and tasks that this thread still has."""
        return len(self.lanes) + len(self._tasks)

    def stuck_seconds(self) -> float:
        return time.monotonic() - self._working_since if self._working_on is not None else 0.0

    def replaced(self) -> "Scheduler":
        """Another thread that goes on with everything but the work this one is stuck in; if that is the lanes, all of them are suspects."""
        with self._turn:
            stuck = self._working_on
            if stuck is None:  # it has just come back
                return self
            self._closed = True
            other = Scheduler(self.name, counts=self.counts)
            other._tasks.extend(task for task in self._tasks if task is not stuck)
            if isinstance(stuck, Task):
                other.lanes = self.lanes
                other._outbox.put(stuck.mailbox, 0, TOO_LATE)
            else:
                other._suspect(self.lanes.writings)
        log.error("%s: the model's thread is stuck; another takes over", self.name)
        self.counts.threads_abandoned += 1
        other._outbox.send()
        other.start()
        return other

    # --- on the thread; what others may look at or take away changes under the lock only

    def _run(self) -> None:
        while True:
            with self._turn:
                while not self._closed and not self.under_way:
                    self._turn.wait()
                if self._closed:  # for good, or because another thread has taken over
                    return
                self._drop()
            self._read()
            self._write()

    def _drop(self) -> None:
        """Lets go what nobody waits for, and what is too late."""
        now = time.monotonic()

        def over(mailbox: Mailbox) -> bool:
            return mailbox.cancelled or mailbox.deadline < now

        for task in [task for task in self._tasks if over(task.mailbox)]:
            self._tasks.remove(task)
            self._outbox.put(task.mailbox, 0, TOO_LATE)
        gone = [writing for writing in self.lanes.writings if over(writing.mailbox)]
        for writing in gone:
            self._outbox.put(writing.mailbox, writing.index, TOO_LATE)
        self.lanes.leave(gone)
        self._outbox.send()

    def _read(self) -> None:
        """Some pieces of tasks, together about as long as one long piece."""
        read, waiting = 0, 0
        while read < CHUNK and waiting < len(self._tasks):
            task = self._tasks[0]
            if task.ready is None:
                read += self._advance(task)
                waiting = 0
            with self._turn:
                if self._closed:
                    return
                if task.ready is not None and len(self.lanes) + len(task.ready) <= LANES:
                    self.lanes.take(task.ready)
                    task.ready = None
                waiting += task.ready is not None
                if self._tasks and self._tasks[0] is task:
                    self._tasks.rotate(-1)

    def _advance(self, task: Task) -> int:
        """One piece of it. How many tokens that was; 1 for what reads none."""
        if not self._begin(task):
            return 0
        piece, over, failure = None, False, None
        try:
            piece = next(task.pieces)
        except StopIteration as finished:
            piece, over = finished.value, True
        except Exception as error:
            failure, over = error, True
        with self._turn:
            self._working_on = None
            if self._closed:
                return 0
            if over:
                self._tasks.remove(task)
            if failure is not None:
                log.error("%s: a request failed", self.name, exc_info=failure)
                self._outbox.put(task.mailbox, 0, FAILED)
            elif over and piece is not None:
                self._outbox.put(task.mailbox, 0, Done(result=piece))
            elif isinstance(piece, Lanes):
                task.ready = piece
            elif isinstance(piece, list):
                self._tell(piece)
            self._outbox.send()
        read = piece if isinstance(piece, int) else 1
        self.counts.tokens_read += read
        return read

    def _write(self) -> None:
        if not len(self.lanes) or not self._begin(self.lanes):
            return
        started_at, failure, events = time.monotonic(), None, list[tuple[Writing, Event]]()
        try:
            events = self.lanes.step()
        except Exception as error:
            failure = error
        with self._turn:
            self._working_on = None
            if self._closed:
                return
            if failure is not None:
                log.error("%s: a step of %d texts failed", self.name, len(self.lanes), exc_info=failure)
                self._suspect(self.lanes.clear())
            self._tell(events)
            self._outbox.send()
        self.counts.steps += 1
        self.counts.step_seconds += time.monotonic() - started_at

    def _begin(self, work: Task | Lanes) -> bool:
        with self._turn:
            if not self._closed:
                self._working_on, self._working_since = work, time.monotonic()
            return not self._closed

    def _tell(self, events: Iterable[tuple[Writing, Event]]) -> None:
        for writing, event in events:
            self._outbox.put(writing.mailbox, writing.index, event)
            if isinstance(event, Wrote):
                self.counts.tokens_written += event.drawn

    def _suspect(self, writings: Iterable[Writing]) -> None:
        for writing in writings:
            again = writing.anew()
            if again.suspected > MOST_SUSPECTED:
                self._outbox.put(writing.mailbox, writing.index, FAILED)
            else:
                told = writing.mailbox.drawn[writing.index]
                self._tasks.append(Task(writing.restart([again], alone=told), mailbox=writing.mailbox))
