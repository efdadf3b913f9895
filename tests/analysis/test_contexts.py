"""Losses by context against brute force: a fresh forward on exactly the c tokens before each token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from small_models import build
from transformer_xl.analysis import contexts
from transformer_xl.analysis.contexts import Stretch, context_losses, farthest_seen, make_stretch
from transformer_xl.config import EvaluationConfig, ModelConfig, RecurrentConfig, TrainingConfig
from transformer_xl.errors import InputError
from transformer_xl.inference import cache, engine, reader
from transformer_xl.model import Recurrent

TRAINING = TrainingConfig(segment=7, context=4)
WINDOW = 11
STRETCH = Stretch(lengths=(3, 8, 13, 18, 23), tokens=29)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So small that every reading is cut, its memory is moved, and the last block is not full."""
    monkeypatch.setattr(cache, "ROOM", 7)
    monkeypatch.setattr(reader, "CHUNK", 5)
    monkeypatch.setattr(reader, "LEAST_CHUNK", 3)
    monkeypatch.setattr(contexts, "MOST_LANES", 4)
    monkeypatch.setattr(contexts, "WINDOW_TOKENS_AT_ONCE", 60)


@pytest.fixture
def split(byte_store):
    return byte_store.split("test")


def evaluation_of(model):
    config = model.config
    return EvaluationConfig(memory=config.memory, clamp_len=config.clamp_len, same_length=config.same_length)


@torch.no_grad()
def brute_force(model, split, *, length, place, window=None):
    """One token's loss from one fresh forward; every token of it sees the last M."""
    if model.config.memory and not model.config.same_length:
        model.config = replace(model.config, same_length=True, same_length_keys="memory+1")
    seen = length if window is None else min(length, window)
    tokens = torch.from_numpy(split.tokens[place - seen : place + 1].astype(np.int64))[None]
    return model(tokens[:, :-1], targets_BT=tokens[:, -1:]).loss_BT.item()


VARIANTS = {
    "relative": {"memory": 6},
    "relative, one layer, which sees less than the longest context": {"memory": 9, "n_layer": 1},
    "relative, memory longer than all contexts": {"memory": 40},
    "relative, clamped": {"memory": 6, "clamp_len": 2, "norm": "pre"},
    "shaw": {"memory": 6, "encoding": "shaw"},
    "shaw with biases": {"memory": 6, "encoding": "shaw_biased"},
    "same length": {"memory": 5, "same_length": True},
    "same length, one key more": {"memory": 5, "same_length": True, "same_length_keys": "memory+1"},
    "zeros": {"memory": 6, "initial_memory": "zeros"},
    "zeros, same length": {"memory": 9, "initial_memory": "zeros", "same_length": True, "n_layer": 1},
    "adaptive softmax": {"memory": 6, "cutoffs": (40, 110), "div_val": 2},
    "relative without memory": {"memory": 0},
    "shaw without memory": {"memory": 0, "encoding": "shaw"},
    "absolute": {"memory": 0, "encoding": "absolute"},
    "per layer": {"memory": 0, "encoding": "per_layer", "learned_positions": WINDOW},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_loss_is_that_of_a_fresh_reading_of_exactly_so_many_tokens(name, split):
    model = build(vocabulary=256, **VARIANTS[name])
    found = context_losses(model, split, stretch=STRETCH, evaluation=evaluation_of(model), training=TRAINING).losses
    assert sorted(found) == list(STRETCH.lengths)
    window = None if model.config.memory else WINDOW
    for length, losses in found.items():
        assert losses.dtype == np.float64
        expected = [
            brute_force(model, split, length=length, place=23 + place, window=window) for place in range(STRETCH.tokens)
        ]
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("cell", "window"), [("lstm", 1), ("qrnn", 1), ("qrnn", 2)])
def test_a_recurrent_state_starts_fresh_exactly_so_many_tokens_before(cell, window, split):
    torch.manual_seed(0)
    config = RecurrentConfig(vocabulary=256, cell=cell, window=window, n_layer=2, d_model=8, d_hidden=10, init_std=0.5)
    model = Recurrent(config).double().eval()
    found = context_losses(model, split, stretch=STRETCH, evaluation=EvaluationConfig(), training=TRAINING)
    assert found.about["sees_at_most"] is None
    for length, losses in found.losses.items():
        expected = [brute_force(model, split, length=length, place=23 + place) for place in range(STRETCH.tokens)]
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-10)


