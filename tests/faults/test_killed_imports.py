"""`txl import` killed with SIGKILL: at each moment the run is there, whole, or not there; and the same command then succeeds."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transformer_xl.checkpoint import load_checkpoint
from transformer_xl.cli import main
from transformer_xl.files import TEMPORARY

SOURCE = Path(__file__).parents[3] / "shared" / "fixtures" / "original" / "a-plain" / "zip"
pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="../shared/fixtures is not here")

KILLED_AT = """
import os, signal, sys
from transformer_xl.cli import main
source, folder, points = sys.argv[1], sys.argv[2], [int(word) for word in sys.argv[3:]]
main(["import", source, "--out", f"{folder}/first"])  # loads what every import needs
for point in points:
    child = os.fork()
    if not child:
        left = point
        def counted(call):
            def counting(*arguments, **options):
                global left
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)
            return counting
        os.fsync, os.replace = counted(os.fsync), counted(os.replace)
        os._exit(main(["import", source, "--out", f"{folder}/{point}/run"]))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
IMPORTING = """
import os, sys
from transformer_xl.cli import main
main(["import", sys.argv[1], "--out", f"{sys.argv[2]}/first", "--json"])
print("ready", flush=True)
for number in range(int(sys.argv[3])):
    child = os.fork()
    if not child:
        os._exit(main(["import", sys.argv[1], "--out", f"{sys.argv[2]}/{number}/run"]))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
    sys.stdin.readline()
"""
WRITES = 60
"""More than an import has."""


def check(folder: Path) -> bool:
    """Whether the run is there; if it is, it is whole."""
    whole = (folder / "run").exists()
    if whole:
        load_checkpoint(folder / "run")
    else:
        assert main(["import", str(SOURCE), "--out", str(folder / "run")]) == 0
        load_checkpoint(folder / "run")
    return whole


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_a_write_an_import_is_whole_or_absent(every, tmp_path):
    """Each call that puts a file on the disk, or in its place, is a point; `every` so many of them."""
    points = range(1, WRITES + 1, every)
    for point in points:
        (tmp_path / str(point)).mkdir()
    command = [sys.executable, "-c", KILLED_AT, str(SOURCE), str(tmp_path), *map(str, points)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    codes = [int(line) for line in done.stdout.splitlines() if line.lstrip("-").isdigit()]
    killed = codes.count(-signal.SIGKILL)
    assert codes == [-signal.SIGKILL] * killed + [0] * (len(points) - killed)
    assert 0 < killed < len(points)  # so that every write there is was among the points
    half = [any(path.name.startswith(TEMPORARY) for path in (tmp_path / str(point)).iterdir()) for point in points]
    whole = [check(tmp_path / str(point)) for point in points]
    assert sum(half) >= killed - 2  # the last writes come when the run is in its place
    assert not any(whole[: killed - 2])
    assert all(whole[killed:])
    print(f"{killed} kills, {sum(half)} with half-written files, {sum(whole[:killed])} with the run in its place")


@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_an_import_is_whole_or_absent(kills, tmp_path):
    chance, whole = random.Random(0), 0
    command = [sys.executable, "-c", IMPORTING, str(SOURCE), str(tmp_path), str(kills)]
    for number in range(kills):
        (tmp_path / str(number)).mkdir()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as importing:
        while importing.stdout.readline() != "ready\n":
            pass
        for number in range(kills):
            importer = int(importing.stdout.readline())
            time.sleep(chance.uniform(0, 0.5))
            os.kill(importer, signal.SIGKILL)  # ours: forked just now, and not yet waited for if it is still running
            importing.stderr.readline()
            importing.stdin.write("\n")
            importing.stdin.flush()
            whole += check(tmp_path / str(number))
    print(f"{kills} kills: {whole} runs whole, {kills - whole} absent")
