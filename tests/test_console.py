"""Bars for people: beside each other in threads, within each other, on a terminal and elsewhere."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from transformer_xl import console
from transformer_xl.console import progress, say


def play_a_terminal(monkeypatch):
    """Called by the test itself: pytest puts another stderr in place after its fixtures."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)


def test_threads_share_a_terminal(monkeypatch, capsys):
    """Whoever ends first leaves the display to the others; the last one takes it down."""
    play_a_terminal(monkeypatch)
    both, first_is_done = threading.Barrier(2), threading.Event()

    def work(number):
        with progress(f"work {number}", total=3) as advance:
            both.wait(10)
            if number:
                assert first_is_done.wait(10)
            for step in range(3):
                with progress("within", total=1) as inner:
                    inner()
                advance(note=f"step {step}")
                say(f"said by {number}")
        first_is_done.set()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert console._bars == []
    shown = capsys.readouterr().err
    assert "work 1" in shown
    assert "within" in shown
    assert shown.count("said by 0") == shown.count("said by 1") == 3
    say("afterwards")
    assert capsys.readouterr().err == "afterwards\n"


def test_a_bar_says_how_far_and_how_long(monkeypatch, capsys):
    play_a_terminal(monkeypatch)
    with progress("reading", total=2e6, unit="bytes") as advance:
        advance(2e6, note="all of it")
    *_, last = capsys.readouterr().err.split("\r")
    assert last == f"reading {'█' * console.CELLS} 2.0 MB (100%)  00:00, 00:00 left  all of it\n"
    with progress("who knows", total=None) as advance:
        advance(3)
    assert "who knows" in capsys.readouterr().err


def test_an_error_takes_the_bar_down(monkeypatch):
    play_a_terminal(monkeypatch)
    with pytest.raises(ZeroDivisionError), progress("work", total=1), progress("within", total=None):
        raise ZeroDivisionError
    assert console._bars == []


def test_elsewhere_a_plain_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS_BEFORE_THE_FIRST_LINE", 0.0)
    with progress("reading", total=2e6, unit="bytes") as advance:
        advance(5e5, note="so far")
        advance(5e5)
    assert capsys.readouterr().err == "reading: 0.5 MB (25%), 0 s left  so far\n"
    assert not console.in_notebook()
