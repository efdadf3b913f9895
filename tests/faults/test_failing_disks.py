"""R4: a disk that is full, read-only or broken at any write: the last good checkpoint stays, the exit is not 0, and the sentence names a path."""

import errno
import json
import os
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder, load_checkpoint
from transformer_xl.cli import main
from transformer_xl.files import TEMPORARY

ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "broken": errno.EIO}
pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module")
def ten_steps(byte_store, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("disks") / "run"
    assert main(words(folder, byte_store.folder, steps=10)) == 0
    return folder


def words(folder: Path, data: Path, *, steps: int) -> list[str]:
    config = replace(SMALL, training=replace(SMALL.training, steps=steps))
    file = folder.parent / f"{folder.name}-{steps}.json"
    file.write_text(json.dumps(asdict(config)))
    return ["train", str(file), "--data", str(data), "--run", str(folder)]


def failing(monkeypatch, *, number: int, error: int) -> list[str]:
    """The `number`-th call that puts something on the disk fails; what was asked of it is remembered."""
    asked: list[str] = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)

        def counted(*arguments, call=call, name=name, **options):
            asked.append(name)
            if len(asked) == number:
                path = arguments[0] if isinstance(arguments[0], str | os.PathLike) else None
                raise OSError(error, os.strerror(error), *([str(path)] if path else []))
            return call(*arguments, **options)

        monkeypatch.setattr(os, name, counted)
    return asked


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("number", [2, 5, 8, 11, 14, 17, 20, 23, 26, 29])
def test_a_write_that_fails_loses_nothing(kind, number, ten_steps, byte_store, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    shutil.copytree(ten_steps, folder)
    command = words(folder, byte_store.folder, steps=20)
    good = RunFolder(folder).checkpoint_at(10)
    before = {path: path.read_bytes() for path in good.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        asked = failing(patch, number=number, error=ERRORS[kind])
        code = main(command)
    assert len(asked) >= number, "the command ended before so many writes"
    said = capsys.readouterr().err
    assert code != 0
    last = said.strip().splitlines()[-1]
    assert last.startswith("txl: ")
    assert str(tmp_path) in last
    assert "Traceback" not in said
    if good.exists():  # the newest two are kept: it goes once step 20 stands whole
        assert {path: path.read_bytes() for path in good.rglob("*") if path.is_file()} == before
    load_checkpoint(folder)
    assert not list(RunFolder(folder).checkpoints.glob(f"{TEMPORARY}*"))
    assert main(command) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root")
def test_a_disk_that_is_really_full(byte_store, tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        command = words(disk / "run", byte_store.folder, steps=10)
        codes = [main(command)]
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert codes == [2]
        assert said.startswith("txl: ")
        assert "No space left" in said
        assert str(disk) in said
        assert not list((disk / "run" / "checkpoints").glob(f"{TEMPORARY}*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
