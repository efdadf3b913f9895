"""R5: the newest checkpoint damaged in any way is noticed, named and passed over for the one before."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.errors import CheckpointError
from transformer_xl.training import train
from transformer_xl.training.resuming import newest_sound_checkpoint

WAYS = ("a bit", "a byte", "cut short", "longer", "empty", "zeros inside", "gone", "another's", "swapped pieces")


@pytest.fixture(scope="module")
def run(byte_store, tmp_path_factory, without_pictures) -> Path:
    """Checkpoints at steps 10 and 20."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    train(SMALL, store=byte_store, folder=folder)
    return folder


def damage(file: Path, other: Path, way: str, chance: random.Random) -> bool:
    """Whether the file is different now."""
    before = data = file.read_bytes()
    place = chance.randrange(len(data))
    match way:
        case "a bit":
            data = data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]
        case "a byte":
            data = data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
        case "cut short":
            data = data[:place]
        case "longer":
            data = data + chance.randbytes(1 + chance.randrange(100))
        case "empty":
            data = b""
        case "zeros inside":
            data = data[:place] + bytes(min(4096, len(data) - place)) + data[place + 4096 :]
        case "gone":
            file.unlink()
            return True
        case "another's":
            data = other.read_bytes()
        case "swapped pieces":
            data = data[place:] + data[:place]
    file.write_bytes(data)
    return data != before


@pytest.mark.parametrize("damages", [90, pytest.param(500, marks=pytest.mark.slow)])
def test_every_damage_is_noticed_and_the_one_before_is_taken(damages, run, tmp_path, capsys):
    chance, done = random.Random(0), 0
    counts = dict.fromkeys(WAYS, 0)
    while done < damages:
        copy = RunFolder(tmp_path / str(done))
        shutil.copytree(run, copy.path)
        newest, before = copy.checkpoint_at(20), copy.checkpoint_at(10)
        file = chance.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
        way = WAYS[done % len(WAYS)]
        if damage(file, before / file.relative_to(newest), way, chance):
            try:
                assert newest_sound_checkpoint(copy) == before
            except AssertionError:
                pytest.fail(f"{way} in {file.name} was not noticed")
            said = capsys.readouterr().err
            assert "passing over a checkpoint" in said
            assert newest.name in said
            counts[way] += 1
            done += 1
        shutil.rmtree(copy.path)
    print(f"{done} damages, all noticed: {counts}")
    assert min(counts.values()) >= damages // len(WAYS) - 1


def test_after_damage_training_goes_on_to_the_same_bits(run, byte_store, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    copy = RunFolder(tmp_path / "run")
    whole = (copy.checkpoint_at(20) / "model.safetensors").read_bytes()
    (copy.checkpoint_at(20) / "training.json").write_text("{}")
    train(SMALL, store=byte_store, folder=copy.path)
    assert "going on from step 10" in capsys.readouterr().err
    assert (copy.checkpoint_at(20) / "model.safetensors").read_bytes() == whole


def test_if_all_are_damaged_nothing_is_begun_anew(run, byte_store, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    copy = RunFolder(tmp_path / "run")
    for step in copy.steps():
        (copy.checkpoint_at(step) / "model.safetensors").write_bytes(b"")
    longer = replace(SMALL, training=replace(SMALL.training, steps=21))
    with pytest.raises(CheckpointError, match="is whole; restore one from a copy"):
        train(longer, store=byte_store, folder=copy.path)