def test_contexts_matter_in_these_tests(split):
    model = build(vocabulary=256, memory=6)
    found = context_losses(model, split, stretch=STRETCH, evaluation=evaluation_of(model), training=TRAINING).losses
    for shorter, longer in ((3, 8), (8, 13)):
        assert np.abs(found[shorter] - found[longer]).max() > 1e-3


def test_nothing_is_read_that_cannot_be_seen(split, monkeypatch):
    """Two layers with memory 6 see 13 tokens; each start reads no more, and contexts beyond are the same to the bit."""
    model = build(vocabulary=256, memory=6)
    read = []
    original = engine.Engine.read
    monkeypatch.setattr(
        engine.Engine, "read", lambda self, tokens: read.append(tokens.numel()) or original(self, tokens)
    )
    found = context_losses(model, split, stretch=STRETCH, evaluation=evaluation_of(model), training=TRAINING)
    assert found.about["sees_at_most"] == 13
    np.testing.assert_array_equal(found.losses[13], found.losses[23])
    starts = STRETCH.tokens + 13 - 3
    assert sum(read) <= starts * 13


def test_evaluation_lengths_are_used_and_the_model_is_left_as_it_was(split):
    model = build(vocabulary=256, memory=2)
    before = model.config
    longer = EvaluationConfig(memory=6)
    found = context_losses(model, split, stretch=STRETCH, evaluation=longer, training=TRAINING).losses
    assert model.config == before
    model.set_lengths(memory=6)
    again = context_losses(model, split, stretch=STRETCH, evaluation=longer, training=TRAINING).losses
    np.testing.assert_array_equal(found[18], again[18])


def test_farthest_seen():
    model, training = ModelConfig(vocabulary=5, n_layer=3), TrainingConfig(segment=50, context=50)
    assert farthest_seen(model, evaluation=EvaluationConfig(memory=20), training=training) == 61
    assert farthest_seen(model, evaluation=EvaluationConfig(), training=training) == 100


def test_lanes_stay_within_their_memory():
    small, large = ModelConfig(vocabulary=5), ModelConfig(vocabulary=5, n_layer=24, d_head=128, n_head=16)
    assert contexts.lanes_for(small, evaluation=EvaluationConfig(memory=64), longest=500) == 4
    assert contexts.lanes_for(large, evaluation=EvaluationConfig(memory=3800), longest=500) == 1
    assert contexts.lanes_for(small, evaluation=EvaluationConfig(), longest=25) == 2


# --- interrupted


class Killed(BaseException):
    pass


