"""How surprising each line or document of a stream is, as it comes: in bits, beside the last lines before it, and where in it.

    bytes -> whole lines -> tokens of each -> its bits -> its rank among the last N -> the words that surprised most

Every line is read by the model in calls of its own, so its bits are the same whenever and in whatever pieces the stream came. Nothing grows with the
stream. Everything that must survive a restart is in one file: `save` and `restore`.
"""

import json
import re
import tempfile
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from transformer_xl.config.fields import no_giant, not_negative, positive, read
from transformer_xl.data.text.streaming import placed_tokens
from transformer_xl.data.text.tokenizers import Tokenizer
from transformer_xl.devices import to_device
from transformer_xl.errors import CheckpointError, ConfigError, DataError, InputError, suggest
from transformer_xl.evaluation.scores import Scores
from transformer_xl.inference.weights import WeightKind
from transformer_xl.model import AnyModel
from transformer_xl.tensor_files import Kind, reading, write_tensors

By = Literal["line", "document"]
MOST_LINE_BYTES = 1 << 16
"""A longer line is scored in pieces of so many bytes, each as a line."""
SCORED_AT_ONCE = 512
"""Tokens whose distributions are in memory at the same time."""
LAST_LINES = 10_000
"""With which a line is compared, unless told."""
MOST_LAST = 1_000_000
SAVED = "a saved score"
METADATA = "scores"
WORD = re.compile(rb"\S+")


@dataclass(frozen=True, kw_only=True)
class SurprisingPart:
    """The run of words whose bits lie furthest above what as many bytes of the line have on average."""

    text: str
    offset: int
    bits: float


@dataclass(frozen=True, kw_only=True)
class LineScore:
    """Of a line, or of a document, which ends with a blank line."""

    number: int
    """Counted from 1, since the stream began."""
    offset: int
    """The byte at which it begins in the stream."""
    lines: int
    bytes: int
    bits: float
    rank: float | None
    """The share of the last ones that surprised less; None for the first of all."""
    among: int
    """How many those were."""
    part: SurprisingPart | None
    """None where it has no words."""
    text: str | None = None
    """Without its end; None of a document, which may be of any length."""

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.bytes


class Recent:
    """The bits of the last so many lines."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._in_order = deque(values, maxlen=size)
        self._sorted = sorted(self._in_order)

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[float]:
        return iter(self._in_order)

    def rank(self, bits: float) -> float | None:
        return bisect_left(self._sorted, bits) / len(self._sorted) if self._sorted else None

    def add(self, bits: float) -> None:
        if len(self._in_order) == self._in_order.maxlen:
            del self._sorted[bisect_left(self._sorted, self._in_order[0])]
        self._in_order.append(bits)
        insort(self._sorted, bits)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a scorer stands, apart from what the model remembers, the last bits and the bytes that wait."""

    version: int = 1
    model: str
    """Whose memory it is: a fingerprint of the weights."""
    weights: WeightKind = "exact"
    memory: int | None = None
    """How it reads: as the weights are or rounded, and how many positions it remembers (None: a recurrent state, or saved before this was kept)."""
    by: By
    last: int
    adapts: bool = False
    """Whether it learns while it reads."""
    units: int = 0
    """Lines or documents told."""
    lines: int = 0
    """Lines read."""
    read: int = 0
    """Bytes of them."""
    bits: float = 0.0
    begun_offset: int = 0
    """Of the document that has not ended: where it began, and what was found in it."""
    begun_lines: int = 0
    begun_bits: float = 0.0
    begun_words: bool = False
    part_text: str = ""
    part_offset: int = 0
    part_bits: float = 0.0
    """Of its part that surprised most, where it has words."""

    @property
    def begun_part(self) -> SurprisingPart | None:
        part = SurprisingPart(text=self.part_text, offset=self.part_offset, bits=self.part_bits)
        return part if self.begun_words else None

    def __post_init__(self) -> None:
        no_giant(self, "progress")
        not_negative(self, "progress", "units", "lines", "read", "bits")
        not_negative(self, "progress", "begun_offset", "begun_lines", "begun_bits", "part_offset", "part_bits")
        positive(self, "progress", "last")
        if self.version != 1 or self.last > MOST_LAST or self.begun_offset > self.read or self.begun_lines > self.lines:
            raise ConfigError("it says what cannot be")


class Scorer(Protocol):
    """Whatever reads for it, and remembers: a reader, or one that learns while it reads."""

    model: AnyModel

    def score(self, tokens_BT: Tensor, /) -> Tensor: ...

    def save(self, path: Path | str, /) -> None: ...


