"""Checkpoints in shards: four ranks write them, others read them, with real torchrun processes on gloo; and what cannot be is refused by its name."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_run import SMALL
from torchrun import checkpoint_of, launch
from transformer_xl.checkpoint import load_checkpoint, read_training_state
from transformer_xl.checkpoint.folder import verify, write_checksums
from transformer_xl.checkpoint.shards import INDEX, Pieces, row_counts, shard_name, whole_tensors
from transformer_xl.cli import main
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.training.ranks import ALONE

pytestmark = pytest.mark.timeout(900)
CONFIG = replace(
    SMALL,
    training=replace(SMALL.training, steps=12, save_every=6, validate_every=0, average="ema", log_every=1),
)
SHARDED = replace(CONFIG, training=replace(CONFIG.training, shards=True))


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "--"]


def run(config, store, folder, *, ranks):
    fsdp = ("--parallel", "fsdp") if ranks > 1 else ()
    launcher = torchrun(ranks) if ranks > 1 else [sys.executable, "-m"]
    answer = launch(config, store, folder, *fsdp, launcher=launcher)
    assert answer.returncode == 0, answer.stderr
    return answer


@pytest.fixture(scope="module")
def four(byte_store, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("four") / "run"
    run(SHARDED, byte_store, folder, ranks=4)
    return folder


@pytest.fixture(scope="module")
def whole(byte_store, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(CONFIG, byte_store, folder, ranks=4)
    return folder


def test_shards_are_the_whole_to_the_bit(four, whole, tmp_path):
    checkpoint = checkpoint_of(four)
    verify(checkpoint)
    names = {path.name for path in checkpoint.iterdir()}
    assert {shard_name(part, number, 4) for part in ("model", "training") for number in range(4)} <= names
    assert INDEX in names
    assert "model.safetensors" not in names
    assert not [name for name in names if name.startswith("rank-")]
    weights = load_file(checkpoint_of(whole) / "model.safetensors")
    found = load_checkpoint(four).model.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    state, expected = read_training_state(checkpoint), read_training_state(checkpoint_of(whole))
    read = whole_tensors(state.tensors)
    assert read.keys() == expected.tensors.keys()
    assert all(torch.equal(read[name], expected.tensors[name]) for name in read)
    # The largest file has a fourth, and what belongs to lanes.
    sizes = [(checkpoint / shard_name("model", number, 4)).stat().st_size for number in range(4)]
    assert max(sizes) < 0.5 * (checkpoint_of(whole) / "model.safetensors").stat().st_size
    # One file, for whoever it is given to.
    assert main(["export", str(four), "--to", "safetensors", "--out", str(tmp_path / "one")]) == 0
    exported = load_file(tmp_path / "one" / "model.safetensors")
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


@pytest.mark.parametrize("ranks", [2, 1])
def test_another_number_of_ranks_goes_on_from_them(ranks, four, byte_store, tmp_path):
    """Without dropout nothing is drawn, so it goes on as from one file: shards or whole, the losses are the same."""
    longer = {"steps": 18, "schedule": "constant"}
    losses = []
    for name in ("shards", "file"):
        folder = tmp_path / name
        shutil.copytree(four, folder)
        if name == "file":
            checkpoint = checkpoint_of(folder)
            assert main(["export", str(folder), "--to", "safetensors", "--out", str(tmp_path / "one")]) == 0
            state = whole_tensors(read_training_state(checkpoint).tensors)
            for path in [*checkpoint.glob("*-of-*"), checkpoint / INDEX, checkpoint / "checksums.json"]:
                path.unlink()
            shutil.copy(tmp_path / "one" / "model.safetensors", checkpoint / "model.safetensors")
            save_file({key: value.clone() for key, value in state.items()}, checkpoint / "training.safetensors")
            write_checksums(checkpoint)
        shards = ranks > 1 and name == "shards"
        config = replace(CONFIG, training=replace(CONFIG.training, shards=shards, **longer))
        answer = run(config, byte_store, folder, ranks=ranks)
        assert "going on from step 12" in answer.stderr
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss_nats"] for line in lines if line["kind"] == "train"])
        assert load_checkpoint(folder).about.step == 18
    assert len(losses[0]) == 18
    assert losses[0] == losses[1]


def test_rows_are_read_from_whichever_files_have_them():
    whole = torch.arange(70.0).view(10, 7)
    for count in (1, 2, 3, 4, 7, 12):
        counts = row_counts(10, count)
        assert sum(counts) == 10
        assert counts == [len(part) for part in whole.chunk(count)] + [0] * (count - len(whole.chunk(count)))
        pieces = Pieces(tuple(part for part in whole.split(counts) if len(part)), (10, 7), torch.float32)
        assert torch.equal(pieces.whole(), whole)
        for start in range(11):
            for stop in range(start, 11):
                assert torch.equal(pieces.rows(start, stop), whole[start:stop])
        assert float(pieces.min()) == 0


def test_shards_are_for_fsdp(byte_store):
    with pytest.raises(ConfigError, match=r"training\.shards: true is for `parallel=fsdp`"):
        ALONE.check(SHARDED)


def damage(index: dict, how: str) -> None:
    name = next(iter(index["model"]))
    entry = index["model"][name]
    match how:
        case "too many rows":
            entry["rows"][0] += 1
        case "another shape":
            entry["shape"][0] += 1
            entry["rows"][0] += 1
        case "a negative size":
            entry["shape"][0] = -1
        case "a type that is none":
            entry["dtype"] = "pickle"
        case "a field more":
            entry["more"] = 1
        case "too many shards":
            index["count"] = 10**9
        case "one shard less":
            index["count"] = 3
        case "no tensor":
            del index["model"][name]
        case "a tensor more":
            index["model"]["more"] = entry
        case "no part":
            del index["training"]
        case "a true size":
            entry["shape"][0] = True


HOW = ("too many rows", "another shape", "a negative size", "a type that is none", "a field more", "too many shards")
HOW += ("one shard less", "no tensor", "a tensor more", "no part", "a true size")


@pytest.mark.parametrize("how", HOW)
def test_an_index_that_lies_is_refused(how, four, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint_of(four), folder)
    index = json.loads((folder / INDEX).read_text())
    damage(index, how)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"shards.json is damaged \(its checksum is another\)"):
        load_checkpoint(folder)
    (folder / "checksums.json").unlink()
    write_checksums(folder)  # by somebody who wants to be believed
    with pytest.raises(CheckpointError, match=r"shards\.json|safetensors"):
        load_checkpoint(folder)


def test_a_shard_that_is_missing_is_named(four, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint_of(four), folder)
    (folder / shard_name("model", 2, 4)).unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00004\.safetensors is missing"):
        load_checkpoint(folder)
