"""Texts that models have read so far and go on reading: a memory each, never longer than the attention, whatever the conversation.

A session's state is a value: what is read or written goes on from a copy, and takes its place only when all of it is done. A request that fails,
comes too late or is cancelled leaves the session as it was, and a fork costs nothing.
"""

import json
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_xl.errors import CheckpointError
from transformer_xl.files import atomic_folder, put_back, put_back_all, write_json
from transformer_xl.generation import TextStream
from transformer_xl.inference import Reader, make_engine, restore_engine
from transformer_xl.serving.bodies import SESSION_NAME
from transformer_xl.serving.models import Served
from transformer_xl.serving.refusals import Refusal

ENGINE, ABOUT = "engine.safetensors", "session.json"
NO_FOLDER = "this server keeps no sessions on disk; start it with --sessions DIR"


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

    def memory(self) -> dict[str, int]:
        return memory_use(self.served, self.tokens_read)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "session",
            "model": self.served.name,
            "tokens_read": self.tokens_read,
            "memory": self.memory(),
            "created": self.created,
        }


def memory_use(served: Served, tokens_read: int) -> dict[str, int]:
    return {"used": min(tokens_read, served.memory), "length": served.memory}


class Sessions:
    def __init__(self, *, most: int, folder: Path | None) -> None:
        self.most, self._folder = most, folder
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
        return self.add(Session(served=served, reader=make_engine(served.model), text=served.text_stream()))

    def fork(self, id: str) -> Session:
        session = self.get(id)
        return self.add(Session(served=session.served, reader=session.reader, text=session.text))

    def delete(self, id: str) -> None:
        self.get(id)
        del self._open[id]

    def add(self, session: Session) -> Session:
        if len(self._open) >= self.most:
            raise Refusal(409, f"there are already {self.most} sessions; DELETE one first")
        self._open[session.id] = session
        return session

    # --- on disk: a folder for each name, whole or not there

    def saved(self) -> list[str]:
        if self._folder is None:
            raise Refusal(409, NO_FOLDER)
        put_back_all(self._folder)
        return sorted(path.name for path in self._folder.iterdir() if re.fullmatch(SESSION_NAME, path.name))

    def save(self, session: Session, name: str) -> int:
        """How many bytes it takes."""
        path = self._path(name)
        about = {"model": session.served.fingerprint, "text": session.text.place()}
        with atomic_folder(path) as folder:
            session.reader.save(folder / ENGINE)
            write_json(folder / ABOUT, about)
        return sum((path / file).stat().st_size for file in (ENGINE, ABOUT))

    def read_saved(self, name: str, models: list[Served]) -> Session:
        path = self._path(name)
        put_back(path)
        try:
            about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
            served = next((one for one in models if one.fingerprint == about["model"]), None)
            if served is None:
                raise Refusal(409, "this session was saved by a model that is not served here; serve its run again")
            reader = restore_engine(served.model, path / ENGINE)
            text = TextStream.at(served.tokenizer, about["text"])
        except (FileNotFoundError, NotADirectoryError):
            raise Refusal(404, "no session was saved under this name; GET /v1/sessions/saved lists names") from None
        except (CheckpointError, ValueError, KeyError, TypeError, OSError):
            raise Refusal(409, "what was saved under this name is damaged; save it again") from None
        return Session(served=served, reader=reader, text=text)

    def _path(self, name: str) -> Path:
        if self._folder is None:
            raise Refusal(409, NO_FOLDER)
        assert re.fullmatch(SESSION_NAME, name)
        return self._folder / name
