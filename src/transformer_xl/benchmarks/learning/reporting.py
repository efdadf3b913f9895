"""A comparison as the rows of a table, for people, and as a picture: held-out bits per byte against minutes, one panel a corpus."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from transformer_xl.benchmarks.learning.comparing import Comparison, Learned
from transformer_xl.evaluation.references import ORDER, is_stuck
from transformer_xl.pictures import panels

COLUMNS = ("corpus", "entrant", "parameters", "rate", "batch", "tokens read", "minutes", "valid", "test (range)", "")

TIME_TOLERANCE = 0.05
"""Our loop counts steps, and a machine that others use makes their count wrong."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One entrant on one corpus, over all seeds."""

    corpus: str
    entrant: str
    runs: list[Learned]
    stuck: int
    """How many runs ended near the entropy of single bytes."""
    asked_minutes: float

    @property
    def verdict(self) -> str:
        words = []
        if self.stuck:
            words.append("stuck" if self.stuck == len(self.runs) else f"stuck {self.stuck} of {len(self.runs)}")
        if any(abs(run.minutes / self.asked_minutes - 1) > TIME_TOLERANCE for run in self.runs):
            words.append("not the time asked for")
        if any(run.disturbed for run in self.runs):
            words.append("machine busy")
        return ", ".join(words)

    def cells(self) -> tuple[str, ...]:
        first, tests = self.runs[0], tests_of(self.runs)
        valids = [float("inf") if run.valid is None else run.valid for run in self.runs]
        feed = first.feed
        spread = f" ({min(tests):.3f}-{max(tests):.3f})" if len(tests) > 1 else ""
        return (
            self.corpus,
            self.entrant,
            f"{first.parameters:,}",
            f"{first.rate:.2g}",
            "its own" if feed is None else f"{feed['lanes']}x{feed['segment'] * feed.get('chunks', 1)}",
            f"{median(run.tokens for run in self.runs):,.0f}",
            f"{median(run.minutes for run in self.runs):.2f}",
            f"{median(valids):.3f}",
            f"{median(tests):.3f}{spread}",
            self.verdict,
        )


def tests_of(runs: list[Learned]) -> list[float]:
    return [float("inf") if run.test is None else run.test for run in runs]


def rows_of(comparison: Comparison) -> list[Row]:
    """Corpus by corpus, the best first."""
    rows = []
    for corpus, reference in comparison.references.items():
        here = [run for run in comparison.runs if run.corpus == corpus]
        some = []
        for entrant in dict.fromkeys(run.entrant for run in here):
            runs = [run for run in here if run.entrant == entrant]
            stuck = sum(is_stuck(bits, single_bytes=reference.single_bytes) for bits in tests_of(runs))
            some.append(
                Row(corpus=corpus, entrant=entrant, runs=runs, stuck=stuck, asked_minutes=comparison.settings.minutes)
            )
        rows += sorted(some, key=lambda row: median(tests_of(row.runs)))
    return rows


def notes_of(comparison: Comparison) -> Iterator[str]:
    settings = comparison.settings
    for corpus, reference in comparison.references.items():
        yield (
            f"{corpus}: single bytes {reference.single_bytes:.3f}, {ORDER}-grams of all of train {reference.ngram:.3f},"
            f" xz -9 after train {reference.xz:.3f}"
        )
    yield (
        f"bits per byte of the first {settings.test_bytes:,} bytes of test, each in full context, float32; medians over seeds"
        f" {', '.join(map(str, settings.seeds))}; {settings.minutes:g} minutes of training each"
        + ", on one core, by its own processor time"
        * settings.one_core
    )
    yield comparison.machine


def draw_curves(comparison: Comparison, path: Path) -> None:
    """A line for each entrant: the mean over its seeds at each mark."""
    names = list(dict.fromkeys(run.entrant for run in comparison.runs))
    corpora = list(comparison.references)
    title = f"Held-out text after equal time: {comparison.settings.minutes:g} minutes each"
    with panels(path, title=title, count=len(corpora)) as every:
        for axes, corpus in zip(every, corpora, strict=True):
            for number, name in enumerate(names):
                curves = [run.curve for run in comparison.runs if (run.entrant, run.corpus) == (name, corpus)]
                marks = list(zip(*(curve for curve in curves if curve), strict=False))
                minutes = [sum(point["minutes"] for point in mark) / len(mark) for mark in marks]
                bits = [sum(point["valid"] for point in mark) / len(mark) for mark in marks]
                axes.plot(minutes, bits, marker="o", markersize=3, color=f"C{number}", label=name)
            axes.axhline(comparison.references[corpus].single_bytes, color="grey", linestyle=":", label="single bytes")
            axes.set(title=corpus, xlabel="minutes of training", ylabel="bits per byte of valid")
            axes.grid(True, alpha=0.3)
        every[0].legend(fontsize="small")
