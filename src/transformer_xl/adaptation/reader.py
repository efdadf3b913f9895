"""Reads texts and learns from each by itself: losses out, lanes that are forked and reset, a state that can be saved. The model handed in never changes.

0.pending 0.memory.* 0.weights.*  or  0.reader      what lane 0 has become: moving weights, or a reader whose weights stand still
0.given                                             which pending tokens are learned from, where not all are
0.cache.hidden 0.cache.next 0.cache.start           its cache, where there is one
read                                                how many tokens each lane has read
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.adaptation.fast_weights import FastWeights
from transformer_xl.adaptation.lanes import Lane, Learning, Still
from transformer_xl.adaptation.neural_cache import NeuralCache
from transformer_xl.adaptation.statistics import Statistics
from transformer_xl.checkpoint.adapter_file import fingerprint
from transformer_xl.config import AdaptationConfig
from transformer_xl.config.fields import read
from transformer_xl.errors import CheckpointError, ConfigError, InputError
from transformer_xl.inference import Sight, make_reader, restore_reader
from transformer_xl.inference.reader import MOST_READ
from transformer_xl.model import AnyModel, Memory
from transformer_xl.model.protocol import check_tokens
from transformer_xl.tensor_files import Kind, TensorFile, kinds_of, reading, write_tensors

SAVED = "a saved state of adaptation"
METADATA = ("adaptation", "base", "sizes")


class AdaptiveReader:
    @torch.inference_mode(False)
    def __init__(
        self,
        model: AnyModel,
        how: AdaptationConfig,
        *,
        statistics: Statistics | None = None,
        lanes: int = 1,
        sight: Sight = "last",
    ) -> None:
        """`sight`: of a reader whose weights stand still. Where they move, a token sees the memory before its segment and the segment before itself."""
        if type(lanes) is not int or lanes < 1:
            raise InputError(f"lanes {lanes!r} must be a whole number, at least 1")
        if not model.config.remembers:
            raise InputError(
                "a model with memory 0 sees no text before a segment, and cannot adapt to it; give it some, such as memory=128"
            )
        if model.training:
            raise InputError(
                "the model is in training mode, where dropout is on; call model.eval() before reading with it"
            )
        if how.moves and not how.segment:
            raise ConfigError("adaptation.segment: 0 tokens between two moves; say how many, such as 64")
        self.model, self.how, self.statistics = model, how, statistics
        self._sight = sight
        sizes = None if statistics is None else statistics.sizes
        self._fast = FastWeights(model, how, sizes=sizes) if how.moves else None
        self._lanes = [self._fresh() for _ in range(lanes)]

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def lane(self, number: int) -> Lane:
        return self._lanes[number]

    @torch.inference_mode(False)
    def score(self, tokens_BT: Tensor, *, own: bool = False) -> Tensor:
        """Of each of the next tokens its loss in nats given all before it in its lane, [B, T]; NaN for the first of a lane. Then they are learned from;
        by weights, unless they are the model's `own`."""
        check_tokens(tokens_BT, vocabulary=self.model.config.vocabulary)
        if len(tokens_BT) != self.lanes:
            raise InputError(f"tokens for {len(tokens_BT)} lanes, where this reader has {self.lanes}")
        return torch.stack(
            [lane.score(row_T.long(), own=own) for lane, row_T in zip(self._lanes, tokens_BT, strict=True)]
        )

    # --- lanes

    @torch.inference_mode(False)
    def reset(self, lanes: Iterable[int]) -> None:
        """These begin anew, as for a new document: nothing read, nothing learned."""
        for number in self._checked(lanes):
            self._lanes[number] = self._fresh()

    def select(self, lanes: Iterable[int]) -> "AdaptiveReader":
        """Another with these lanes, in this order; one that is named twice is forked. Nothing that changes is shared."""
        other = copy(self)
        other._lanes = [self._lanes[number].forked() for number in self._checked(lanes)]
        if self._fast is not None:
            other._fast = self._fast.twin()
            for lane in other._lanes:
                assert isinstance(lane, Learning)
                lane.fast = other._fast
        return other

    def fork(self) -> "AdaptiveReader":
        return self.select(range(self.lanes))

    def _checked(self, lanes: Iterable[int]) -> list[int]:
        chosen = list(lanes)
        for lane in chosen:
            if not 0 <= lane < self.lanes:
                raise InputError(f"lane {lane} does not exist; this reader has lanes 0 to {self.lanes - 1}")
        return chosen

    def _fresh(self) -> Lane:
        like = self.model.vocabulary.bias_V
        cache = NeuralCache(self.how, width=self.model.config.d_model, like=like) if self.how.caches else None
        if self._fast is not None:
            return Learning(self._fast, cache)
        return Still(make_reader(self.model, sight=self._sight), cache)

    # --- at rest, where anybody may have written it

    def save(self, path: Path | str) -> None:
        """Everything but the trained weights, as safetensors with a checksum; `AdaptiveReader.restore` reads it."""
        tensors = {"read": torch.tensor([lane.read for lane in self._lanes])}
        for number, lane in enumerate(self._lanes):
            own = _learned(lane) if isinstance(lane, Learning) else _standing(lane)
            if lane.cache is not None:
                hidden_ND, next_N = lane.cache.kept()
                own |= {"cache.hidden": hidden_ND, "cache.next": next_N, "cache.start": torch.tensor(lane.cache.start)}
            tensors |= {f"{number}.{name}": tensor.detach().cpu().contiguous() for name, tensor in own.items()}
        write_tensors(path, tensors, metadata=self._about())

    def _about(self) -> dict[str, str]:
        uses_sizes = self.how.moves and self.how.rule == "rms" and self.statistics is not None
        return {
            "adaptation": json.dumps(asdict(self.how)),
            "base": self._base,
            "sizes": self.statistics.fingerprint if uses_sizes and self.statistics is not None else "",
        }

    @cached_property
    def _base(self) -> str:
        return fingerprint(self.model.state_dict())

    @classmethod
    def restore(
        cls,
        model: AnyModel,
        path: Path | str,
        how: AdaptationConfig,
        *,
        statistics: Statistics | None = None,
        lanes: int | None = None,
    ) -> "AdaptiveReader":
        """As it was saved, by the same model and settings. `lanes`: how many it must have; None: however many."""
        reader = cls(model, how, statistics=statistics)
        with reading(path, what=SAVED) as file:
            reader._check_about(file)
            counts = _counts(file, lanes=lanes)
            optional = {f"{number}.given" for number in range(len(counts))}
            file.check(reader._wanted(file, counts), asker="this model", optional=optional)
            # Nothing stays in the mapped file.
            tensors = {name: tensor.clone() for name, tensor in file.tensors().items()}
        by_lane: list[dict[str, Tensor]] = [{} for _ in counts]
        for name, tensor in tensors.items():
            number, _, part = name.partition(".")
            if part:
                by_lane[int(number)][part] = tensor
        reader._lanes = [reader._taken(path, own, read=count) for own, count in zip(by_lane, counts, strict=True)]
        return reader

    def _check_about(self, file: TensorFile) -> None:
        file.check_metadata(METADATA)
        ours = self._about()
        if file.metadata.get("base") != ours["base"]:
            raise CheckpointError(
                f"{file.path} is of another model, or of this one with other weights; give another `state=`"
            )
        try:
            told = read(AdaptationConfig, json.loads(file.metadata.get("adaptation", "")), name="adaptation")
        except (ValueError, RecursionError, ConfigError) as error:
            raise CheckpointError(f"{file.path} is damaged, or no {SAVED.removeprefix('a ')} ({error})") from None
        for name, value in asdict(told).items():
            if value != getattr(self.how, name):
                raise CheckpointError(
                    f"{file.path} was made with adaptation.{name} {value}, not {getattr(self.how, name)}; ask for that, or give another `state=`"
                )
        if file.metadata.get("sizes") != ours["sizes"]:
            raise CheckpointError(
                f"{file.path} was made with other sizes of gradients than this run has now; give another `state=`"
            )

    def _wanted(self, file: TensorFile, counts: list[int]) -> dict[str, Kind]:
        """Every tensor, by what each lane says it has read."""
        like, wanted = self.model.vocabulary.bias_V, {"read": Kind(torch.int64, (len(counts),))}
        for number, count in enumerate(counts):
            own = self._wanted_of_learned(count)
            if self._fast is None:
                size = file.kinds[f"{number}.reader"].shape[:1] if f"{number}.reader" in file.kinds else (0,)
                own = {"reader": Kind(torch.uint8, size), "last": Kind(torch.int64, ())}
            if self.how.caches:
                kept = self._kept(count)
                own["cache.hidden"] = Kind(like.dtype, (kept, self.model.config.d_model))
                own |= {"cache.next": Kind(torch.int64, (kept,)), "cache.start": Kind(torch.int64, ())}
            wanted |= {f"{number}.{name}": kind for name, kind in own.items()}
        return wanted

    def _past(self, count: int) -> int:
        """Of as many tokens, those that were learned from: positions whose next token is known, in whole segments where weights move."""
        known = max(0, count - 1)
        return known - known % self.how.segment if self.how.moves else known

    def _kept(self, count: int) -> int:
        past = self._past(count)
        return min(past, self.how.cache_size) if self.how.cache_size else past

    def _wanted_of_learned(self, count: int) -> dict[str, Kind]:
        if self._fast is None:
            return {}
        shapes = zip(self._fast.names, self._fast.trained, strict=True)
        weights = {f"weights.{name}": Kind(weight.dtype, tuple(weight.shape)) for name, weight in shapes}
        memory = kinds_of(self._memory(count).tensors())
        left = count - self._past(count)
        pending = {"pending": Kind(torch.int64, (left,)), "given": Kind(torch.bool, (left,))}
        return {**pending, **weights, **{f"memory.{name}": kind for name, kind in memory.items()}}

    def _memory(self, count: int) -> Any:
        """What a lane remembers after as many tokens, without its numbers."""
        memory = self.model.start_memory(1)
        if isinstance(memory, Memory) and not memory.starts_full:
            length, like = min(self.model.config.memory, self._past(count)), memory.layers[0]
            empty = tuple(like.new_empty(1, length, like.shape[2], device="meta") for _ in memory.layers)
            return Memory(layers=empty, valid_B=torch.tensor([length]), recent_BP=memory.recent_BP)
        return memory

    def _taken(self, path: Path | str, own: Mapping[str, Tensor], *, read: int) -> Lane:
        """A lane of tensors of the right kinds."""
        lane, like = self._fresh(), self.model.vocabulary.bias_V
        try:
            if isinstance(lane, Learning):
                self._take_learned(lane, own, read=read)
            elif isinstance(lane, Still):
                self._check_ids(own["last"][None], name="last")
                lane.last = int(own["last"])
                self._take_reader(lane, own["reader"], read=read)
            if lane.cache is not None:
                hidden_ND, next_N, start = own["cache.hidden"], own["cache.next"], own["cache.start"]
                self._check_ids(torch.cat([next_N, start[None]]), name="cache")
                lane.cache.restored(hidden_ND.to(like), next_N.to(like.device), start=int(start))
        except InputError as error:
            raise CheckpointError(f"{path}: {error}") from None
        lane.read = read
        return lane

    def _take_learned(self, lane: Learning, own: Mapping[str, Tensor], *, read: int) -> None:
        device = self.model.vocabulary.bias_V.device
        self._check_ids(own["pending"], name="pending")
        lane.pending_P = own["pending"].to(device)
        lane.given_P = own.get("given", torch.ones(len(lane.pending_P), dtype=torch.bool))
        lane.weights = [own[f"weights.{name}"].to(device) for name in lane.fast.names]
        named = {name.removeprefix("memory."): part for name, part in own.items() if name.startswith("memory.")}
        memory = self.model.memory_kind.from_tensors(named)
        expected = self._memory(read)
        if isinstance(memory, Memory) and (
            not torch.equal(memory.valid_B, expected.valid_B) or memory.starts_full != expected.starts_full
        ):
            raise InputError(f"valid is {int(memory.valid_B)} of a memory after {read:,} tokens, which cannot be")
        lane.memory = memory.to(device)
        self.model.check_memory(lane.memory, lanes=1)  # type: ignore[arg-type]

    def _take_reader(self, lane: Still, saved: Tensor, *, read: int) -> None:
        with tempfile.TemporaryDirectory(prefix="txl-adaptation-") as folder:
            file = Path(folder) / "reader"
            file.write_bytes(saved.numpy().tobytes())
            try:
                lane.reader = restore_reader(self.model, file, lanes=1)
            except CheckpointError as error:
                raise InputError(str(error).replace(str(file), "its reader")) from None
        if int(lane.reader.read_B) != read:
            raise InputError(f"its reader has read {int(lane.reader.read_B):,} tokens, and the lane {read:,}")

    def _check_ids(self, ids_N: Tensor, *, name: str) -> None:
        if len(ids_N):
            check_tokens(ids_N[None], vocabulary=self.model.config.vocabulary, name=name)


