"""How long something takes, shown as it goes: a live bar on a terminal, a line that redraws in a notebook, a plain line now and then elsewhere. Never on
a command's stdout, so that what it prints stays clean for programs. Threads may show theirs side by side."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BEFORE_THE_FIRST_LINE = 2.0
SECONDS_BETWEEN_DRAWINGS = 0.2
CELLS = 24
"""Of a bar."""
COLUMNS, ROWS = 80, 24
"""Of a terminal that does not say how large it is."""

_bars: list[Any] = []
"""As many as stand on the terminal now, of all threads."""
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
    if _bars:
        _bar().write(text, file=sys.stderr)
    else:
        # A notebook shows stderr as if something had gone wrong.
        print(text, file=sys.stdout if in_notebook() else sys.stderr, flush=True)


@contextmanager
def _live(title: str, total: float | None, unit: str) -> Iterator[Advance]:
    left = "" if total is None else ", {remaining} left"
    shape = "{desc} {bar:" + str(CELLS) + "} {postfix[0]}  {elapsed}" + left + "  {postfix[1]}"
    told = [_amount(0.0, total, unit), ""]
    # Each advance may redraw, ten times a second at most; of a bar within a bar nothing stays.
    look: dict[str, Any] = {"bar_format": shape, "miniters": 0, "leave": None}
    look |= {"dynamic_ncols": True} if _has_a_size() else {"ncols": COLUMNS, "nrows": ROWS}
    bar = _bar()(desc=title, total=total, postfix=told, file=sys.stderr, **look)
    with _sharing:
        _bars.append(bar)

    def advance(amount: float = 1, *, note: str | None = None) -> None:
        told[0] = _amount(bar.n + amount, total, unit)
        told[1] = told[1] if note is None else note
        bar.update(amount)

    try:
        yield advance
    finally:
        with _sharing:
            _bars.pop()
        bar.close()


def _has_a_size() -> bool:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return False


@cache
def _bar() -> Any:
    """tqdm with a lock among threads alone: its own is one among processes too, for which some systems start a process."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # its thread would wake bars that skip advances, and ours skip none

    Bar.set_lock(threading.RLock())
    return Bar


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