def kill_after(monkeypatch, blocks):
    """The reading ends after so many blocks, as if the machine had gone; every block is kept at once."""
    original, seen = contexts._reader, []

    def reader(model, *, lanes):
        hidden = original(model, lanes=lanes)

        def counted(tokens_BT, lengths):
            seen.append(len(tokens_BT))
            if blocks is not None and len(seen) > blocks:
                raise Killed
            return hidden(tokens_BT, lengths)

        return counted

    monkeypatch.setattr(contexts, "SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(contexts, "_reader", reader)
    return seen


@pytest.mark.parametrize("name", ["relative", "absolute", "zeros"])
def test_a_killed_reading_goes_on_and_gives_the_same_bits(name, split, tmp_path, monkeypatch):
    model = build(vocabulary=256, **VARIANTS[name]).float()

    def read(keep):
        return context_losses(
            model, split, stretch=STRETCH, evaluation=evaluation_of(model), training=TRAINING, keep=keep
        ).losses

    whole, keep = read(tmp_path / "whole.npz"), tmp_path / "killed.npz"
    with monkeypatch.context() as patch:
        kill_after(patch, 3)
        with pytest.raises(Killed):
            read(keep)
    assert not keep.exists()
    assert (tmp_path / "killed.partial.npz").exists()
    with monkeypatch.context() as patch:
        kill_after(patch, 2)  # and again, from where it was
        with pytest.raises(Killed):
            read(keep)
    seen = kill_after(monkeypatch, None)
    found = read(keep)
    total = -(-(STRETCH.tokens + 23 - 3) // 4)
    assert 0 < len(seen) <= total - 5
    for length in STRETCH.lengths:
        assert found[length].dtype == np.float32
        np.testing.assert_array_equal(found[length], whole[length])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.npz", "whole.npz"]


def test_a_result_is_reused_only_when_made_by_the_same_thing(split, tmp_path, monkeypatch):
    model, keep = build(vocabulary=256, memory=6), tmp_path / "recl-test.npz"
    seen = kill_after(monkeypatch, None)

    def blocks(*, of=split, stretch=STRETCH, memory=6, **made_by):
        seen.clear()
        evaluation = EvaluationConfig(memory=memory)
        context_losses(model, of, stretch=stretch, evaluation=evaluation, training=TRAINING, keep=keep, made_by=made_by)
        return len(seen)

    assert blocks(checkpoint="a", step=1) > 0
    assert blocks(checkpoint="a", step=1) == 0
    assert blocks(checkpoint="b", step=1) > 0
    assert blocks(checkpoint="b", step=1, stretch=replace(STRETCH, tokens=30)) > 0
    assert blocks(checkpoint="b", step=1, stretch=replace(STRETCH, tokens=30)) == 0
    assert blocks(checkpoint="b", step=1, stretch=replace(STRETCH, tokens=30), memory=7) > 0
    changed = np.array(split.tokens)
    changed[30] ^= 1
    other = split.first(len(split) - 1)
    other.tokens = changed[:-1]
    assert blocks(checkpoint="b", step=1, stretch=replace(STRETCH, tokens=30), memory=7, of=other) > 0
    with np.load(keep, allow_pickle=False) as arrays:
        assert set(arrays.files) == {"about", "c3", "c8", "c13", "c18", "c23"}


def test_a_damaged_partial_file_starts_anew(split, tmp_path):
    model, keep = build(vocabulary=256, memory=6), tmp_path / "recl-test.npz"
    (tmp_path / "recl-test.partial.npz").write_bytes(b"PK\x03\x04 half a file")
    keep.write_bytes(b"nothing")
    found = context_losses(
        model, split, stretch=STRETCH, evaluation=evaluation_of(model), training=TRAINING, keep=keep
    ).losses
    fresh = context_losses(model, split, stretch=STRETCH, evaluation=evaluation_of(model), training=TRAINING).losses
    np.testing.assert_array_equal(found[23], fresh[23])


def test_stretches_that_do_not_fit_are_named(split):
    size = len(split)
    assert make_stretch(split, lengths=[5, 10], tokens=None, most=10**9).tokens == size - 10
    assert make_stretch(split, lengths=[5, 10], tokens=None, most=7).tokens == 7
    assert make_stretch(split, lengths=[5, size - 1], tokens=1, most=7).first == size - 1
    with pytest.raises(InputError, match="is longer than test allows"):
        make_stretch(split, lengths=[5, size], tokens=None, most=7)
    with pytest.raises(InputError, match="cannot be scored"):
        make_stretch(split, lengths=[5, 10], tokens=size, most=7)
    with pytest.raises(InputError, match="shows a model nothing"):
        make_stretch(split, lengths=[0, 5], tokens=None, most=7)
