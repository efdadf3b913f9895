"""`txl prepare`, `txl evaluate --per-token` and `txl recl` killed with SIGKILL: each file they make is whole or absent; and the same command then succeeds."""

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from kills import Attempt, Death, attempts, leftovers

from transformer_xl.files import TEMPORARY

pytestmark = pytest.mark.timeout(900)  # of the slow ones, on a busy machine

LOADED = (
    "transformer_xl.cli.prepare",
    "transformer_xl.library",
    "transformer_xl.evaluation",
    "transformer_xl.analysis.contexts",
    "torch._dynamo",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)
WRITES = 40
"""More than any of these commands has."""
CHANGING = ("seconds", "checkpoint")
"""Fields of results that are of the attempt, not of what was measured."""


@pytest.fixture(scope="module")
def attempt():
    with attempts(*LOADED) as attempt:
        yield attempt


class Command:
    """A command that is tried in one folder after another. It finds there what it reads, and what it makes is compared with what it made undisturbed."""

    def __init__(self, words: list[str], given: Callable[[Path], object], place: Path) -> None:
        self.pattern, self.given, self.place = words, given, place

    def words(self, folder: Path) -> list[str]:
        return [word.format(folder) for word in self.pattern]

    def folder(self, name: str) -> Path:
        folder = self.place / name
        folder.mkdir()
        self.given(folder)
        return folder


@pytest.fixture(params=["prepare", "evaluate", "recl"])
def command(request, trained_run, tmp_path) -> Command:
    def copy_run(folder: Path) -> None:
        shutil.copytree(trained_run, folder / "run", ignore=shutil.ignore_patterns("evaluations"))

    def copy_text(folder: Path) -> None:
        shutil.copy(Path(json.__file__).parent / "decoder.py", folder / "text.txt")

    words, given = {
        "prepare": (["{}/text.txt", "--tokenizer", "bpe", "--out", "{}/store"], copy_text),
        "evaluate": (["{}/run", "--per-token", "{}/losses.npy"], copy_run),
        "recl": (["{}/run", "--step", "4", "--longest", "20", "--tokens", "60"], copy_run),
    }[request.param]
    return Command([request.param, *words], given, tmp_path)


def made(folder: Path) -> dict[str, object]:
    """All files that are not half-written, by name."""
    return {
        str(path.relative_to(folder)): content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(TEMPORARY) for part in path.relative_to(folder).parts)
    }


def content(path: Path) -> object:
    if path.suffix != ".json":
        return path.read_bytes()
    value = json.loads(path.read_text())
    return {name: value[name] for name in value if name not in CHANGING}


def whole_or_absent(
    command: Command, folder: Path, whole: dict[str, object], attempt: Callable[[Attempt], Death]
) -> bool:
    """Whether everything was there already; if not, it is after the command ran again."""
    found = made(folder)
    assert found == {name: whole[name] for name in found}  # nothing else, nothing damaged
    again = attempt(Attempt(words=command.words(folder)))
    assert again.code == 0, again.said
    assert made(folder) == whole
    return found.keys() == whole.keys()


def undisturbed(
    command: Command, attempt: Callable[[Attempt], Death], name: str = "undisturbed"
) -> tuple[dict[str, object], float]:
    """What it makes, and how long that takes."""
    folder = command.folder(name)
    before = made(folder)
    death = attempt(Attempt(words=command.words(folder)))
    assert death.code == 0, death.said
    assert made(folder).keys() > before.keys()
    return made(folder), death.seconds


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_a_write_what_is_made_is_whole_or_absent(every, command, attempt):
    whole, _ = undisturbed(command, attempt)
    killed = half = finished = 0
    for point in range(1, WRITES + 1, every):
        folder = command.folder(str(point))
        death = attempt(Attempt(words=command.words(folder), at_write=point))
        if death.code != -signal.SIGKILL:
            assert death.code == 0, death.said
            break
        killed += 1
        half += leftovers(folder) > 0
        finished += whole_or_absent(command, folder, whole, attempt)
    else:
        pytest.fail("every attempt was killed: there are more writes than WRITES")
    print(f"{killed} kills at writes: {half} with half-written files, {finished} with everything in its place")
    assert killed >= 6 / every
    assert half > 0
    assert finished < killed


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_random_what_is_made_is_whole_or_absent(kills, command, attempt):
    (whole, first), (_, second) = undisturbed(command, attempt), undisturbed(command, attempt, "again")
    takes = min(first, second)  # something else may have slowed one of them
    chance, early, finished = random.Random(0), 0, 0
    for number in range(kills):
        folder = command.folder(str(number))
        death = attempt(Attempt(words=command.words(folder), after_seconds=chance.uniform(0, takes)))
        assert death.code in (0, -signal.SIGKILL), death.said
        early += death.code == -signal.SIGKILL
        finished += whole_or_absent(command, folder, whole, attempt)
    print(f"{kills} kills at random: {early} before the end, {finished} with everything in its place")
    assert early >= kills / 4
    assert finished < kills
