"""A state of adaptation at rest: goes on to the bit, and is refused wherever it is not what this model and these settings make."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from test_reading_and_learning import WAYS, reader_of, sizes

from small_models import build, random_tokens
from tensor_mutations import mutated_safetensors, mutated_tensors, parse, serialise
from transformer_xl.adaptation import AdaptiveReader, Statistics
from transformer_xl.adaptation.statistics import read_statistics, write_statistics
from transformer_xl.checkpoint.adapter_file import fingerprint
from transformer_xl.config import AdaptationConfig
from transformer_xl.errors import CheckpointError
from transformer_xl.tensor_files import write_tensors


@pytest.fixture(scope="module")
def model():
    return build()


def restored(model, path, how):
    return AdaptiveReader.restore(model, path, how, statistics=sizes(model) if how.rule == "rms" else None)


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_to_the_bit_from_anywhere(model, way, tmp_path):
    tokens, how = random_tokens(model, lanes=2, length=23), WAYS[way]
    for read in (0, 1, 6, 14):
        reader = reader_of(model, how, lanes=2)
        if read:
            reader.score(tokens[:, :read])
        reader.save(tmp_path / "state")
        again = restored(model, tmp_path / "state", how)
        assert again.lanes == 2
        expected, found = reader.score(tokens[:, read:]), again.score(tokens[:, read:])
        assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))
        reader.save(tmp_path / "one")
        again.save(tmp_path / "other")
        one, other = load_file(tmp_path / "one"), load_file(tmp_path / "other")
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one if not name.endswith(".reader"))


def test_what_the_model_wrote_is_still_known_as_its_own(model, tmp_path):
    tokens, how = random_tokens(model, lanes=1, length=23), WAYS["sgd"]
    reader = reader_of(model, how)
    reader.score(tokens[:, :7])
    reader.score(tokens[:, 7:9], own=True)
    reader.save(tmp_path / "state")
    assert load_file(tmp_path / "state")["0.given"].tolist() == [True, True, False, False]
    again = restored(model, tmp_path / "state", how)
    assert torch.equal(again.score(tokens[:, 9:]), reader.score(tokens[:, 9:]))
    assert all(map(torch.equal, again.lane(0).weights, reader.lane(0).weights))


def test_it_belongs_to_a_model_and_to_settings(model, tmp_path):
    how, path = WAYS["rms"], tmp_path / "state"
    reader_of(model, how).save(path)
    with pytest.raises(CheckpointError, match="another model"):
        restored(build(seed=7), path, how)
    with pytest.raises(CheckpointError, match=r"adaptation\.rate 0\.02, not 0\.5"):
        restored(model, path, AdaptationConfig(**{**vars(how), "rate": 0.5}))
    other = Statistics(segment=5, tokens=1, rank=0, sizes={name: size + 1 for name, size in sizes(model).sizes.items()})
    with pytest.raises(CheckpointError, match="other sizes of gradients"):
        AdaptiveReader.restore(model, path, how, statistics=other)
    with pytest.raises(CheckpointError, match="does not exist"):
        restored(model, tmp_path / "nothing", how)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("read", torch.tensor([-1]), "no number of tokens"),
        ("read", torch.tensor([2**62]), "no number of tokens"),
        ("read", torch.tensor([2**52]), "asks for"),
        ("read", torch.tensor([15]), "asks for"),
        ("read", torch.tensor(14), "does not say"),
        ("0.pending", torch.tensor([13, 0, 0, 0]), "outside the vocabulary"),
        ("0.pending", torch.tensor([-1, 0, 0, 0]), "outside the vocabulary"),
        ("0.memory.valid", torch.tensor([5]), "cannot be"),
        ("0.memory.valid", torch.tensor([7]), "must be from 0"),
        ("0.memory.starts_full", torch.tensor(True), "cannot be"),
        ("0.memory.layer_0", torch.full((1, 6, 8), float("nan"), dtype=torch.float64), "not finite"),
        ("0.cache.next", torch.tensor([0] * 6 + [13]), "outside the vocabulary"),
        ("0.cache.start", torch.tensor(-5), "outside the vocabulary"),
        ("0.weights.vocabulary.bias_V", torch.full((13,), float("inf"), dtype=torch.float64), "not finite"),
        ("0.weights.vocabulary.bias_V", torch.zeros(13), "float32 where float64"),
        ("1.pending", torch.zeros(4, dtype=torch.int64), "does not know"),
    ],
)
def test_what_cannot_be_is_refused_by_name(model, tmp_path, name, value, message):
    """With a checksum that is right: whoever wrote it, wrote it so."""
    path, reader = tmp_path / "state", reader_of(model, WAYS["both"])
    reader.score(random_tokens(model, lanes=1, length=14))
    reader.save(path)
    restored(model, path, WAYS["both"])
    tensors, about = load_file(path), reader._about()
    write_tensors(path, {**tensors, name: value}, metadata=about)
    with pytest.raises(CheckpointError, match=message):
        restored(model, path, WAYS["both"])


def test_lanes_are_counted_before_anything_is_made_of_them(model, tmp_path, monkeypatch):
    """A file of a few kilobytes may say that it has thousands."""
    path, how = tmp_path / "state", WAYS["cache"]
    reader_of(model, how, lanes=2).save(path)
    assert AdaptiveReader.restore(model, path, how, lanes=2).lanes == 2
    monkeypatch.setattr(AdaptiveReader, "_wanted", None)
    with pytest.raises(CheckpointError, match="has 2 lanes where 1 is wanted"):
        AdaptiveReader.restore(model, path, how, lanes=1)
    tensors, about = load_file(path), reader_of(model, how)._about()
    write_tensors(path, {**tensors, "read": torch.zeros(6000, dtype=torch.int64)}, metadata=about)
    with pytest.raises(CheckpointError, match="does not say"):
        AdaptiveReader.restore(model, path, how)


def test_a_reader_that_says_something_else_than_its_lane(model, tmp_path):
    path, how = tmp_path / "state", WAYS["cache"]
    reader = reader_of(model, how)
    reader.score(random_tokens(model, lanes=1, length=14))
    reader.save(path)
    tensors, about = load_file(path), reader._about()
    short = reader_of(model, how)
    short.score(random_tokens(model, lanes=1, length=9))
    short.save(tmp_path / "short")
    saved = load_file(tmp_path / "short")["0.reader"]
    write_tensors(path, {**tensors, "0.reader": saved}, metadata=about)
    with pytest.raises(CheckpointError, match="has read 9 tokens, and the lane 14"):
        restored(model, path, how)
    write_tensors(path, {**tensors, "0.reader": saved[:40]}, metadata=about)
    with pytest.raises(CheckpointError, match="its reader cannot be read"):
        restored(model, path, how)
    write_tensors(path, {**tensors, "0.last": torch.tensor(99)}, metadata=about)
    with pytest.raises(CheckpointError, match="outside the vocabulary"):
        restored(model, path, how)


@pytest.mark.parametrize("way", ["both", "cache"])
def test_files_changed_by_chance_are_refused_or_as_good(model, tmp_path, way):
    """Never another error than ours, and never numbers that are none."""
    path, reader = tmp_path / "state", reader_of(model, WAYS[way])
    tokens = random_tokens(model, lanes=1, length=14)
    reader.score(tokens)
    reader.save(path)
    good, chance = path.read_bytes(), random.Random(24)
    tensors, metadata = parse(good)
    metadata.pop("sha256")  # so that not all of it is found by its checksum
    refused = 0
    for number in range(60):
        bad = mutated_safetensors(good, chance) if number % 3 else serialise(mutated_tensors(tensors, chance), metadata)
        path.write_bytes(bad)
        try:
            found = restored(model, path, WAYS[way]).score(tokens)
        except CheckpointError:
            refused += 1
        else:
            assert not bool(found.isnan().any())
    assert refused > 40


def test_sizes_of_gradients_at_rest(model, tmp_path):
    path, base = tmp_path / "sizes", fingerprint(model.state_dict())
    float32 = {name: size.float() for name, size in sizes(model).sizes.items()}
    ours = Statistics(segment=5, tokens=100, rank=0, sizes=float32)
    write_statistics(path, ours, base=base)
    found = read_statistics(path, model=model, base=base)
    assert found.fingerprint == ours.fingerprint
    assert (found.segment, found.tokens, found.rank) == (5, 100, 0)
    with pytest.raises(CheckpointError, match="other weights"):
        read_statistics(path, model=model, base="0")
    name = next(iter(float32))
    for change, message in (
        ({name: -float32[name]}, "below 0"),
        ({each: 0 * size for each, size in float32.items()}, "no gradient that is not 0"),
        ({name: float32[name].double()}, "float64 where float32"),
        ({"x": torch.zeros(1)}, "does not know"),
    ):
        write_statistics(path, Statistics(segment=5, tokens=100, rank=0, sizes={**float32, **change}), base=base)
        with pytest.raises(CheckpointError, match=message):
            read_statistics(path, model=model, base=base)
    write_statistics(path, Statistics(segment=5, tokens=100, rank=99, sizes=float32), base=base)
    with pytest.raises(CheckpointError, match="rank 99"):
        read_statistics(path, model=model, base=base)
    told = json.dumps({"no": "sizes"})
    write_tensors(path, float32, metadata={"kind": told})
    with pytest.raises(CheckpointError, match="holds no sizes"):
        read_statistics(path, model=model, base=base)
