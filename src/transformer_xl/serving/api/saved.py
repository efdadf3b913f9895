"""Sessions on disk: a folder for each name, whole or not there, that nobody but the server's own user can read.

    saved/              locked by whoever reads or changes anything in it: two servers may share it
      novel/            0700
        engine.safetensors    0600, what the model remembers
        session.json          0600, by which model, and where in the text
        learning.safetensors  0600, in place of the first where the session learns: weights, memory, cache
        still.safetensors     0600, and what it remembers without, where both are compared

What stands there may have been put there by anybody who can write to the folder: every field is checked, and no link is followed.
"""

import asyncio
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from transformer_xl import files
from transformer_xl.batching.budget import HEADER_BYTES, LearningCost, saved_bytes
from transformer_xl.batching.learning import ADAPTIVE, STILL, Learner
from transformer_xl.config import AdaptationConfig
from transformer_xl.config.adaptation import MOST_CACHED
from transformer_xl.decoding import TextStream
from transformer_xl.errors import ConfigError, InputError, TransformerXLError
from transformer_xl.files import write_text
from transformer_xl.inference import Reader, restore_reader
from transformer_xl.inference.reader import CHUNK
from transformer_xl.serving.api.bodies import SESSION_NAME
from transformer_xl.serving.api.learning import NO_SIZES, statistics_for
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.api.refusals import Refusal
from transformer_xl.serving.api.sessions import Session
from transformer_xl.serving.limits import Limits

ENGINE, ABOUT = "engine.safetensors", "session.json"
ABOUT_BYTES = 4096
NAMES_BYTES = 8192
"""More than the names of one layer's moving weights take."""
LOCK_SECONDS = 10.0
"""So long another server's saving is waited for."""
PAUSE_EVERY_SECONDS = 0.1
MOST_WAITING = 32
"""For the disk. One more is answered 429."""
NO_FOLDER = "this server keeps no sessions on disk; start it with --sessions DIR"
DAMAGED = "what was saved under this name is damaged; save it again"
WAY_OUT = "DELETE /v1/sessions/saved/NAME removes one that is no longer wanted"

Result = TypeVar("Result")


class Place(BaseModel):
    """Of a TextStream."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    begun: Annotated[str, Field(pattern="^([0-9a-f]{2}){0,3}$")]
    marks: Annotated[int, Field(ge=0, lt=1 << 62)]
    line_begins: Annotated[int, Field(ge=0, le=1)]


class SavedAdaptation(BaseModel):
    """How it learns; what the numbers may be is checked where they become settings."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    rate: float
    rule: str
    decay: float
    learns: str
    rank: Annotated[int, Field(ge=1, le=1 << 16)]
    segment: Annotated[int, Field(ge=1, le=CHUNK)]
    cache_lambda: float
    cache_theta: float
    cache_size: Annotated[int, Field(ge=1, le=MOST_CACHED)]
    cache_context: int
    compare: bool
    sizes: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    """The fingerprint of the sizes of gradients, where it learns by them."""

    def settings(self) -> AdaptationConfig:
        return AdaptationConfig(**self.model_dump(exclude={"compare", "sizes"}))


