"""A folder that is replaced is there, whole, the old one or the new one, whenever and however the process that replaces it ends."""

import os
import random
import shutil
import signal
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from folder_ends import NOT_REACHED, Replacement, replacements, version_of, write

from transformer_xl import files

CALLS = 400
"""More than a replacement makes."""
WAYS = pytest.mark.parametrize("steps", [False, True], ids=["exchanged", "in steps"])


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def found(target: Path, *, steps: bool) -> int:
    if steps:
        files.put_back(target)  # as whoever reads does
    return version_of(target)


@pytest.fixture
def target(tmp_path) -> Path:
    write(tmp_path / "parent" / "data", 0)
    return tmp_path / "parent" / "data"


@WAYS
def test_killed_between_any_two_calls_the_old_or_the_new_one_is_there(steps, target):
    """What one leaves, the next finds."""
    old, stood = 0, set()
    with replacements(target) as replace:
        for call in range(1, CALLS):
            code = replace(Replacement(version=call, at_call=call, steps=steps))
            now = found(target, steps=steps)
            assert now in (old, call)
            stood.add(now == call)
            old = now
            if code == NOT_REACHED:
                break
            assert code == -signal.SIGKILL
    assert code == NOT_REACHED
    assert call > 40
    assert stood == {True, False}
    assert hidden(target.parent) == []


@pytest.mark.slow
@WAYS
def test_two_hundred_kills_one_after_the_other(steps, target):
    """Somebody who tidies up by hand comes between, and costs nothing."""
    chance, old, kills, kept = random.Random(0), 0, 0, 0
    with replacements(target) as replace:
        while kills < 200:
            version = old + 1
            code = replace(Replacement(version=version, at_call=chance.randint(1, 150), steps=steps))
            if chance.random() < 0.3:
                for path in target.parent.glob(f"{files.TEMPORARY}*"):
                    shutil.rmtree(path)
            now = found(target, steps=steps)
            assert now in (old, version)
            killed = code == -signal.SIGKILL
            assert killed or (code, now) == (NOT_REACHED, version)
            kills, kept, old = kills + killed, kept + (killed and now == old), now
        assert 20 < kept < 200
        assert replace(Replacement(version=old + 1, steps=steps)) == 0
    assert hidden(target.parent) == []


@WAYS
@pytest.mark.parametrize("by", ["error", "interrupt"])
def test_whatever_fails_the_old_or_the_new_one_is_there_at_once(by, steps, target):
    """Without anybody putting anything back."""
    old = 0
    with replacements(target) as replace:
        for call in range(1, CALLS):
            code = replace(Replacement(version=call, at_call=call, by=by, steps=steps))
            now = version_of(target)
            assert now in (old, call)
            old = now
            if code == NOT_REACHED:
                break
        assert code == NOT_REACHED
        assert call > 40
        assert replace(Replacement(version=CALLS, steps=steps)) == 0
    assert hidden(target.parent) == []


@WAYS
def test_many_writers_and_readers_of_one_name(steps, target, monkeypatch):
    if steps:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    failed: list[BaseException] = []

    def several(first: int) -> None:
        try:
            for version in range(first, first + 25):
                write(target, version)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=several, args=(1000 * number,)) for number in range(1, 7)]
    for writer in writers:
        writer.start()
    missing = 0
    while any(writer.is_alive() for writer in writers):
        files.put_back(target)
        missing += not target.is_dir()
    for writer in writers:
        writer.join()
    assert failed == []
    assert steps or missing == 0
    assert version_of(target) % 1000 == 24
    assert hidden(target.parent) == []


def test_what_somebody_is_writing_right_now_is_not_cleared(target):
    with files.atomic_folder(target) as folder, files.atomic_file(target.parent / "file.txt", "w") as file:
        file.write("whole")
        files.clear_leftovers(target.parent)
        write(target, 7)
        assert folder.is_dir()
        (folder / "manifest.txt").write_text("8", encoding="utf-8")
    assert (target.parent / "file.txt").read_text(encoding="utf-8") == "whole"
    assert [path.name for path in target.iterdir()] == ["manifest.txt"]
    assert hidden(target.parent) == []


def test_what_the_dead_left_is_cleared_but_nothing_through_a_link(target, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "dear.txt").write_text("dear", encoding="utf-8")
    parent = target.parent
    (parent / ".txl-partial-dead").mkdir()
    (parent / ".txl-partial-dead" / "big.bin").write_bytes(b"big")
    (parent / ".txl-partial-file").write_bytes(b"half")
    (parent / ".txl-partial-link").symlink_to(elsewhere)
    os.mkfifo(parent / ".txl-partial-pipe")
    write(target, 1)
    assert hidden(parent) == []
    assert (elsewhere / "dear.txt").read_text(encoding="utf-8") == "dear"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_or_a_file_is_not_replaced_by_a_folder(kind, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere, 1)
    target = tmp_path / "target"
    target.symlink_to(elsewhere) if kind == "link" else target.write_bytes(b"dear")
    with pytest.raises(NotADirectoryError, match="remove it"):
        write(target, 2)
    assert version_of(elsewhere) == 1
    assert target.is_symlink() or target.read_bytes() == b"dear"
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("name", [".", "..", "/", "data/..", "x" * 250])
def test_names_that_nothing_can_step_aside_from_are_read_as_they_are(name, target, monkeypatch):
    monkeypatch.chdir(target)
    files.put_back(Path(name))
    assert version_of(target) == 0


def test_subfolders_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def replaced(one, other):
        done.append("replaced")
        replace(one, other)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    target = tmp_path / "new" / "data"
    write(target, 1)
    before, after = done[: done.index("replaced")], done[done.index("replaced") + 1 :]
    names = ["/".join(Path(path).relative_to(tmp_path / "new").parts[1:]) for path in before]
    for inner, outer in [("deep/deeper/two.txt", "deep/deeper"), ("deep/deeper", "deep"), ("deep", ""), ("other", "")]:
        assert names.index(inner) < names.index(outer)
    assert after == [str(tmp_path / "new"), str(tmp_path)]


def test_rights_are_those_of_the_umask_and_nobody_asks_for_it(tmp_path, monkeypatch):
    """To ask for the umask is to set it, for a moment, for all threads."""
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("another thread's file has all rights now"))
        write(tmp_path / "data", 1)
        files.write_text(tmp_path / "text.txt", "text")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "text.txt").stat().st_mode) == 0o640


def test_a_folder_nested_without_end_stops_nobody(tmp_path):
    """Removing it needs more stack than there is: it stays, and everything else goes on."""
    deep = tmp_path / f"{files.TEMPORARY}deep"
    deep.mkdir()
    descriptor = os.open(deep, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    files.write_text(tmp_path / "file.txt", "written")
    assert (tmp_path / "file.txt").read_text(encoding="utf-8") == "written"
    subprocess.run(["rm", "-rf", str(deep)], check=True)
