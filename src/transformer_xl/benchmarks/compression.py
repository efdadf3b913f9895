"""How small and how fast: our levels beside other compressors, on pieces of held-out text of several sizes.

Each is also measured primed: what it adds when the text follows the training text, which our model has seen too. Ours is told without its model, and from
which size on it is the smallest with the model counted once.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from transformer_xl.benchmarks.children import BenchmarkError, Child, all_ready
from transformer_xl.benchmarks.environment import codecs_python
from transformer_xl.checkpoint import Checkpoint
from transformer_xl.compression import Level, TextCoder, compress_stream, decompress_stream
from transformer_xl.console import progress, say
from transformer_xl.data.store import Store
from transformer_xl.errors import ConfigError
from transformer_xl.evaluation.references import text_of
from transformer_xl.pictures import panels

WORKER = Path(__file__).with_name("codec_worker.py")
FROM_PACKAGES = ("brotli 11", "bzip3", "PPMd")
"""Those that are installed in an environment of their own."""
NEVER_PRIMED = ("zstd -19 with a dictionary", "zpaq -m5")
"""A dictionary is what it takes from train. zpaq reads some hundred KB a second, and would read train for each piece."""
LEVELS: tuple[Level, ...] = ("fast", "best")
SIZES = (1_000, 10_000, 100_000, 1_000_000)
PIECES, BYTES_OF_ALL = 8, 80_000
"""Of a size at most so many, and no more than one where they would be more bytes than this."""


@dataclass(frozen=True, kw_only=True)
class Row:
    corpus: str
    codec: str
    primed: bool
    size: int
    pieces: int
    bits_per_byte: float
    """Of all pieces of this size together."""
    compress_kb_per_second: float | None = None
    decompress_kb_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    model: str
    model_bytes: int
    """Of its weights as they lie in the run."""
    train_bytes: dict[str, int]
    """That the others were primed with, by corpus."""
    skipped: dict[str, str]
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"wins_from_bytes": self.wins_from()}

    def wins_from(self) -> dict[str, int | None]:
        """For each corpus from how many bytes on `best` with its model is smaller than every other that is not primed, by the rates at the largest size;
        None where another is smaller without it."""
        found: dict[str, int | None] = {}
        for corpus in self.train_bytes:
            largest = max(row.size for row in self.rows if row.corpus == corpus)
            here = [row for row in self.rows if (row.corpus, row.size, row.primed) == (corpus, largest, False)]
            ours = min(row.bits_per_byte for row in here if row.codec in OURS)
            others = [row.bits_per_byte for row in here if row.codec not in OURS]
            gained = min(others, default=ours) - ours
            found[corpus] = round(8 * self.model_bytes / gained) if gained > 0 else None
        return found


OURS = {f"txl {level}": level for level in LEVELS}


def compare_codecs(
    checkpoint: Checkpoint,
    stores: Sequence[Store],
    *,
    against: Sequence[str],
    sizes: Sequence[int] = SIZES,
    train_bytes: int,
) -> Comparison:
    """`train_bytes`: the last so many of each train are what the others are primed with."""
    rows, skipped, trained = list[Row](), dict[str, str](), dict[str, int]()
    with ExitStack() as opened:
        codecs = _ready(opened, against, skipped)
        for store in stores:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            train = text_of(store, "train", last=train_bytes).tobytes()
            (folder / "train").write_bytes(train)
            name, test = store.folder.name, text_of(store, "test").tobytes()
            name = str(store.folder) if name in trained else name
            trained[name] = len(train)
            pieces = {size: _pieces(test, size) for size in sizes if size <= len(test)}
            if len(pieces) < len(sizes):
                say(f"the test split of {name} has {len(test):,} bytes: no larger pieces are compared")
            if not pieces:
                raise ConfigError(
                    f"`sizes=`: {min(sizes):,} is more than the {len(test):,} bytes of the test split of {name}"
                )
            paths = {size: _written(texts, folder, size) for size, texts in pieces.items()}
            with progress(f"compressing {name}", total=len(pieces) * len(OURS) + len(codecs)) as advance:
                for size, texts in pieces.items():
                    for codec, level in OURS.items():
                        rows.append(_row(name, codec, size, _measure_ours(checkpoint, texts, level)))
                        advance(note=codec)
                for codec, child in codecs.items():
                    for primed in (False,) if codec in NEVER_PRIMED else (False, True):
                        # All sizes at once: whoever is primed reads train once.
                        asked: dict[str, Any] = {"train": str(folder / "train"), "texts": list(chain(*paths.values()))}
                        found = iter(child.ask("measure", codec=codec, primed=primed, **asked)["texts"])
                        for size, own in paths.items():
                            rows.append(_row(name, codec, size, [next(found) for _ in own], primed=primed))
                    advance(note=codec)
    weights = sum(path.stat().st_size for path in checkpoint.folder.glob("model*.safetensors"))
    return Comparison(
        model=str(checkpoint.folder), model_bytes=weights, train_bytes=trained, skipped=skipped, rows=tuple(rows)
    )


def _ready(opened: ExitStack, against: Sequence[str], skipped: dict[str, str]) -> dict[str, Child]:
    """A process for each compressor that can be had; why the others cannot."""
    pythons: dict[str, Path | str] = {}
    for codec in against:
        try:
            pythons[codec] = codecs_python() if codec in FROM_PACKAGES else sys.executable
        except BenchmarkError as error:
            skipped[codec] = str(error)
    starts = {codec: partial(Child, codec, python=python, worker=WORKER) for codec, python in pythons.items()}
    children = opened.enter_context(all_ready(starts))
    for codec, child in children.items():
        if why := child.ask("missing", codec=codec)["missing"]:
            skipped[codec] = why
    return {codec: child for codec, child in children.items() if codec not in skipped}


def _written(texts: Sequence[bytes], folder: Path, size: int) -> list[str]:
    paths = [folder / f"{size}-{number}" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    return list(map(str, paths))


def _pieces(text: bytes, size: int) -> list[bytes]:
    """Spread over the whole of it."""
    count = max(1, min(PIECES, BYTES_OF_ALL // size, len(text) // size))
    starts = [number * (len(text) - size) // max(1, count - 1) for number in range(count)]
    return [text[start : start + size] for start in starts]


def _measure_ours(checkpoint: Checkpoint, texts: Sequence[bytes], level: Level) -> list[dict[str, float]]:
    def coder(lanes: int) -> TextCoder:
        return TextCoder(checkpoint.model, checkpoint.tokenizer, lanes=lanes)

    return list(_each(texts, level, coder))


def _each(texts: Sequence[bytes], level: Level, coder: Any) -> Iterator[dict[str, float]]:
    from io import BytesIO

    for text in texts:
        made, back = BytesIO(), BytesIO()
        started_at = time.perf_counter()
        compress_stream(BytesIO(text), made, coder, level=level, advance=_nobody, again=True)
        between = time.perf_counter()
        decompress_stream(BytesIO(made.getvalue()), back, coder, name="the text", advance=_nobody, hold=False)
        ended_at = time.perf_counter()
        if back.getvalue() != text:
            raise BenchmarkError("what was compressed did not come back; please report it with the run and the text")
        size = len(made.getvalue())
        yield {"bytes": size, "compress_seconds": between - started_at, "decompress_seconds": ended_at - between}


def _nobody(amount: float = 1, *, note: str | None = None) -> None:
    """Is told how far it is."""


def _row(corpus: str, codec: str, size: int, found: list[dict[str, float]], *, primed: bool = False) -> Row:
    kilobytes = size * len(found) / 1000
    speeds: dict[str, Any] = {
        f"{way}_kb_per_second": kilobytes / max(1e-9, sum(each[f"{way}_seconds"] for each in found))
        for way in ("compress", "decompress")
        if not primed
    }
    bits = 8 * sum(each["bytes"] for each in found) / (size * len(found))
    told: dict[str, Any] = {"corpus": corpus, "codec": codec, "primed": primed, "size": size, "pieces": len(found)}
    return Row(**told, bits_per_byte=bits, **speeds)


def draw(comparison: Comparison, path: Path) -> None:
    """Bits per byte of the largest pieces against the speed of compressing them; a cross is the same, primed, whose speed is that of the text alone."""
    corpora = list(comparison.train_bytes)
    with panels(path, title="Smaller is lower, faster is to the right", count=len(corpora)) as every:
        for axes, corpus in zip(every, corpora, strict=True):
            largest = max(row.size for row in comparison.rows if row.corpus == corpus)
            rows = [row for row in comparison.rows if (row.corpus, row.size) == (corpus, largest)]
            for number, codec in enumerate(dict.fromkeys(row.codec for row in rows)):
                here = {row.primed: row for row in rows if row.codec == codec}
                speed, color = here[False].compress_kb_per_second, f"C{number}"
                axes.plot([speed], [here[False].bits_per_byte], "o", color=color, label=codec)
                if True in here:
                    axes.plot([speed], [here[True].bits_per_byte], "x", color=color)
            axes.set(title=f"{corpus}, {largest:,} bytes", xlabel="KB per second, compressing", ylabel="bits per byte")
            axes.set_xscale("log")
            axes.grid(True, alpha=0.3)
        every[0].legend(fontsize="small")
