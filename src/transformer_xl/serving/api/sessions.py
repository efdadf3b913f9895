"""Texts that models have read so far and go on reading: a memory each, never longer than the attention, whatever the conversation.

A session's state is a value: what is read or written goes on from a copy, and takes its place only when all of it is done. A request that fails,
comes too late or is cancelled leaves the session as it was, and a fork costs nothing.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transformer_xl.batching.learning import Learner
from transformer_xl.decoding import TextStream
from transformer_xl.inference import Reader
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.api.refusals import Refusal
from transformer_xl.serving.limits import Limits


@dataclass(kw_only=True)
class Session:
    served: Served
    reader: Reader | Learner
    """Never read with: it is forked first."""
    text: TextStream
    learning_bytes: int = 0
    """What it may take, where it learns."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))
    busy: bool = False

    @property
    def tokens_read(self) -> int:
        return self.reader.read if isinstance(self.reader, Learner) else int(self.reader.read_B[0])

    def as_json(self) -> dict[str, Any]:
        told = {
            "id": self.id,
            "object": "session",
            "model": self.served.name,
            "tokens_read": self.tokens_read,
            "memory": memory_use(self.served, self.tokens_read),
            "created": self.created,
        }
        if isinstance(self.reader, Learner):
            told["adapt"] = adaptation_json(self.reader, taken=self.learning_bytes)
        return told


def memory_use(served: Served, tokens_read: int) -> dict[str, int]:
    return {"used": min(tokens_read, served.memory), "length": served.memory}


def adaptation_json(learner: Learner, *, taken: int) -> dict[str, Any]:
    how = learner.how
    by = "both" if how.moves and how.caches else "gradient" if how.moves else "cache"
    fields = asdict(how)
    del fields["cache_context"]
    return {"by": by, **fields, "compare": learner.still is not None, "in_words": how.sentence(), "bytes": taken}


class Sessions:
    def __init__(self, limits: Limits, *, replica: str | None = None) -> None:
        """`replica`: this server's name among several; every id begins with it, so that whoever stands before them can find the right one."""
        self._limits, self._prefix = limits, f"{replica}-" if replica else ""
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> list[Session]:
        return list(self._open.values())

    def get(self, id: str) -> Session:
        if id not in self._open:
            raise Refusal(404, "there is no such session; POST /v1/sessions opens one")
        return self._open[id]

    @contextmanager
    def using(self, id: str) -> Iterator[Session]:
        """One request at a time."""
        session = self.get(id)
        if session.busy:
            raise Refusal(409, "this session is busy with another request; wait for it, or fork the session")
        session.busy = True
        try:
            yield session
        finally:
            session.busy = False

    @property
    def learning(self) -> list[Session]:
        return [session for session in self._open.values() if session.learning_bytes]

    def begin(self, served: Served) -> Session:
        return self.add(Session(served=served, reader=served.blank, text=served.text_stream()))

    def fork(self, id: str) -> Session:
        session = self.get(id)
        return self.add(replace(session, id=secrets.token_hex(16), created=int(time.time()), busy=False))

    def delete(self, id: str) -> None:
        self.get(id)
        del self._open[id]

    def add(self, session: Session) -> Session:
        self.check_room(session.served, learning_bytes=session.learning_bytes)
        session.id = self._prefix + session.id
        self._open[session.id] = session
        return session

    def check_room(self, served: Served | None = None, *, learning_bytes: int = 0) -> None:
        """For one more, by this model where it is known; and for what it may take, where it learns."""
        if served is not None and not served.remembers:
            raise Refusal(409, "this model has no memory, so a session could not go on; use /v1/completions")
        if len(self._open) >= self._limits.sessions:
            raise Refusal(409, f"there are already {self._limits.sessions} sessions; DELETE one first")
        if learning_bytes:
            self._check_learning(learning_bytes)

    def _check_learning(self, size: int) -> None:
        most, most_bytes, open_now = self._limits.learning, self._limits.learning_bytes, self.learning
        if not most:
            raise Refusal(409, "on this server no session learns; start it with --max-learning 1 or more")
        if len(open_now) >= most:
            raise Refusal(409, f"there are already {most} sessions that learn; DELETE one first")
        if size > most_bytes:
            raise Refusal(
                409,
                f"a session that learns so takes up to {size:,} bytes, and all of them may take {most_bytes:,};"
                " take adapters, a smaller rank, segment or cache_size, or no compare",
            )
        if (taken := sum(session.learning_bytes for session in open_now)) + size > most_bytes:
            full = f"sessions that learn take {taken:,} of {most_bytes:,} bytes, and this one up to {size:,}"
            raise Refusal(409, f"{full}; DELETE one first")
