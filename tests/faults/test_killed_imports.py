"""`txl import` killed with SIGKILL: at each moment the run is there, whole, or not there; and the same command then succeeds."""

import random
import signal
from pathlib import Path

import pytest
from kills import Attempt, attempts, leftovers

from transformer_xl.checkpoint import load_checkpoint

SOURCE = Path(__file__).parents[3] / "shared" / "fixtures" / "original" / "a-plain" / "zip"
pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="../shared/fixtures is not here")

LOADED = ("transformer_xl.cli.import_", "transformer_xl.interop.importing", "torch._dynamo")
WRITES = 60
"""More than an import has."""


@pytest.fixture(scope="module")
def attempt():
    with attempts(*LOADED) as attempt:
        yield attempt


def importing(folder: Path, **kill) -> Attempt:
    folder.mkdir(exist_ok=True)
    return Attempt(words=["import", str(SOURCE), "--out", str(folder / "run")], **kill)


def check(folder: Path, attempt) -> bool:
    """Whether the run is there; if it is, it is whole."""
    whole = (folder / "run").exists()
    if not whole:
        again = attempt(importing(folder))
        assert again.code == 0, again.said
    load_checkpoint(folder / "run")
    return whole


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_a_write_an_import_is_whole_or_absent(every, attempt, tmp_path):
    """Each call that puts a file on the disk, or in its place, is a point; `every` so many of them."""
    points = range(1, WRITES + 1, every)
    codes = [attempt(importing(tmp_path / str(point), at_write=point)).code for point in points]
    killed = codes.count(-signal.SIGKILL)
    assert codes == [-signal.SIGKILL] * killed + [0] * (len(points) - killed)
    assert 0 < killed < len(points)  # so that every write there is was among the points
    half = [leftovers(tmp_path / str(point)) > 0 for point in points]
    whole = [check(tmp_path / str(point), attempt) for point in points]
    assert sum(half) >= killed - 2  # the last writes come when the run is in its place
    assert not any(whole[: killed - 2])
    assert all(whole[killed:])
    print(f"{killed} kills, {sum(half)} with half-written files, {sum(whole[:killed])} with the run in its place")


@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_an_import_is_whole_or_absent(kills, attempt, tmp_path):
    for name in ("first", "second"):  # the first loads what is loaded late
        takes = attempt(importing(tmp_path / name)).seconds
    chance = random.Random(0)
    for number in range(kills):
        attempt(importing(tmp_path / str(number), after_seconds=chance.uniform(0, 1.3 * takes)))
    whole = sum(check(tmp_path / str(number), attempt) for number in range(kills))
    assert whole < kills  # some were hit before the end
    print(f"{kills} kills: {whole} runs whole, {kills - whole} absent")
