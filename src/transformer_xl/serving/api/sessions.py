"""Texts that models have read so far and go on reading: a memory each, never longer than the attention, whatever the conversation.

A session's state is a value: what is read or written goes on from a copy, and takes its place only when all of it is done. A request that fails,
comes too late or is cancelled leaves the session as it was, and a fork costs nothing.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformer_xl.decoding import TextStream
from transformer_xl.inference import Reader
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.api.refusals import Refusal


@dataclass(kw_only=True)
class Session:
    served: Served
    reader: Reader
    """Never read with: it is forked first."""
    text: TextStream
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))
    busy: bool = False

    @property
    def tokens_read(self) -> int:
        return int(self.reader.read_B[0])

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "session",
            "model": self.served.name,
            "tokens_read": self.tokens_read,
            "memory": memory_use(self.served, self.tokens_read),
            "created": self.created,
        }


def memory_use(served: Served, tokens_read: int) -> dict[str, int]:
    return {"used": min(tokens_read, served.memory), "length": served.memory}


class Sessions:
    def __init__(self, *, most: int, replica: str | None = None) -> None:
        """`replica`: this server's name among several; every id begins with it, so that whoever stands before them can find the right one."""
        self.most, self._prefix = most, f"{replica}-" if replica else ""
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

    def open(self, served: Served) -> Session:
        if not served.remembers:
            raise Refusal(409, "this model has no memory, so a session could not go on; use /v1/completions")
        return self.add(Session(served=served, reader=served.blank, text=served.text_stream()))

    def fork(self, id: str) -> Session:
        session = self.get(id)
        return self.add(Session(served=session.served, reader=session.reader, text=session.text))

    def delete(self, id: str) -> None:
        self.get(id)
        del self._open[id]

    def add(self, session: Session) -> Session:
        self.check_room()
        session.id = self._prefix + session.id
        self._open[session.id] = session
        return session

    def check_room(self) -> None:
        """For one more."""
        if len(self._open) >= self.most:
            raise Refusal(409, f"there are already {self.most} sessions; DELETE one first")
