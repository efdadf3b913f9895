"""What a second attacker tried: files that are no files, counts without a limit, manifests that lie. Each is one sentence, and nothing is harmed."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.cli import main
from transformer_xl.files import atomic_file

pytestmark = [pytest.mark.usefixtures("without_pictures"), pytest.mark.timeout(60)]


@pytest.fixture
def run(trained_run, tmp_path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


@pytest.fixture
def data(byte_store, tmp_path) -> Path:
    return Path(shutil.copytree(byte_store.folder, tmp_path / "data"))


def refused(capsys, words: list[object], *parts: str) -> None:
    """Exit 2 with one line on standard error that holds these parts."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("txl: ") and "\n" not in said, said
    for part in parts:
        assert part in said, said


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "folder"])
def test_only_plain_files_are_replaced(kind, tmp_path) -> None:
    place = tmp_path / "out.npy"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(tmp_path / "elsewhere")
        if kind == "link":
            (tmp_path / "elsewhere").write_bytes(b"dear")
    before = place.lstat()
    with pytest.raises(OSError, match="plain file") as caught, atomic_file(place) as file:
        file.write(b"new")
    assert caught.value.filename == str(place)
    assert os.path.samestat(before, place.lstat()) and not list(tmp_path.glob(".txl*"))


def test_per_token_into_a_pipe_is_one_sentence(run, tmp_path, capsys) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(capsys, ["evaluate", run, "--tokens", 30, "--per-token", tmp_path / "pipe"], "pipe", "plain file")
    assert not (tmp_path / "pipe").is_file()


# --- folders that are no runs


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train_words(tmp_path: Path, data: Path, folder: Path) -> list[object]:
    config = tmp_path / "small.json"
    config.write_text(json.dumps(asdict(SMALL)), encoding="utf-8")
    return ["train", config, "--data", data, "--run", folder, "--training.steps", 1]


@pytest.mark.parametrize(
    "files",
    [
        {"README.md": "mine"},
        {"config.json": '{"model_type": "gpt2"}'},
        {"lock": "mine"},
        {"lock": "1", "notes.txt": "mine"},
        {"checkpoints/step-00000010/weights.bin": "mine", "README.md": "mine"},
    ],
)
def test_a_strangers_folder_is_not_trained_into(files, byte_store, tmp_path, capsys) -> None:
    folder = tmp_path / "theirs"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    before = contents(folder)
    refused(capsys, train_words(tmp_path, byte_store.folder, folder), "theirs", "no run")
    assert contents(folder) == before


@pytest.mark.parametrize("left", [(), ("lock",), ("lock", "config.json"), ("config.json", ".txl-partial-1.json")])
def test_a_run_killed_before_its_first_checkpoint_begins_again(left, byte_store, tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    written = {"lock": "4711", "config.json": json.dumps(asdict(SMALL)), ".txl-partial-1.json": "{"}
    for name in left:
        (folder / name).write_text(written[name], encoding="utf-8")
    assert main([str(word) for word in train_words(tmp_path, byte_store.folder, folder)]) == 0
    assert RunFolder(folder).steps() == [1]


# --- names and numbers of checkpoints


def test_a_step_has_one_name(run) -> None:
    here = RunFolder(run)
    assert here.steps() == [10, 20]
    (here.checkpoints / "step-000000000030").mkdir()
    (here.checkpoints / f"step-{'9' * 200}").mkdir()
    (here.checkpoints / "step-0000004\u0661").mkdir()
    assert here.steps() == [10, 20]
    (here.checkpoints / "best.json").write_text('{"step": 20.0}', encoding="utf-8")
    assert here.best_step() is None
    (here.checkpoints / "best.json").write_text('{"step": 20}', encoding="utf-8")
    assert here.best_step() == 20
