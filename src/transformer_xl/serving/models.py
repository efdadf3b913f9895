"""A model that is being served: what there is to know of it, the thread that reads and writes with it, and another that looks into it."""

import copy
import hashlib
from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.analysis.attention import Row, attention_maps, top_keys
from transformer_xl.analysis.recording import TERMS, TOTAL
from transformer_xl.checkpoint import Checkpoint
from transformer_xl.config import EvaluationConfig, ModelConfig
from transformer_xl.generation import TextStream
from transformer_xl.model import TransformerXL
from transformer_xl.serving.lanes import Writing
from transformer_xl.serving.limits import Limits
from transformer_xl.serving.metrics import Counts
from transformer_xl.serving.orders import Order
from transformer_xl.serving.reading import fresh_reader
from transformer_xl.serving.scheduler import Scheduler, Task

UNITS = {"byte": "byte", "char": "character", "word": "word", "bpe": "piece", "number": "number"}


class Served:
    def __init__(self, name: str, checkpoint: Checkpoint, *, limits: Limits) -> None:
        self.name, self.checkpoint, self.limits = name, checkpoint, limits
        self.model, self.tokenizer = checkpoint.model.eval(), checkpoint.tokenizer
        self.counts = Counts()
        fresh_reader(
            self.model
        )  # builds the kernels where they are not built yet: nobody's request should wait for that
        self._writer = Scheduler(name, counts=self.counts)
        self._looker = Scheduler(f"{name}-attention", counts=self.counts)

    def start(self) -> None:
        self._writer.start()
        self._looker.start()

    def close(self) -> bool:
        """Whether all its threads have ended; one that is stuck never does."""
        ended = [scheduler.close() for scheduler in (self._writer, self._looker)]
        return all(ended) and not self.counts.threads_abandoned

    def write(self, order: Order, writings: list[Writing]) -> None:
        self._writer.write(order, writings)

    def submit(self, task: Task) -> None:
        self._writer.submit(task)

    def look(self, task: Task) -> None:
        """Attention is told by a slow formula: on a thread of its own, so that nobody's text waits for it."""
        self._looker.submit(task)

    def wake(self) -> None:
        self._writer.wake()
        self._looker.wake()

    def replace_if_stuck(self) -> None:
        if self._writer.stuck_seconds() > self.limits.patience_seconds:
            self._writer = self._writer.replaced()
        if self._looker.stuck_seconds() > self.limits.deadline_seconds:
            self._looker = self._looker.replaced()

    @property
    def under_way(self) -> int:
        return self._writer.under_way + self._looker.under_way

    # --- what there is to know

    @property
    def memory(self) -> int:
        """Tokens that it remembers; a recurrent model has a state instead."""
        config = self.model.config
        return config.memory if isinstance(config, ModelConfig) else 0

    @property
    def remembers(self) -> bool:
        return bool(self.model.config.remembers)

    @property
    def segment(self) -> int:
        return self.checkpoint.config.training.segment

    def forgets_after(self, memory: str) -> int | None:
        """The segment, where memory is off or there is none."""
        return self.segment if memory == "off" or not self.remembers else None

    def text_stream(self, before: Sequence[int] = ()) -> TextStream:
        return TextStream(self.tokenizer, before=before)

    @cached_property
    def fingerprint(self) -> str:
        """Of the weights and lengths: a session goes on with no others."""
        checksums = (self.checkpoint.folder / "checksums.json").read_bytes()
        return hashlib.sha256(checksums + str(self.memory).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        config = self.model.config
        attends = isinstance(self.model, TransformerXL)
        return {
            "layers": config.n_layer,
            "heads": config.n_head if isinstance(config, ModelConfig) else 0,
            "memory": self.memory,
            "segment": self.segment,
            "vocabulary": config.vocabulary,
            "unit": UNITS[self.tokenizer.kind],
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "encoding": config.encoding if isinstance(config, ModelConfig) else None,
            "recurrent": not attends,
            "attention": attends,
            "terms": self._terms(),
        }

    def _terms(self) -> list[str]:
        config = self.model.config
        if not isinstance(config, ModelConfig):
            return []
        absent = {"relative": "", "shaw_biased": "", "shaw": "cd"}.get(config.encoding, "bcd")
        return [term for term in TERMS if term not in absent]

    # --- attention

    @cached_property
    def _twin(self) -> TransformerXL:
        """The same weights in another object: looking changes how a model attends while it is read."""
        assert isinstance(self.model, TransformerXL)
        shared = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return copy.deepcopy(self.model, shared)

    def looking(
        self, tokens: Sequence[int], *, position: int, layer: int, head: int
    ) -> Generator[int, None, dict[str, Any]]:
        """What one head looks at from one token, as the analysis tells it. Layers and heads count from 0."""
        config = self.model.config
        assert isinstance(config, ModelConfig)
        lengths = EvaluationConfig(segment=self.segment, memory=config.memory, clamp_len=config.clamp_len)
        maps = attention_maps(
            self._twin, np.array(tokens), lengths=lengths, heads=[(layer, head)], positions=[position]
        )
        row: Row = maps[0].rows[-1]
        marked = set(top_keys(row.probability[TOTAL]))
        yield 1
        return {
            "model": self.name,
            "position": position,
            "layer": layer,
            "head": head,
            "first": row.first_key,
            "weights": row.probability[TOTAL].tolist(),
            "terms": {term: score.tolist() for term, score in row.score.items()},
            "marked": [place in marked for place in range(len(row.probability[TOTAL]))],
            "segment_start": max(position // self.segment * self.segment, row.first_key),
        }


def name_of(run: Path, taken: Sequence[str]) -> str:
    """What a run is called: its folder's name, with a number where two have the same."""
    name = run.resolve().name
    number = next(n for n in range(1, len(taken) + 2) if (name if n == 1 else f"{name}-{n}") not in taken)
    return name if number == 1 else f"{name}-{number}"