def _learned(lane: Learning) -> dict[str, Tensor]:
    weights = {f"weights.{name}": weight for name, weight in zip(lane.fast.names, lane.weights, strict=True)}
    memory = {f"memory.{name}": tensor for name, tensor in lane.memory.tensors().items()}
    given = {} if bool(lane.given_P.all()) else {"given": lane.given_P}
    return {"pending": lane.pending_P, **given, **memory, **weights}


def _standing(lane: Lane) -> dict[str, Tensor]:
    assert isinstance(lane, Still)
    with tempfile.TemporaryDirectory(prefix="txl-adaptation-") as folder:
        lane.reader.save(Path(folder) / "reader")
        saved = bytearray((Path(folder) / "reader").read_bytes())
    return {"reader": torch.frombuffer(saved, dtype=torch.uint8), "last": torch.tensor(lane.last)}


def _counts(file: TensorFile, *, lanes: int | None) -> list[int]:
    """What each lane has read: it says how large everything else is. Each lane has tensors of its own, so there are no more lanes than tensors."""
    kind = file.kinds.get("read")
    if kind is None or kind.dtype != torch.int64 or len(kind.shape) != 1 or not 0 < kind.shape[0] < len(file.kinds):
        raise CheckpointError(f"{file.path} is not {SAVED}, or is damaged: it does not say what each lane has read")
    if lanes is not None and kind.shape[0] != lanes:
        raise CheckpointError(f"{file.path} has {kind.shape[0]:,} lanes where {lanes} is wanted; give another `state=`")
    counts: list[int] = file.handle.get_tensor("read").tolist()
    for lane, count in enumerate(counts):
        if not 0 <= count <= MOST_READ:
            raise CheckpointError(f"{file.path}: read is {count} in lane {lane}, which is no number of tokens")
    return counts
