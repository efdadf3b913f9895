"""What texts and sessions take of memory, and how much there is: reckoned beforehand, because what a model's thread cannot allocate it loses.

texts being written   3 (lanes - 1): the lanes' buffers, and others twice as large while they move into them
texts being read      2 each: a prompt's engine, and another that scores it
sessions              1 each; those that learn have a pool of their own (`learning_bytes`)
a model               1 that new sessions begin with, 1 that proves that it can answer
saving, restoring     3: the engine, its bytes, and the file
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from transformer_xl import native
from transformer_xl.adaptation.fast_weights import fixed_numbers, moving_numbers
from transformer_xl.adaptation.neural_cache import most_positions
from transformer_xl.batching.lanes import LANES
from transformer_xl.config import AdaptationConfig, RecurrentConfig
from transformer_xl.inference.cache import kept_bytes
from transformer_xl.inference.reader import CHUNK
from transformer_xl.model import AnyModel

HEADER_BYTES = 64 * 1024
"""More than the names and shapes in a saved engine take."""


def saved_bytes(model: AnyModel) -> int:
    """The most that a saved session's engine takes on disk."""
    config, size = model.config, model.vocabulary.bias_V.element_size()
    return (config.kept_of_a_state + config.kept_of_a_position * config.memory + config.d_model) * size + HEADER_BYTES


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one model, in bytes."""

    lane: int
    """What an engine keeps of one text."""
    engine: int
    """A lane, and the projected relative keys that each engine makes for itself."""
    working: int
    """While one piece of a text is read, and while somebody looks at attention."""

    @classmethod
    def of(cls, model: AnyModel, *, segment: int) -> "Cost":
        config, size = model.config, model.vocabulary.bias_V.element_size()
        lane = kept_bytes(config, lanes=1) * size // 4 if config.remembers else 0
        words = max(end - start for start, end in pairwise(config.cluster_edges))
        working = 2 * CHUNK * words * size
        table = config.kept_of_a_position // 2 * (config.memory + CHUNK) * size
        scores = 6 * config.n_head * segment * (config.memory + segment) * size
        if not native.usable(model.vocabulary.bias_V):
            scores += 4 * config.n_head * CHUNK * (config.memory + CHUNK) * size
        return cls(lane=lane, engine=lane + table, working=working + table + scores)


@dataclass(frozen=True, kw_only=True)
class LearningCost:
    """Of a session that learns, in bytes."""

    weights: int
    """That move."""
    state: int
    """With what is remembered, and the cache: what is saved of it."""
    session: int
    """At the worst moment: its state, its copy while a request is under way, and a lesson, or weights to write with."""

    @classmethod
    def of(cls, model: AnyModel, how: AdaptationConfig, *, compare: bool) -> "LearningCost":
        config, size = model.config, model.vocabulary.bias_V.element_size()
        T, D, readers = how.segment if how.moves else CHUNK, config.d_model, 2 if compare else 1
        plain = Cost.of(model, segment=T)
        cache = mixing = 0
        if how.caches:
            cache = most_positions(how, coming=CHUNK) * (D * size + 8)
            mixing = (how.cache_size + T) * (T * (3 * size + 10) + D * size)
        if not how.moves:
            state = plain.engine + cache
            working = plain.working + mixing
            return cls(weights=0, state=state, session=2 * (state + (readers - 1) * plain.engine) + working)
        weights, fixed = moving_numbers(model, how) * size, fixed_numbers(model, how) * size
        memory = (config.n_layer * config.memory * D + config.kept_of_a_state) * size
        inner = config.d_hidden if isinstance(config, RecurrentConfig) else config.d_inner
        seen, words = config.memory + T, max(end - start for start, end in pairwise(config.cluster_edges))
        layers = (
            config.n_layer * T * (6 * config.n_head * seen + 24 * (D + inner)) + 3 * config.kept_of_a_position * seen
        )
        lesson = (layers + 3 * T * words) * size + mixing + weights
        merged = config.n_layer * config.numbers_of_a_layer * size if how.learns == "adapters" else weights
        state = weights + memory + cache
        kept = 2 * (state + (readers - 1) * (weights + memory)) + readers * (fixed + weights)
        return cls(weights=weights, state=state, session=kept + max(lesson, 2 * merged + plain.engine))


def needed_bytes(costs: Sequence[Cost], *, admitted: int, sessions: int) -> int:
    """At the worst moment."""
    written = 3 * (min(admitted, LANES) - 1)
    every = sum(written * cost.lane + 2 * cost.engine + cost.working for cost in costs)
    largest = max(cost.engine for cost in costs)
    return every + (2 * admitted + sessions + 3) * largest


def free_on(device: torch.device) -> int | None:
    """Where models compute: what is free on a card, or what this process may still take of the machine; None where nobody tells."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return available_bytes() if device.type == "cpu" else None


def available_bytes(root: Path = Path("/")) -> int | None:
    """What this process may still take, by every limit that the system tells; None where it tells none."""
    of_machine = [bytes_left for name, bytes_left in _table(root / "proc/meminfo").items() if name == "MemAvailable"]
    return min((max(0, left) for left in (*_of_process(root), *_of_cgroups(root), *of_machine)), default=None)


def _of_process(root: Path) -> Iterator[int]:
    try:
        import resource
    except ImportError:
        return
    taken = _table(root / "proc/self/status")
    for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and name in taken:
            yield limit - taken[name]


def _of_cgroups(root: Path) -> Iterator[int]:
    """Of the process's own group and of all those around it. What files keep in memory is given back when it is wanted."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top, most, now, file = mounted, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, file = mounted / "memory", "total_inactive_file"
            most, now = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = top / path.strip("/")
        for group in (own, *own.parents):
            limit, taken = _text(group / most).strip(), _text(group / now).strip()
            if limit.isdigit() and taken.isdigit():
                yield int(limit) - int(taken) + _table(group / "memory.stat", scale=1).get(file, 0)
            if group == top:
                break


def _table(path: Path, *, scale: int = 1024) -> dict[str, int]:
    """Names and numbers, as the kernel writes them: `VmSize:  1234 kB`, or `inactive_file 1234`."""
    found = {}
    for line in _text(path).splitlines():
        name, *values = line.replace(":", " ").split()
        if values and values[0].isdigit():
            found[name] = int(values[0]) * scale
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