class LineScorer:
    """Give it bytes as they come. `model` is a fingerprint of the weights that read: a state of other weights is refused."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        reader: Scorer,
        *,
        model: str,
        by: By = "line",
        last: int = LAST_LINES,
        adapts: bool = False,
        name: str = "the text",
        weights: WeightKind = "exact",
    ) -> None:
        if by not in get_args(By):
            raise InputError(f"`by={by}` is neither line nor document{suggest(str(by), get_args(By))}")
        if type(last) is not int or not 1 <= last <= MOST_LAST:
            raise InputError(f"`last={last}` must be 1 to {MOST_LAST:,} lines to compare with")
        told = {"adapts": adapts, **_reads(reader.model, weights)}
        self.name, self.progress = name, Progress(model=model, by=by, last=last, **told)
        self._tokenizer, self._reader, self._recent = tokenizer, reader, Recent(last)
        self._rest, self._searched = bytearray(), 0

    def feed(self, data: bytes) -> Iterator[LineScore]:
        """What has ended with `data`. Whoever stops asking may save and go on later: what was not told yet waits."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InputError(f"a scorer is fed bytes, not {type(data).__name__}; give text.encode()")
        self._rest += data
        while (end := self._line_end()) is not None:
            line = bytes(self._rest[:end])
            del self._rest[:end]
            yield from self._scored_or_counted(line)

    def finish(self) -> Iterator[LineScore]:
        """The stream has ended: what is left is a line, and ends its document."""
        yield from self.feed(b"")
        if line := bytes(self._rest):
            self._rest, self._searched = bytearray(), 0
            yield from self._scored_or_counted(line)
        if self.progress.begun_words:
            yield self._document()

    def _line_end(self) -> int | None:
        found = self._rest.find(b"\n", self._searched, MOST_LINE_BYTES + 1)  # with the end of a line that just fits
        self._searched = 0 if found >= 0 else min(len(self._rest), MOST_LINE_BYTES)
        if found >= 0:
            return found + 1
        if len(self._rest) <= MOST_LINE_BYTES:
            return None
        self._searched = 0
        # Between two characters, of which each has at most three bytes after its first.
        ends = range(MOST_LINE_BYTES, MOST_LINE_BYTES - 4, -1)
        return next((end for end in ends if self._rest[end] & 0xC0 != 0x80), MOST_LINE_BYTES)

    def _scored_or_counted(self, line: bytes) -> Iterator[LineScore]:
        """A line that is refused is left out, and has its number and its place all the same."""
        before = self.progress
        try:
            yield from self._scored(line)
        except DataError:
            if self.progress is before:
                self._move(lines=before.lines + 1, read=before.read + len(line))
            raise

    def _scored(self, line: bytes) -> Iterator[LineScore]:
        now, scores = self.progress, self._scores(line)
        bits_P = np.nan_to_num(scores.bits)
        bits, part = float(bits_P.sum()), _surprising_part(line, scores.offsets, bits_P, offset=now.read)
        self._move(lines=now.lines + 1, read=now.read + len(line), bits=now.bits + bits)
        if now.by == "line":
            text = line.rstrip(b"\r\n").decode("utf-8", errors="backslashreplace")
            yield self._told(offset=now.read, lines=1, bits=bits, part=part, text=text)
            return
        self._move(
            begun_offset=now.begun_offset if now.begun_lines else now.read,
            begun_lines=now.begun_lines + 1,
            begun_bits=now.begun_bits + bits,
        )
        if part is not None and (not now.begun_words or part.bits > now.part_bits):
            self._move(begun_words=True, part_text=part.text, part_offset=part.offset, part_bits=part.bits)
        if part is None and now.begun_words:
            yield self._document()

    def _scores(self, line: bytes) -> Scores:
        where = f"{self.name}, line {self.progress.lines + 1:,}"
        placed = placed_tokens(self._tokenizer, line, name=where)
        device = self._reader.model.vocabulary.bias_V.device
        losses = [
            self._reader.score(
                to_device(torch.from_numpy(placed.token_P[start : start + SCORED_AT_ONCE])[None], device)
            )[0]
            for start in range(0, len(placed.token_P), SCORED_AT_ONCE)
        ]
        nats = torch.cat(losses).float().cpu().numpy() if losses else np.zeros(0, dtype=np.float32)
        return Scores(tokens=placed.token_P, offsets=placed.offset_P, nats=nats)

    def _document(self) -> LineScore:
        now = self.progress
        told = self._told(offset=now.begun_offset, lines=now.begun_lines, bits=now.begun_bits, part=now.begun_part)
        self._move(begun_offset=0, begun_lines=0, begun_bits=0.0, begun_words=False)
        return told

    def _told(
        self, *, offset: int, lines: int, bits: float, part: SurprisingPart | None, text: str | None = None
    ) -> LineScore:
        now, rank, among = self.progress, self._recent.rank(bits), len(self._recent)
        self._recent.add(bits)
        self._move(units=now.units + 1)
        return LineScore(
            number=now.units + 1,
            offset=offset,
            lines=lines,
            bytes=now.read - offset,
            bits=bits,
            rank=rank,
            among=among,
            part=part,
            text=text,
        )

    def _move(self, **changes: object) -> None:
        self.progress = replace(self.progress, **changes)  # type: ignore[arg-type]

    # --- at rest, where anybody may have written it

    def save(self, path: Path | str) -> None:
        """What the model remembers, the last bits, the bytes that wait and the counts: one file, whole or not at all."""
        with tempfile.TemporaryDirectory(prefix="txl-score-") as folder:
            self._reader.save(Path(folder) / "engine")
            engine = (Path(folder) / "engine").read_bytes()
        tensors = {
            "engine": torch.frombuffer(bytearray(engine), dtype=torch.uint8),
            "recent": torch.tensor(list(self._recent), dtype=torch.float64),
            "rest": torch.tensor(list(self._rest), dtype=torch.uint8),
        }
        write_tensors(path, tensors, metadata={METADATA: json.dumps(asdict(self.progress))})

    @classmethod
    def restore(
        cls,
        path: Path | str,
        tokenizer: Tokenizer,
        net: AnyModel,
        reader: Callable[[Path], Scorer],
        *,
        model: str,
        by: By | None = None,
        last: int | None = None,
        weights: WeightKind = "exact",
        adapts: bool = False,
        name: str = "the text",
    ) -> "LineScorer":
        """As it was saved; `reader` restores what reads for it. What is asked for beside it must be what it was made with."""
        with reading(path, what=SAVED) as file:
            file.check_metadata((METADATA,))
            lengths = {part: kind.shape[:1] for part, kind in file.kinds.items()}
            wanted = {"engine": torch.uint8, "recent": torch.float64, "rest": torch.uint8}
            file.check({part: Kind(kind, lengths.get(part, ())) for part, kind in wanted.items()}, asker=SAVED)
            tensors, progress = file.tensors(), _progress(path, file.metadata.get(METADATA, ""))
        recent, rest = tensors["recent"].tolist(), bytes(tensors["rest"].tolist())
        if len(recent) > progress.last or len(recent) > progress.units or any(bits < 0 for bits in recent):
            raise CheckpointError(f"{path} is damaged: its last bits are none that lines have")
        if progress.model != model:
            raise CheckpointError(
                f"{path} is of another model, or of this one with other weights; give another `state=`"
            )
        reads = _reads(net, weights)
        for what, asked, saved in (
            ("by", by, progress.by),
            ("last", last, progress.last),
            ("weights", weights, progress.weights),
            ("memory", reads["memory"] if progress.memory is not None else None, progress.memory),
        ):
            if asked not in (None, saved):
                raise CheckpointError(f"{path} was made with `{what}={saved}`; ask for that, or give another `state=`")
        if progress.adapts != adapts:
            how = "with" if progress.adapts else "without"
            raise CheckpointError(f"{path} was made {how} `adapt=`; ask for the same, or give another `state=`")
        with tempfile.TemporaryDirectory(prefix="txl-score-") as folder:
            engine = Path(folder) / "engine"
            engine.write_bytes(tensors["engine"].numpy().tobytes())
            try:
                restored = reader(engine)
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(str(engine), str(path))) from None
        same: dict[str, Any] = {"by": progress.by, "last": progress.last, "adapts": adapts, "weights": weights}
        scorer = cls(tokenizer, restored, model=model, name=name, **same)
        scorer.progress, scorer._recent = progress, Recent(progress.last, recent)
        scorer._rest += rest
        return scorer


