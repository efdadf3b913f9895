"""How long something takes, shown as it goes: a live bar on a terminal, a plain line now and then elsewhere. Always on stderr, so that what a
command prints stays clean for programs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BEFORE_THE_FIRST_LINE = 2.0

_bars: list[Any] = []
"""The live display, while there is one: a bar within a bar shares it, for a terminal has only one last line."""
_quiet = False


class Advance(Protocol):
    def __call__(self, amount: float = 1, *, note: str | None = None) -> None: ...


@contextmanager
def progress(title: str, *, total: float | None, unit: str = "") -> Iterator[Advance]:
    """Yields `advance(amount, note=...)`. `unit` "bytes" is shown as MB."""
    if _quiet:
        yield lambda amount=1, *, note=None: None
    elif sys.stderr.isatty():
        with _live(title, total, unit) as advance:
            yield advance
    else:
        yield _plain(title, total, unit)


def be_quiet() -> None:
    """From now on nothing is shown: for processes that work beside the one that talks."""
    global _quiet
    _quiet = True


def say(text: str) -> None:
    """A line for people that stays, above the bar where there is one."""
    if _quiet:
        return
    if _bars:
        _bars[-1].console.print(text, markup=False, highlight=False)
    else:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _live(title: str, total: float | None, unit: str) -> Iterator[Advance]:
    from rich import progress as bars
    from rich.console import Console

    def advancing(bar: bars.Progress) -> tuple[Advance, bars.TaskID]:
        task = bar.add_task(title, total=total, note="")

        def advance(amount: float = 1, *, note: str | None = None) -> None:
            fields: dict[str, Any] = {} if note is None else {"note": note}
            bar.update(task, advance=amount, **fields)

        return advance, task

    if _bars:
        advance, task = advancing(_bars[-1])
        try:
            yield advance
        finally:
            _bars[-1].remove_task(task)
        return
    amount_column = bars.DownloadColumn() if unit == "bytes" else bars.MofNCompleteColumn()
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=24), amount_column)
    times = (bars.TimeElapsedColumn(), bars.TimeRemainingColumn(), bars.TextColumn("{task.fields[note]}"))
    with bars.Progress(*columns, *times, console=Console(stderr=True)) as bar:
        _bars.append(bar)
        try:
            yield advancing(bar)[0]
        finally:
            _bars.pop()


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
        told = f"{done / 1e6:,.1f} MB" if unit == "bytes" else f"{done:,.0f} {unit}".rstrip()
        print(f"{title}: {told}{share}{'  ' + note if note else ''}", file=sys.stderr, flush=True)

    return advance
