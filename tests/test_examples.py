"""The programs of examples/ run as a reader runs them; only their trainings are shorter."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from transformer_xl.cli import main

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[1] / "examples"
BRIEF = "0.03"
LINE = "10:0{} INFO worker {} served page {} in {} ms\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def run(*words, **how):
    program = [sys.executable] if str(words[0]).endswith(".py") else ["sh"]
    return subprocess.run([*program, *map(str, words)], capture_output=True, text=True, timeout=240, **how)


def log(first, lines, *, alert=None):
    told = [LINE.format(n % 10, n % 7, n * n % 13, n % 50) for n in range(first, first + lines)]
    if alert is not None:
        told[alert] = "KERNEL PANIC: unable to mount root fs on unknown-block(0,0)\n"
    return "".join(told)


def test_every_example_is_listed_and_run():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh", ".ipynb")}
    listed = set(re.findall(r"^\| `([^`]+)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == files
    here = Path(__file__).read_text() + (Path(__file__).parent / "test_notebook.py").read_text()
    assert all(name in here for name in files)


def test_log_alerts(place):
    (place / "app.log").write_text(log(0, 400))
    (place / "today.log").write_text(log(400, 300, alert=250))
    first = run(EXAMPLES / "log_alerts.py", "app.log", "today.log", "--minutes", BRIEF)
    assert first.returncode == 0, first.stderr
    assert "line 251, " in first.stdout
    assert "KERNEL PANIC" in first.stdout
    # Begun again, it goes on counting, with what it has seen.
    again = run(EXAMPLES / "log_alerts.py", "app.log", "-", input=log(700, 20, alert=5))
    assert "line 306, " in again.stdout, again.stderr


@pytest.fixture
def server(trained_run, place):
    command = [sys.executable, "-m", "transformer_xl", "serve", str(trained_run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        yield next(found[0] for line in process.stderr if (found := re.findall(r"http://127\.0\.0\.1:\d+", line)))
        process.send_signal(signal.SIGTERM)
        process.stderr.read()


def test_web_session(server, place):
    command = [sys.executable, EXAMPLES / "web_session.py", "--server", server, "--port", "0", "--tokens", "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None
        address = app.stdout.readline().strip()
        try:
            visitors = [build_opener(HTTPCookieProcessor(CookieJar())) for _ in range(2)]
            pages = []
            for number, visitor in enumerate(visitors):
                visitor.open(address).close()
                for text in (f"I am {number} <b>", "and then"):
                    with visitor.open(address, urlencode({"text": text}).encode()) as answer:
                        pages.append(answer.read().decode())
            assert pages[1].startswith(pages[0].split("</p>")[0]), "a story goes on"
            assert "and then" in pages[1]
            assert "I am 0 &lt;b&gt;" in pages[1]
            assert "I am 0" not in pages[3]
            assert "I am 1" in pages[3]
        finally:
            app.terminate()


def test_teach_imported(trained_run, place):
    assert main(["export", str(trained_run), "--to", "original", "--out", "theirs"]) == 0
    (place / "mine.txt").write_text("It was a bright cold day in April.\n" * 200)
    done = run(EXAMPLES / "teach_imported.py", "theirs", "mine.txt", "--minutes", "0.1", "--out", "taught")
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.findall(r"([\d.]+) before, ([\d.]+) after", done.stdout)[0])
    assert 1 < after < before


def test_novel_in_the_page(place):
    (place / "novel.txt").write_text(
        "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 300
    )
    command = ["sh", str(EXAMPLES / "novel_in_the_page.sh"), "novel.txt", BRIEF, "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    ) as it:
        assert it.stderr is not None
        try:
            address = next(found[0] for line in it.stderr if (found := re.findall(r"http://127\.0\.0\.1:\d+", line)))
            with build_opener().open(address) as page:
                assert b"<title>" in page.read()
        finally:
            os.killpg(it.pid, signal.SIGTERM)


def test_music(place):
    (place / "tunes").mkdir()
    for number in range(30):
        tune = f"X:{number}\nT:Tune {number}\nM:3/4\nK:G\n" + "|:G2B d2B|c2A F2A|" * (10 + number % 5) + "\n\n"
        (place / "tunes" / f"{number}.abc").write_text(tune)
    (place / "tunes" / "notes.txt").write_text("not a tune")
    done = run(EXAMPLES / "music.sh", "tunes", BRIEF)
    assert done.returncode == 0, done.stderr
    assert (place / "new.abc").read_text().startswith("X:1\nT:")
    assert "30 files" in done.stderr


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_one_table(place):
    """Started, and stopped as soon as its first model learns: the studies have tests of their own."""
    with subprocess.Popen(
        ["sh", str(EXAMPLES / "one_table.sh")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as it:
        until = time.monotonic() + 120
        while not list(place.glob("studies/**/config.json")):
            assert it.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        os.killpg(it.pid, signal.SIGTERM)
        it.communicate(timeout=60)