class About(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """The fingerprint of its weights and lengths."""
    memory: Annotated[int, Field(ge=0, lt=1 << 62)] | None = None
    """The length among them, so that a model that remembers another can say so."""
    adapt: SavedAdaptation | None = None
    text: Place


class Saved:
    def __init__(self, folder: Path, *, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        # One thread, because what needs much memory and much of the disk is done once at a time, and texts do not wait for it.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="txl-saved")
        self._waiting = 0
        self._paused_at = 0.0
        try:
            with self._locked():
                self._tidy()
        except OSError as error:
            raise InputError(
                f"`sessions=`: {folder} cannot be used ({error.strerror}); try again, or give another folder"
            ) from None

    def close(self) -> None:
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def names(self) -> list[str]:
        return sorted(await self._do(self._sizes))

    async def save(self, session: Session, name: str) -> int:
        """How many bytes it takes."""
        as_it_is = replace(session)  # whoever asked may be gone before it is written, and others go on with the session
        return await self._do(lambda: self._save(as_it_is, name))

    async def read(self, name: str, models: list[Served]) -> Session:
        return await self._do(lambda: self._read(name, models))

    async def delete(self, name: str) -> None:
        await self._do(lambda: files.remove_folder(self._existing(name)))  # under its name it is whole to the last

    async def _do(self, work: Callable[[], Result]) -> Result:
        """Cancelled before its turn, it is never begun."""

        def locked() -> Result:
            with self._locked():
                found = work()
            if time.monotonic() > self._paused_at + PAUSE_EVERY_SECONDS:
                time.sleep(2 * files.POLL_SECONDS)  # another server that waits has its turn, however many wait here
                self._paused_at = time.monotonic()
            return found

        if self._waiting >= MOST_WAITING:
            raise Refusal(429)
        self._waiting += 1
        try:
            doing = asyncio.get_running_loop().run_in_executor(self._disk, locked)
            return await asyncio.wait_for(doing, self._limits.deadline_seconds)
        except TimeoutError:
            raise Refusal(504) from None
        except OSError as error:
            raise Refusal(
                409, f"the folder of saved sessions cannot be read or written ({error.strerror}); look at that folder"
            ) from None
        finally:
            self._waiting -= 1

    # --- on the thread, with the lock

    def _save(self, session: Session, name: str) -> int:
        path, served, reader = self._path(name), session.served, session.reader
        place, how = Place.model_validate(session.text.place()), None
        if isinstance(reader, Learner):
            compare = reader.still is not None
            how = SavedAdaptation(**asdict(reader.how), compare=compare, sizes=reader.sizes)
        about = About(model=served.fingerprint, memory=served.memory, text=place, adapt=how)
        sizes = _file_sizes(served, about)
        self._check_quota(name, sum(sizes.values()) + ABOUT_BYTES)
        with files.atomic_folder(path) as folder:
            os.chmod(folder, 0o700)
            if isinstance(reader, Learner):
                reader.save(folder)
            else:
                reader.save(folder / ENGINE)
            write_text(folder / ABOUT, about.model_dump_json(indent=2, exclude_none=True) + "\n")
            for file in (*sizes, ABOUT):
                os.chmod(folder / file, 0o600)
        return _size(path)

    def _check_quota(self, name: str, size: int) -> None:
        """Of one more session, or of another in the place of an older."""
        most, most_bytes = self._limits.saved, self._limits.saved_bytes
        others = {other: taken for other, taken in self._sizes().items() if other != name}
        if len(others) >= most:
            raise Refusal(409, f"there are already {most} saved sessions; {WAY_OUT}")
        if size > most_bytes:
            raise Refusal(413, f"this session takes {size:,} bytes, and all saved ones may take {most_bytes:,}")
        if (taken := sum(others.values())) + size > most_bytes:
            full = f"saved sessions take {taken:,} of {most_bytes:,} bytes, and this one {size:,}"
            raise Refusal(409, f"{full}; {WAY_OUT}")

    def _read(self, name: str, models: list[Served]) -> Session:
        path = self._existing(name)
        try:
            _check_regular(path / ABOUT, most=ABOUT_BYTES)
            about = About.model_validate_json((path / ABOUT).read_bytes())
            served = _model_of(about, models)
            text = TextStream.at(served.tokenizer, about.text.model_dump())
            if about.adapt is not None:
                return self._read_learning(path, served, about.adapt, text)
            _check_regular(path / ENGINE, most=saved_bytes(served.model))
            reader = restore_reader(served.model, path / ENGINE, lanes=1)
            _check_reader(reader, served)
        except (TransformerXLError, ValueError, KeyError, TypeError, RuntimeError, OSError):
            raise Refusal(409, DAMAGED) from None
        return Session(served=served, reader=reader, text=text)

    def _read_learning(self, path: Path, served: Served, about: SavedAdaptation, text: TextStream) -> Session:
        """What it would take is reckoned by its settings before anything of it is read."""
        how, compare = about.settings(), about.compare
        taken, most = LearningCost.of(served.model, how, compare=compare).session, self._limits.learning_bytes
        if taken > most:
            raise Refusal(409, f"this session takes up to {taken:,} bytes, and sessions that learn may take {most:,}")
        for file, size in _learning_sizes(served, about).items():
            _check_regular(path / file, most=size)
        try:
            statistics = statistics_for(served, how)
        except ConfigError:
            raise Refusal(409, NO_SIZES) from None
        if about.sizes != ("" if statistics is None else statistics.fingerprint):
            raise Refusal(409, "this session learned by sizes of gradients that its run has no more; open another")
        learner = Learner.restore(served.model, path, how, statistics=statistics, compare=compare)
        return Session(served=served, reader=learner, text=text, learning_bytes=taken)

    def _path(self, name: str) -> Path:
        """A folder, or nothing."""
        assert re.fullmatch(SESSION_NAME, name)
        path = self._folder / name
        if os.path.lexists(path) and not stat.S_ISDIR(os.lstat(path).st_mode):
            raise Refusal(409, "what has this name in the folder of saved sessions is none; remove it there")
        return path

    def _existing(self, name: str) -> Path:
        path = self._path(name)
        if not os.path.lexists(path):
            raise Refusal(404, "no session was saved under this name; GET /v1/sessions/saved lists names")
        return path

    def _sizes(self) -> dict[str, int]:
        """What each saved session takes, by its name."""
        return {
            entry.name: _size(self._folder / entry.name)
            for entry in os.scandir(self._folder)
            if re.fullmatch(SESSION_NAME, entry.name) and entry.is_dir(follow_symlinks=False)
        }

    def _tidy(self) -> None:
        """What older servers left readable becomes private, and what killed ones left half written goes."""
        files.clear_leftovers(self._folder)
        for name in self._sizes():
            with suppress(OSError):  # another user's
                os.chmod(self._folder / name, 0o700)
                for entry in os.scandir(self._folder / name):
                    if entry.is_file(follow_symlinks=False):
                        os.chmod(entry.path, 0o600)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Only one process, and one thread, at a time reads or changes the folder, where the file system has locks."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not files.lock(descriptor, wait=True, until=time.monotonic() + LOCK_SECONDS):
                raise OSError(errno.EBUSY, "another server is busy with it")
            files.put_back_all(self._folder)
            yield
        finally:
            os.close(descriptor)  # and the lock goes with it


def _file_sizes(served: Served, about: About) -> dict[str, int]:
    """The files of a session beside what is about it, and the most that each takes."""
    return {ENGINE: saved_bytes(served.model)} if about.adapt is None else _learning_sizes(served, about.adapt)


def _learning_sizes(served: Served, about: SavedAdaptation) -> dict[str, int]:
    how, names = about.settings(), HEADER_BYTES + NAMES_BYTES * served.model.config.n_layer
    state = LearningCost.of(served.model, how, compare=False).state + names
    return {ADAPTIVE: state, STILL: state} if about.compare else {ADAPTIVE: state}


def _model_of(about: About, models: list[Served]) -> Served:
    for served in models:
        if served.fingerprint == about.model:
            return served
    for served in models:
        if about.memory is not None and served.fingerprint_with(about.memory) == about.model:
            raise Refusal(
                409,
                f"this session was saved with a memory of {about.memory:,}, and its model now has {served.memory:,}; start the server with --memory {about.memory}",
            )
    raise Refusal(409, "this session was saved by a model that is not served here; serve its run again")


def _check_reader(reader: Reader, served: Served) -> None:
    """It takes its place among others that read with the same model."""
    if reader.memory != served.memory:
        sizes = f"this session's memory has {reader.memory:,} places, and its model's {served.memory:,}"
        raise Refusal(409, f"{sizes}; save it again")
    if reader.lanes != 1 or (int(reader.read_B[0]) > 0) != (reader.last_hidden_BD is not None):
        raise Refusal(409, DAMAGED)


def writable_by_others(folder: Path) -> bool:
    return bool(folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _check_regular(path: Path, *, most: int) -> None:
    """A file that is no link and no device, of no more bytes than these."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size > most:
        raise Refusal(409, DAMAGED)


def _size(path: Path) -> int:
    """Of the files in a folder, and of nothing that they point to."""
    return sum(
        entry.stat(follow_symlinks=False).st_size
        for entry in os.scandir(path)
        if not entry.is_dir(follow_symlinks=False)
    )
