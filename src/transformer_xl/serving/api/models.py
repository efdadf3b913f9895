"""A model that is being served: what there is to know of it, the thread that reads and writes with it, and another that looks into it."""

import hashlib
import logging
from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformer_xl.adaptation.tuned import Tuned, read_tuned
from transformer_xl.analysis.attention import Row, attention_pieces, top_keys
from transformer_xl.analysis.terms import TERMS, TOTAL
from transformer_xl.batching.lanes import ModelFault
from transformer_xl.batching.requests import Request
from transformer_xl.batching.scheduler import Counts, Scheduler, State
from transformer_xl.checkpoint import Checkpoint
from transformer_xl.checkpoint.adapter_file import fingerprint
from transformer_xl.checkpoint.folder import CHECKSUMS
from transformer_xl.checkpoint.run_folder import ADAPTATION
from transformer_xl.config import EvaluationConfig
from transformer_xl.decoding import TextStream
from transformer_xl.errors import CheckpointError
from transformer_xl.inference import make_reader
from transformer_xl.model import TransformerXL, twin
from transformer_xl.serving.limits import Limits

log = logging.getLogger("transformer_xl.serving")

UNITS = {"byte": "byte", "char": "character", "word": "word", "bpe": "piece", "number": "number"}


class Served:
    def __init__(self, name: str, checkpoint: Checkpoint, *, limits: Limits) -> None:
        self.name, self.checkpoint, self.limits = name, checkpoint, limits
        self.model, self.tokenizer = checkpoint.model.eval(), checkpoint.tokenizer
        self._checksums = _checksums_of(checkpoint)
        self.tuned: Tuned | None = None
        """How it should learn while it reads, where the run says so."""
        self.tuned_is_wrong = False
        try:
            self.tuned = _tuned_of(checkpoint)
        except CheckpointError as error:
            self.tuned_is_wrong = True
            log.warning("%s: no session learns, for %s", name, error)
        self.counts = Counts()
        # Made now because it builds the kernels where they are not built yet: nobody's request should wait for that.
        self.blank = make_reader(self.model)
        """Has read nothing. Every new session begins with it, and forks it when it is first read with."""
        self._writer = Scheduler(name, counts=self.counts, proof=self._prove)
        self._looker = Scheduler(f"{name}-attention", counts=self.counts, proof=self._prove)

    def start(self) -> None:
        for scheduler in (self._writer, self._looker):
            scheduler.start()

    def close(self) -> bool:
        """Whether all its threads have ended; one that is stuck never does."""
        ended = [scheduler.close() for scheduler in (self._writer, self._looker)]
        return all(ended) and not self.counts.threads_abandoned

    def submit(self, request: Request) -> None:
        self._writer.submit(request)

    def look(self, request: Request) -> None:
        """Attention is told by a slow formula: on a thread of its own, so that nobody's text waits for it."""
        self._looker.submit(request)

    def wake(self) -> None:
        self._writer.wake()
        self._looker.wake()

    def replace_if_stuck_or_dead(self) -> None:
        writing, looking = self._states()
        if writing in ("stuck", "dead"):
            self._writer = self._writer.replaced()
        if looking in ("stuck", "dead"):
            self._looker = self._looker.replaced()

    def state(self) -> State:
        """Whether it can answer, and what is wrong otherwise."""
        return next((state for state in self._states() if state != "ok"), "ok")

    def _states(self) -> tuple[State, State]:
        writing = self._writer.state(patience_seconds=self.limits.patience_seconds)
        return writing, self._looker.state(patience_seconds=self.limits.deadline_seconds)

    def _prove(self) -> None:
        """What every request needs: memory for one text, and a token read."""
        reader = make_reader(self.model)
        if not bool(torch.isfinite(reader.read(reader.tokens([[0]]))).all()):
            raise ModelFault("hidden states that are no numbers")

    @property
    def under_way(self) -> int:
        return self._writer.under_way + self._looker.under_way

    # --- what there is to know

    @property
    def memory(self) -> int:
        """Tokens that it remembers; a recurrent model has a state instead."""
        return self.model.config.memory

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

    @property
    def fingerprint(self) -> str:
        """Of the weights and lengths: a session goes on with no others."""
        return self.fingerprint_with(self.memory)

    def fingerprint_with(self, memory: int) -> str:
        """What it would be, were so many tokens remembered."""
        return hashlib.sha256(self._checksums + str(memory).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        config = self.model.config
        attends = not config.recurrent
        absent = {"relative": "", "shaw_biased": "", "shaw": "cd"}.get(config.encoding or "", "bcd")
        return {
            "layers": config.n_layer,
            "heads": config.n_head,
            "memory": self.memory,
            "segment": self.segment,
            "vocabulary": config.vocabulary,
            "unit": UNITS[self.tokenizer.kind],
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "encoding": config.encoding,
            "recurrent": not attends,
            "attention": attends,
            "terms": [term for term in TERMS if attends and term not in absent],
        }

    # --- attention

    @cached_property
    def _twin(self) -> TransformerXL:
        """Looking changes how a model attends while it is read."""
        found = twin(self.model)
        assert isinstance(found, TransformerXL)
        return found

    def looking(
        self, tokens: Sequence[int], *, position: int, layer: int, head: int
    ) -> Generator[int, None, dict[str, Any]]:
        """What one head looks at from one token, as the analysis tells it. Layers and heads count from 0."""
        config = self.model.config
        lengths = EvaluationConfig(segment=self.segment, memory=config.memory, clamp_len=config.clamp_len)
        maps = yield from attention_pieces(
            self._twin, np.array(tokens), lengths=lengths, heads=[(layer, head)], positions=[position]
        )
        row: Row = maps[0].rows[-1]
        marked = set(top_keys(row.probability[TOTAL]))
        return {
            **{"model": self.name, "position": position, "layer": layer, "head": head},
            "first": row.first_key,
            "weights": row.probability[TOTAL].tolist(),
            "terms": {term: score.tolist() for term, score in row.score.items()},
            "marked": [place in marked for place in range(len(row.probability[TOTAL]))],
            "segment_start": max(position // self.segment * self.segment, row.first_key),
        }


def _checksums_of(checkpoint: Checkpoint) -> bytes:
    """Read when the model is loaded: a trainer may remove the checkpoint while it is served."""
    path = checkpoint.folder / CHECKSUMS
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read any more ({error.strerror}); start the server again") from None


def _tuned_of(checkpoint: Checkpoint) -> Tuned | None:
    """Read when the model is loaded, too; weights are compared only where there is anything to compare."""
    run = checkpoint.run
    if run is None or not (run.path / ADAPTATION).exists():
        return None
    return read_tuned(run, base=fingerprint(checkpoint.model.state_dict()))


def name_of(run: Path, taken: Sequence[str]) -> str:
    """What a run is called: its folder's name, with a number where two have the same."""
    name = run.resolve().name
    number = next(n for n in range(1, len(taken) + 2) if (name if n == 1 else f"{name}-{n}") not in taken)
    return name if number == 1 else f"{name}-{number}"
