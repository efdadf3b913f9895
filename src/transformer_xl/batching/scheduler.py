"""One thread that owns a model: between any two pieces of reading for one request it writes a token for all others.

    submit -> request  read 512 tokens . read . read . draw the first token -> lanes
              request                  .      .
              lanes      step . step   . step .  ...                           (all texts of all requests, one step each)

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from transformer_xl.batching.events import Done, Ended, Failure, Mailbox, Outbox, Wrote
from transformer_xl.batching.lanes import LANES, Lanes, TextEvents, Writing
from transformer_xl.batching.requests import Finished, LanesReady, Output, Request, Status, TokensRead
from transformer_xl.inference.reader import CHUNK

log = logging.getLogger("transformer_xl.batching")

JOIN_SECONDS = 1.0
PROOF_SECONDS = 1.0
"""Between two proofs, while they fail."""
STEP_TOKENS = CHUNK // LANES
"""A token drawn alone takes about as long as so many that are read: no text that is begun anew keeps all others waiting."""


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


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the thread is at: one value, so that whoever looks never sees the half of it. Neither of both is the proof that it can answer."""

    request: Request | None = None
    """A piece of it."""
    texts: list[Writing] | None = None
    """Their lanes are being read or changed."""
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
        self._requests: deque[Request] = deque()
        """Those that are waiting, reading or ready; the others that are not over have their texts in the lanes."""
        self._outbox = Outbox()
        self._turn = threading.Condition()
        self._closed = False
        self._work: Work | None = None
        self._thread = threading.Thread(target=self._run, name=f"txl-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        with self._turn:
            self._requests.append(request)
            self._turn.notify()

    def wake(self) -> None:
        """Something was cancelled. Whoever waits for its turn goes at once, however long the thread is at its piece: its place is given to others."""
        with self._turn:
            if not self._closed:
                self._drop_requests()
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
        """Texts and requests that this thread still has."""
        return len(self.lanes) + len(self._requests)

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
            other._requests.extend(each for each in self._requests if work is None or each is not work.request)
            if work is None:  # nobody knows what it died of
                other._restart(self.lanes.writers)
            elif work.texts is not None:
                other._restart(work.texts)
            else:
                other.lanes = self.lanes
            if work is not None and work.request is not None:
                work.request.leave(Status.FAILED)
                other._outbox.put(work.request.mailbox, 0, Failure.FAILED if dead else Failure.TOO_LATE)
        log.error("%s: the model's thread is %s; another takes over", self.name, "dead" if dead else "stuck")
        if dead:
            self.counts.threads_died += 1
        else:
            self.counts.threads_abandoned += 1
        other._outbox.send()
        try:
            other.start()
        except (RuntimeError, MemoryError) as error:
            # The system has none to give: it is as good as dead, and is replaced in its turn.
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
        if not self._begin():
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
            self._drop_requests()
            gone = [writing for writing in self.lanes.writers if _over(writing.mailbox)]
            for writing in gone:
                writing.request.status = Status.DROPPED
                self._outbox.put(writing.mailbox, writing.index, Failure.TOO_LATE)
            self._outbox.send()
        if gone:
            staying = [writing for writing in self.lanes.writers if writing not in gone]
            self._with_lanes(staying, lambda: self.lanes.leave(gone))

    def _drop_requests(self) -> None:
        """With the lock. Of the one that the thread is at, only the rest."""
        at = None if self._work is None else self._work.request
        for request in [each for each in self._requests if each is not at and _over(each.mailbox)]:
            self._leave(request, Status.DROPPED)
            self._outbox.put(request.mailbox, 0, Failure.TOO_LATE)
        self._outbox.send()

    def _first(self) -> Request | None:
        """Whose turn it is, of those that somebody still waits for."""
        with self._turn:
            if self._closed:
                return None
            self._drop_requests()
            return self._requests[0] if self._requests else None

    def _read(self) -> None:
        """Some pieces of requests, together about as long as one long piece."""
        read, waiting = 0, 0
        while read < CHUNK and (request := self._first()) is not None and waiting < len(self._requests):
            if request.status is not Status.READY:
                read += self._advance(request)
                waiting = 0
            ready = request.status is Status.READY
            fits = ready and len(self.lanes) + len(request.lanes) <= LANES
            if fits:  # all that is left of the request are its texts
                joining = request.lanes
                texts = [*self.lanes.writers, *joining.writers]
                self._with_lanes(texts, partial(self.lanes.take, joining), joining=request)
            with self._turn:
                if self._closed:
                    return
                if fits:
                    continue
                waiting += ready
                if self._requests and self._requests[0] is request:
                    self._requests.rotate(-1)

    def _advance(self, request: Request) -> int:
        """One piece of it. About as long as reading how many tokens that was."""
        if not self._begin(request):
            return 0
        pieces, piece = request.pieces, None  # what it holds takes a while to free: not with the lock
        try:
            piece = next(pieces)
        except BaseException:  # no longer held than this block: it holds everything that failed
            log.exception("%s: a request failed", self.name)
        with self._turn:
            if self._closed:
                return 0
            match piece:
                case TokensRead(count, _):
                    self.counts.tokens_read += count
                case Output(events):
                    self._tell(events)
                case LanesReady(lanes):
                    request.status, request.lanes = Status.READY, lanes
                case Finished(result):
                    request.status = Status.FINISHED
                    self._outbox.put(request.mailbox, 0, Done(result=result))
                case None:
                    request.status = Status.FAILED
                    self._outbox.put(request.mailbox, 0, Failure.FAILED)
                    self._doubt()
            if request.status in (Status.FINISHED, Status.FAILED):
                self._leave(request, request.status)
            self._outbox.send()
            self._work = None
        return piece.count * piece.weight if isinstance(piece, TokensRead) else STEP_TOKENS

    def _write(self) -> None:
        if not len(self.lanes):
            return
        started_at = time.monotonic()
        self._with_lanes(self.lanes.writers, self.lanes.step)
        self.counts.steps += 1
        self.counts.step_seconds += time.monotonic() - started_at

    def _with_lanes(
        self, texts: list[Writing], do: Callable[[], TextEvents | None], *, joining: Request | None = None
    ) -> None:
        """A step of the lanes, or a change of who is in them; `texts` are those that must go on somehow if it fails."""
        texts = list(texts)
        if not self._begin(joining, texts=texts):
            return
        events: TextEvents | None = None
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
                self._restart(texts)
                self._doubt()
            self._tell(events or [])
            self._outbox.send()
            self._work = None

    def _begin(self, request: Request | None = None, *, texts: list[Writing] | None = None) -> bool:
        """Whether there is still anything to do for this thread. With `texts`, the request's are among them, and it is over with its pieces."""
        with self._turn:
            if self._closed or (request is not None and request.status is Status.DROPPED):
                return False
            if request is not None and texts is not None:
                self._leave(request, Status.WRITING)
            elif request is not None:
                request.status = Status.READING
            self._work = Work(request=request if texts is None else None, texts=texts, since=time.monotonic())
            return True

    def _leave(self, request: Request, status: Status) -> None:
        """With the lock."""
        self._requests.remove(request)
        request.leave(status)

    def _tell(self, events: TextEvents) -> None:
        for writing, event in events:
            self._outbox.put(writing.mailbox, writing.index, event)
            if isinstance(event, Wrote):
                self.counts.tokens_written += event.drawn
            elif isinstance(event, Ended):
                writing.request.text_ended()

    def _restart(self, writings: Iterable[Writing]) -> None:
        """Suspects, each in a request of its own."""
        self._requests.extend(writing.request.again(writing) for writing in writings)
