"""A link or a pipe planted in a run, a checkpoint or a store: nothing is written through it, nothing waits for it, and one sentence names it."""

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.cli import main

pytestmark = [pytest.mark.usefixtures("without_pictures"), pytest.mark.timeout(60)]

FILES = ("lock", "metrics.jsonl", "config.json", "environment.json", "README.md", "checkpoints/best.json")
FOLDERS = ("checkpoints", "samples", "figures", "evaluations", "tensorboard")


@pytest.fixture
def run(trained_run, tmp_path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


@pytest.fixture
def victim(tmp_path) -> Path:
    """A folder of somebody's with a file in it."""
    folder = tmp_path / "victim"
    (folder / "below").mkdir(parents=True)
    (folder / "dear.txt").write_text("dear", encoding="utf-8")
    (folder / "below" / "dear.txt").write_text("dear", encoding="utf-8")
    return folder


def unharmed(victim: Path) -> bool:
    found = {str(path.relative_to(victim)): path.read_bytes() for path in victim.rglob("*") if path.is_file()}
    return found == {"dear.txt": b"dear", "below/dear.txt": b"dear"}


def plant(place: Path, target: Path | None) -> None:
    """A link to `target`; None: a pipe that nobody reads."""
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    if target is None:
        os.mkfifo(place)
    else:
        place.symlink_to(target)


def go_on(run: Path, data: Path, *, steps: int = 22) -> int:
    config = run.parent / "config.json"
    config.write_text(
        json.dumps(asdict(replace(SMALL, training=replace(SMALL.training, steps=steps)))), encoding="utf-8"
    )
    return main(["train", str(config), "--data", str(data), "--run", str(run)])


def one_sentence(capsys, *, naming: Path) -> None:
    said = capsys.readouterr().err
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"txl: {naming}")
    assert "remove it" in last
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_run_is_written_through_a_link(name, kind, run, victim, byte_store, capsys):
    plant(run / name, victim / "dear.txt" if kind == "link" else None)
    assert go_on(run, byte_store.folder) == 2
    one_sentence(capsys, naming=run / name)
    assert unharmed(victim)


@pytest.mark.parametrize("name", FOLDERS)
def test_no_folder_of_a_run_is_written_through_a_link(name, run, victim, byte_store, capsys):
    plant(run / name, victim)
    assert go_on(run, byte_store.folder) == 2
    one_sentence(capsys, naming=run / name)
    assert unharmed(victim)


def test_nor_is_a_sample_or_a_result(run, victim, byte_store, capsys):
    """Neither through the link nor in its place: it may be somebody's only way to what it names."""
    sample, result = (
        run / "samples" / "step-00000022.txt",
        run / "evaluations" / "valid-exact-memory-12-segment-12.json",
    )
    for place in (sample, result):
        place.parent.mkdir(exist_ok=True)
        plant(place, victim / "dear.txt")
    assert main(["evaluate", str(run), "--split", "valid"]) == 2
    one_sentence(capsys, naming=result)
    result.unlink()
    assert go_on(run, byte_store.folder) == 2
    one_sentence(capsys, naming=sample)
    assert sample.is_symlink()
    assert unharmed(victim)


@pytest.mark.parametrize("command", ["evaluate", "attention"])
def test_nor_are_results_in_a_folder_elsewhere(command, run, victim, capsys):
    place = run / ("evaluations" if command == "evaluate" else "figures/attention-valid")
    place.parent.mkdir(exist_ok=True)
    plant(place, victim)
    assert main([command, str(run), "--split", "valid", "--tokens", "100"]) == 2
    one_sentence(capsys, naming=place)
    assert unharmed(victim)


@pytest.mark.parametrize("name", ["step-00000022", "step-00000001", ".txl-partial-planted", ".txl-aside-step-00000022"])
def test_no_checkpoint_is_written_over_or_removed_through_a_link(name, run, victim, byte_store, capsys):
    plant(run / "checkpoints" / name, victim)
    assert go_on(run, byte_store.folder) == 2
    one_sentence(capsys, naming=run / "checkpoints" / name)
    assert unharmed(victim)


def test_of_a_link_among_old_checkpoints_only_the_link_goes(run, victim):
    plant(run / "checkpoints" / "step-00000001", victim)
    RunFolder(run).prune(keep=2)
    assert RunFolder(run).steps() == [10, 20]
    assert unharmed(victim)


def test_a_link_to_a_whole_run_works_as_the_run_does(run, byte_store, capsys):
    best = run.parent / "best"
    best.symlink_to(run)
    assert main(["evaluate", str(best), "--split", "valid"]) == 0
    assert main(["generate", str(best), "--tokens", "3"]) == 0
    assert go_on(best, byte_store.folder) == 0
    assert best.is_symlink()
    assert RunFolder(run).steps()[-1] == 22


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "checksums.json", "tokenizer/tokenizer.json", "added.txt", "tokenizer"]
)
def test_a_checkpoint_has_plain_files_only(name, kind, run, tmp_path, capsys):
    for step in RunFolder(run).steps():
        place = RunFolder(run).checkpoint_at(step) / name
        copy = tmp_path / f"copy-{step}"
        if place.is_dir():
            shutil.copytree(place, copy)
        elif place.exists():
            shutil.copy(place, copy)  # so that only the link is wrong
        else:
            copy.write_bytes(b"")
        plant(place, {"link": copy, "link to nothing": tmp_path / "nothing", "pipe": None}[kind])
    assert main(["generate", str(run), "--tokens", "3"]) == 2
    said = capsys.readouterr().err
    assert f"{name} is a link or a special file" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["manifest.json", "train.tokens.bin", "tokenizer.json", "valid.documents.bin"])
def test_a_store_has_no_special_files_but_may_have_links(name, byte_store, tmp_path, capsys):
    """Nothing in a store is ever written in place, and large files are often links to where another tool keeps them."""
    store = Path(shutil.copytree(byte_store.folder, tmp_path / "store"))
    plant(store / name, byte_store.folder / name)
    assert main(["data", str(store)]) == 0
    plant(store / name, None)
    assert main(["data", str(store)]) == 2
    assert f"{store / name} is a special file" in capsys.readouterr().err


def test_a_manifest_names_files_of_its_own_folder_only(byte_store, tmp_path, capsys):
    store = Path(shutil.copytree(byte_store.folder, tmp_path / "store"))
    manifest = json.loads((store / "manifest.json").read_text(encoding="utf-8"))
    manifest["splits"][0]["name"] = "../elsewhere/train"
    for file in manifest["splits"][0]["files"]:
        file["name"] = file["name"].replace("train", "../elsewhere/train", 1)
    (store / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert main(["data", str(store)]) == 2
    assert "is no name of a file in it" in capsys.readouterr().err


def test_a_store_that_is_a_link_to_a_larger_disk_stays_there(tmp_path):
    text, disk, out = tmp_path / "text.txt", tmp_path / "disk", tmp_path / "data"
    text.write_text("some words and some more\n" * 200, encoding="utf-8")
    out.symlink_to(disk)
    for _ in range(2):
        assert main(["prepare", str(text), "--tokenizer", "byte", "--out", str(out)]) == 0
    assert out.is_symlink()
    assert (disk / "manifest.json").is_file()