def _reads(net: AnyModel, weights: WeightKind) -> dict[str, Any]:
    return {"weights": weights, "memory": None if net.config.recurrent else net.config.memory}


def _progress(path: Path | str, text: str) -> Progress:
    try:
        return read(Progress, json.loads(text), name="")
    except (ValueError, RecursionError, ConfigError) as error:
        raise CheckpointError(f"{path} is damaged, or no {SAVED.removeprefix('a ')} ({error})") from None


def _surprising_part(line: bytes, offset_P: object, bits_P: object, *, offset: int) -> SurprisingPart | None:
    """Each word has the bits of the tokens that begin in it or in the white space before it."""
    spans = [match.span() for match in WORD.finditer(line)]
    if not spans:
        return None
    of_token = np.minimum(
        np.searchsorted([end for _, end in spans], np.asarray(offset_P), side="right"), len(spans) - 1
    )
    bits_W = np.bincount(of_token, weights=np.asarray(bits_P), minlength=len(spans))
    size_W = np.diff([0, *(end for _, end in spans)])
    # The run of words with the largest sum above the mean, which one pass finds.
    above_W = bits_W - size_W * (bits_W.sum() / size_W.sum())
    best, first, last, here, begin = -np.inf, 0, 0, 0.0, 0
    for word, above in enumerate(above_W.tolist()):
        if here <= 0:
            here, begin = 0.0, word
        here += above
        if here > best:
            best, first, last = here, begin, word
    start, end = spans[first][0], spans[last][1]
    text = line[start:end].decode("utf-8", errors="backslashreplace")
    return SurprisingPart(text=text, offset=offset + start, bits=float(bits_W[first : last + 1].sum()))
