"""How it went: held-out text in bits per byte beside what needs no training, and the lines that surprised the model most and least."""

from dataclasses import asdict, dataclass, field
from itertools import chain

from transformer_xl.checkpoint import RunFolder
from transformer_xl.console import progress
from transformer_xl.data.store import Store
from transformer_xl.devices import AUTO
from transformer_xl.evaluation.lines import LineScore
from transformer_xl.evaluation.references import References, judged_by, references_of, text_of
from transformer_xl.files import write_json
from transformer_xl.library import Loaded, load
from transformer_xl.running import Run

TEST_BYTES = 200_000
REFERENCE_BYTES = 20_000_000
"""Of train, which n-grams are counted on: the end of it."""
SHORTEST_LINE = 20


@dataclass(frozen=True, kw_only=True)
class Report:
    """Bits per byte of the beginning of test, each token in full context, beside what needs no training."""

    bits_per_byte: float
    before: float | None
    """The same of the run whose weights it began with."""
    test_bytes: int
    references: References
    most: tuple[LineScore, ...] = field(repr=False)
    """The lines of test that surprised it most, and least."""
    least: tuple[LineScore, ...] = field(repr=False)


def report(run: Run, store: Store, *, origin: str | None = None, device: str = AUTO) -> Report:
    loaded = load(run.path, device=device)
    test, train = text_of(store, "test", first=TEST_BYTES), text_of(store, "train", last=REFERENCE_BYTES)
    judged = judged_by(store, "test", TEST_BYTES)

    def bits(model: Loaded) -> float:
        figures = model.evaluate(data=store.folder, split="test", tokens=judged["tokens"])
        return figures.bits_per_token * (judged["tokens"] - 1) / judged["bytes"]

    lines = sorted(_lines(loaded, test.tobytes()), key=lambda line: line.bits_per_byte)
    found = Report(
        bits_per_byte=bits(loaded),
        before=None if origin is None else bits(load(origin, device=device)),
        test_bytes=judged["bytes"],
        references=references_of(train, test),
        most=tuple(lines[-2:][::-1]),
        least=tuple(lines[: max(0, min(2, len(lines) - 2))]),
    )
    write_json(RunFolder(run.path).made("evaluations") / "fit.json", asdict(found))
    return found


def _lines(loaded: Loaded, text: bytes) -> list[LineScore]:
    """Those of some length, each once; of a text that has none, all."""
    scorer = loaded.line_scorer()
    with progress("reading lines", total=len(text), unit="bytes") as advance:
        found: dict[str | None, LineScore] = {}
        for line in chain(scorer.feed(text), scorer.finish()):
            advance(line.bytes)
            found.setdefault(line.text, line)
    long = [line for line in found.values() if line.bytes >= SHORTEST_LINE]
    return long or list(found.values())
