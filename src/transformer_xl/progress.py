"""How long something takes, shown as it goes: a live bar on a terminal, a plain line now and then elsewhere. Always on stderr,
so that what a command prints stays clean for programs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BEFORE_THE_FIRST_LINE = 2.0


class Advance(Protocol):
    def __call__(self, amount: float = 1, *, note: str | None = None) -> None: ...


@contextmanager
def progress(title: str, *, total: float | None, unit: str = "") -> Iterator[Advance]:
    """Yields `advance(amount, note=...)`. `unit` "bytes" is shown as MB."""
    if sys.stderr.isatty():
        with _live(title, total, unit) as advance:
            yield advance
    else:
        yield _plain(title, total, unit)


@contextmanager
def _live(title: str, total: float | None, unit: str) -> Iterator[Advance]:
    from rich import progress as bars
    from rich.console import Console

    amount_column = bars.DownloadColumn() if unit == "bytes" else bars.MofNCompleteColumn()
    bar = bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        amount_column,
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task(title, total=total, note="")

        def advance(amount: float = 1, *, note: str | None = None) -> None:
            if note is None:
                bar.update(task, advance=amount)
            else:
                bar.update(task, advance=amount, note=note)

        yield advance


def _plain(title: str, total: float | None, unit: str) -> Advance:
    done = 0.0
    next_line_at = time.monotonic() + SECONDS_BEFORE_THE_FIRST_LINE

    def advance(amount: float = 1, *, note: str | None = None) -> None:
        nonlocal done, next_line_at
        done += amount
        if time.monotonic() < next_line_at:
            return
        next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES
        share = f" ({done / total:.0%})" if total else ""
        print(f"{title}: {_amount(done, unit)}{share}{' ' + note if note else ''}", file=sys.stderr, flush=True)

    return advance


def _amount(value: float, unit: str) -> str:
    return f"{value / 1e6:,.1f} MB" if unit == "bytes" else f"{value:,.0f} {unit}".rstrip()
