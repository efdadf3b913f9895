"""How long something takes, shown as it goes: a live bar on a terminal, a line that redraws in a notebook, a plain line now and then elsewhere. Never on
a command's stdout, so that what it prints stays clean for programs. Threads may show theirs side by side."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BEFORE_THE_FIRST_LINE = 2.0
SECONDS_BETWEEN_DRAWINGS = 0.2
CELLS = 24
"""Of a bar in a notebook."""

_bars: list[Any] = []
"""The live display, once for each bar on it: all share it, because a terminal has only one last line."""
_sharing = threading.Lock()
_cell = threading.local()
"""In a notebook, what this thread shows: the handle of its display, and a line for each bar within a bar."""
_quiet = False
_heard: list[str] | None = None
"""Where lines go instead of to people, while somebody listens."""


class Advance(Protocol):
    def __call__(self, amount: float = 1, *, note: str | None = None) -> None: ...


@contextmanager
def progress(title: str, *, total: float | None, unit: str = "") -> Iterator[Advance]:
    """Yields `advance(amount, note=...)`. `unit` "bytes" is shown as MB."""
    if _quiet or _heard is not None:
        yield lambda amount=1, *, note=None: None
    elif in_notebook():
        with _redrawn(title, total, unit) as advance:
            yield advance
    elif sys.stderr.isatty():
        with _live(title, total, unit) as advance:
            yield advance
    else:
        yield _plain(title, total, unit)


def in_notebook() -> bool:
    """Whether a kernel of Jupyter's runs this. Nothing is imported to find out."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def be_quiet() -> None:
    """From now on nothing is shown: for processes that work beside the one that talks."""
    global _quiet
    _quiet = True


@contextmanager
def hushed() -> Iterator[list[str]]:
    """Within, nothing new is shown, and what would have been said is the list's: for whoever tells of it in words of its own."""
    global _heard
    before, _heard = _heard, []
    try:
        yield _heard
    finally:
        _heard = before


def say(text: str) -> None:
    """A line for people that stays, above the bar where there is one."""
    if _heard is not None:
        _heard.append(text)
    if _quiet or _heard is not None:
        return
    with _sharing:
        console = _bars[-1].console if _bars else None
    if console is not None:
        console.print(text, markup=False, highlight=False)
    else:
        # A notebook shows stderr as if something had gone wrong.
        print(text, file=sys.stdout if in_notebook() else sys.stderr, flush=True)


@contextmanager
def _live(title: str, total: float | None, unit: str) -> Iterator[Advance]:
    from rich import progress as bars
    from rich.console import Console

    with _sharing:
        if _bars:
            bar = _bars[-1]
        else:
            amount_column = bars.DownloadColumn() if unit == "bytes" else bars.MofNCompleteColumn()
            columns = (bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=24), amount_column)
            times = (bars.TimeElapsedColumn(), bars.TimeRemainingColumn(), bars.TextColumn("{task.fields[note]}"))
            bar = bars.Progress(*columns, *times, console=Console(stderr=True))
            bar.start()
        _bars.append(bar)
    task = bar.add_task(title, total=total, note="")

    def advance(amount: float = 1, *, note: str | None = None) -> None:
        fields: dict[str, Any] = {} if note is None else {"note": note}
        bar.update(task, advance=amount, **fields)

    try:
        yield advance
    finally:
        with _sharing:
            _bars.pop()
            if not _bars:
                bar.stop()  # and leaves the last bar standing
            else:
                bar.remove_task(task)


@contextmanager
def _redrawn(title: str, total: float | None, unit: str) -> Iterator[Advance]:
    """In the output of the cell. A bar within a bar is a second line, which goes when it is done."""
    from IPython.display import display

    lines = _cell.__dict__.setdefault("lines", [])
    place, done, next_at = len(lines), 0.0, 0.0
    lines.append("")
    if not place:
        _cell.handle = display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def draw() -> None:
        _cell.handle.update({"text/plain": "\n".join(lines)}, raw=True)

    def advance(amount: float = 1, *, note: str | None = None) -> None:
        nonlocal done, next_at
        done += amount
        full = int(CELLS * min(1.0, done / total)) if total else 0
        lines[place] = (
            f"{title} {'█' * full}{'░' * (CELLS - full)} {_amount(done, total, unit)}{'  ' + note if note else ''}"
        )
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + SECONDS_BETWEEN_DRAWINGS
            draw()

    try:
        yield advance
    finally:
        draw()
        lines.pop()


def _amount(done: float, total: float | None, unit: str) -> str:
    share = f" ({done / total:.0%})" if total else ""
    if unit == "bytes":
        return (f"{done / 1e3:,.0f} KB" if (total or done) < 1e6 else f"{done / 1e6:,.1f} MB") + share
    return f"{done:,.0f} {unit}".rstrip() + share


def _plain(title: str, total: float | None, unit: str) -> Advance:
    done, started_at = 0.0, time.monotonic()
    next_line_at = started_at + SECONDS_BEFORE_THE_FIRST_LINE

    def advance(amount: float = 1, *, note: str | None = None) -> None:
        nonlocal done, next_line_at
        done += amount
        if time.monotonic() < next_line_at:
            return
        next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES
        shown = _amount(done, total, unit)
        if total and 0 < done < total:
            shown += f", {(time.monotonic() - started_at) * (total - done) / done:,.0f} s left"
        print(f"{title}: {shown}{'  ' + note if note else ''}", file=sys.stderr, flush=True)

    return advance
