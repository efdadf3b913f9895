"""Who works on the pieces of a text: this process, the cores of this machine, or the machines of a Ray cluster. Knows no text.

    pieces, in order        under way, `ahead` at most         results, in the same order
    9 8 7 6        submit-> [ 5 4 3 2 ] by whoever is free     -> 1 0

Whoever works, the results and their order are the same, so the store that is made of them is, too.
"""

import hashlib
import os
import signal
import threading
import unicodedata
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

from transformer_xl.errors import DataError, MissingPackage, suggest

WORTH_MORE_CORES_BYTES = 32 << 20
"""Below this a second core saves less than it takes to start."""

Engine = Literal["processes", "ray"]
Input = TypeVar("Input")
Shared = TypeVar("Shared")
Result = TypeVar("Result")
Work = Callable[[Any, Any], Any]
"""(what all calls share, an item) -> a result."""


class Pending(Protocol):
    def result(self) -> Any: ...

    def cancel(self) -> Any: ...


class Pool(Protocol):
    """Workers that know a function and what its calls share."""

    @property
    def ahead(self) -> int:
        """How many items may be under way: enough that nobody waits, few enough that they fit in memory."""

    def submit(self, item: Any) -> Pending: ...


def ordered_map(pool: Pool, items: Iterable[Any]) -> Generator[Any, None, None]:
    """The pool's function of each item, results in the order of the items.

    Only a few items are under way at a time: a pool's own map would read the whole text into memory first.
    """
    waiting: deque[Pending] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(item))
            if len(waiting) >= pool.ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for pending in waiting:
            pending.cancel()


def open_pool(
    engine: Engine, work: Callable[[Shared, Input], Result], shared: Shared, *, text_bytes: int
) -> AbstractContextManager[Pool]:
    """`shared` goes to each worker once. On one machine a short text is not worth a second process."""
    if engine not in get_args(Engine):
        raise DataError(f"no engine {engine}{suggest(engine, get_args(Engine))}")
    if engine == "ray":
        return ray_workers(work, shared)
    if text_bytes < WORTH_MORE_CORES_BYTES or cores() == 1:
        return nullcontext(ThisProcess(work, shared))
    return processes(work, shared, workers=cores())


class ThisProcess:
    ahead = 1

    def __init__(self, work: Work, shared: object) -> None:
        self.work, self.shared = work, shared

    def submit(self, item: object) -> Pending:
        done: Future[Any] = Future()
        done.set_result(self.work(self.shared, item))
        return done


# --- the cores of this machine


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Processes:
    def __init__(self, executor: ProcessPoolExecutor, *, ahead: int) -> None:
        self.executor, self.ahead = executor, ahead

    def submit(self, item: object) -> Pending:
        return self.executor.submit(_work, item)


@contextmanager
def processes(work: Work, shared: object, *, workers: int) -> Iterator[Pool]:
    # Spawned, not forked: forking a process with a live progress bar's thread in it can hang.
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_prepare_worker, initargs=(work, shared)
    ) as executor:
        try:
            yield _Processes(executor, ahead=2 * workers)
        except BrokenProcessPool as error:
            raise DataError("a worker process was killed, most likely for want of memory; free some") from error


_worker: tuple[Work, Any]


def _prepare_worker(work: Work, shared: object) -> None:
    global _worker
    _worker = (work, shared)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A pool's workers wait for ever for work from a parent that was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(item: object) -> object:
    work, shared = _worker
    return work(shared, item)


# --- the machines of a Ray cluster


class _RayResult:
    def __init__(self, ray: Any, reference: Any) -> None:
        self.ray, self.reference = ray, reference

    def result(self) -> Any:
        return self.ray.get(self.reference)

    def cancel(self) -> None:
        self.ray.cancel(self.reference)


class _RayWorkers:
    """Tasks, not actors: Ray itself gives a lost machine's tasks to others, and does again what lay finished on it and was not yet fetched."""

    def __init__(self, ray: Any, work: Work, shared: object) -> None:
        self.ray = ray
        self.ahead = 2 * max(int(ray.cluster_resources().get("CPU", 0)), 1)
        self.job = [ray.put((work, shared))]
        self.made_by = tokens_depend_on()
        self.task = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(work_on_ray)

    def submit(self, item: object) -> Pending:
        return _RayResult(self.ray, self.task.remote(self.job, self.made_by, item))


@contextmanager
def ray_workers(work: Work, shared: object) -> Iterator[Pool]:
    """This process cuts the text and writes the store; what lies between, the cluster does. Pieces travel to the workers, who need no common folder."""
    try:
        import ray
        from ray.exceptions import RayError, RayTaskError
    except ModuleNotFoundError:
        raise MissingPackage("`engine=ray` needs ray; install it with: pip install 'transformer-xl[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise DataError(
                f"no Ray cluster answers ({str(error).splitlines()[0]}); start one with `ray start`, or name one in RAY_ADDRESS"
            ) from error
    try:
        yield _RayWorkers(ray, work, shared)
    except RayTaskError as error:
        if isinstance(error.cause, ModuleNotFoundError):
            raise DataError(
                f"a worker of the Ray cluster lacks {error.cause.name}; install transformer-xl on each of its machines"
            ) from error
        raise error.cause from error
    except RayError as error:
        raise DataError(
            f"the Ray cluster could not finish a piece ({type(error).__name__}); see what its machines ran out of, and prepare again"
        ) from error
    finally:
        if ours:
            ray.shutdown()


_kept: tuple[str, tuple[Work, Any]] | None = None


def work_on_ray(job: list[Any], made_by: dict[str, str], item: object) -> object:
    """In a worker of the cluster. What all pieces share, such as a vocabulary, is fetched once and stays for the next piece."""
    import ray

    global _kept
    if _kept is None or _kept[0] != job[0].hex():
        for name, here in tokens_depend_on().items():
            if here != made_by[name]:
                raise DataError(
                    f"a worker of the Ray cluster has {name} {here} where this machine has {made_by[name]}, and could make other tokens;"
                    " install the same on all machines"
                )
        _kept = (job[0].hex(), ray.get(job[0]))
    work, shared = _kept[1]
    return work(shared, item)


@cache
def tokens_depend_on() -> dict[str, str]:
    """What must be the same wherever a piece is encoded: our own code, byte pairs, and what Python calls a space and a small letter."""
    rooms = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(rooms.rglob("*.py")):
        code.update(path.relative_to(rooms).as_posix().encode() + b"\0" + path.read_bytes())
    return {
        "transformer_xl.data": code.hexdigest()[:12],
        "tokenizers": version("tokenizers"),
        "Unicode": unicodedata.unidata_version,
    }
