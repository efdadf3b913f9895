"""`txl import` killed with SIGKILL: at each moment the run is there, whole, or not there; and the same command then succeeds."""

import signal
import subprocess
import sys
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
KILLED_AT_RANDOM = """
import os, random, signal, sys, time
from transformer_xl.cli import main
source, folder, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
main(["import", source, "--out", f"{folder}/first"])  # loads what every import needs
begun = time.monotonic()
main(["import", source, "--out", f"{folder}/second"])
takes, chance = time.monotonic() - begun, random.Random(0)
for number in range(kills):
    child = os.fork()
    if not child:
        os._exit(main(["import", source, "--out", f"{folder}/{number}/run"]))
    time.sleep(chance.uniform(0, 1.3 * takes))
    os.kill(child, signal.SIGKILL)
    os.wait()
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
    for number in range(kills):
        (tmp_path / str(number)).mkdir()
    command = [sys.executable, "-c", KILLED_AT_RANDOM, str(SOURCE), str(tmp_path), str(kills)]
    subprocess.run(command, capture_output=True, check=True)
    whole = sum(check(tmp_path / str(number)) for number in range(kills))
    assert whole < kills  # some were hit before the end
    print(f"{kills} kills: {whole} runs whole, {kills - whole} absent")
