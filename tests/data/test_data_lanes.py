"""Lanes: the paper's remainder rule, every token once, positions saved to the token, dealt to any number of ranks."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from data_helpers import patient, sentence_split, write_split
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data.feeding.lanes import Lanes, SegmentLengths
from transformer_xl.data.feeding.sentences import SentenceLanes
from transformer_xl.errors import DataError, InputError

SHAPES = st.fixed_dictionaries(
    {
        "own": st.integers(1, 4),
        "world": st.integers(1, 3),
        "segment": st.integers(1, 12),
        "context": st.integers(0, 5),
        "variable": st.booleans(),
        "seed": st.integers(0, 3),
    }
)


def readers(kind, split, shape, *, world=None):
    """One reader per rank."""
    world = world or shape["world"]
    shared = {name: shape[name] for name in ("segment", "context", "variable", "seed")}
    lanes = shape["own"] * shape["world"]
    return [kind(split, lanes=lanes, rank=rank, world=world, **shared) for rank in range(world)]


def epoch_of(ranks):
    """All segments of an epoch, the ranks' lanes put together again."""
    segments = []
    while True:
        parts = [rank.next() for rank in ranks]
        segments.append({name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})
        if ranks[0].at_start:
            return segments


def same(left, right):
    return len(left) == len(right) and all(
        np.array_equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a
    )


@pytest.fixture(scope="module")
def make():
    with tempfile.TemporaryDirectory() as folder:
        names = iter(range(10**9))
        yield lambda tokens, **options: write_split(Path(folder) / str(next(names)), tokens, **options)


@pytest.fixture(scope="module")
def any_split(make):
    """A split of any kind that has at least `lanes` lanes' worth of tokens, by kind and size."""

    def split(kind, lanes, extra):
        if kind is SentenceLanes:
            return sentence_split(make, [1 + (7 * n) % 5 for n in range(lanes + extra)])
        return make(np.arange(2 * lanes + extra) % 251, documents=[0, min(3, lanes)])

    return split


@patient
@given(shape=SHAPES, extra=st.integers(0, 150))
def test_an_epoch_scores_every_token_of_every_lane_once(make, shape, extra):
    lanes = shape["own"] * shape["world"]
    split = make(np.arange(2 * lanes + extra) % 251)
    segments = epoch_of(readers(Lanes, split, shape))
    length = len(split) // lanes
    positions = np.concatenate([segment["positions"] for segment in segments], axis=1)
    expected = np.arange(lanes)[:, None] * length + np.arange(1, length)
    assert np.array_equal(positions, expected)  # lane b of segment s+1 goes on where lane b of segment s ended
    for segment in segments:
        T = segment["targets"].shape[1]
        C = segment["tokens"].shape[1] - T
        assert np.array_equal(segment["targets"], split.tokens[segment["positions"]])
        before = segment["positions"][:, :1] - 1 - C + np.arange(C + T)
        assert np.array_equal(segment["tokens"], split.tokens[before])
        assert shape["context"] >= C
        longest = shape["segment"] + 15 if shape["variable"] else shape["segment"]
        assert 1 <= T <= max(longest, 5)


@patient
@given(shape=SHAPES, lengths=st.lists(st.integers(1, 9), min_size=12, max_size=60), score=st.booleans())
def test_an_epoch_of_sentences_scores_every_word_once(make, shape, lengths, score):
    split = sentence_split(make, lengths)
    lanes = shape["own"] * shape["world"]
    shared = {name: shape[name] for name in ("segment", "context", "variable", "seed")}
    ranks = [
        SentenceLanes(split, lanes=lanes, rank=rank, world=shape["world"], score_boundaries=score, **shared)
        for rank in range(shape["world"])
    ]
    segments = epoch_of(ranks)
    positions = np.concatenate([segment["positions"].ravel() for segment in segments])
    scored = np.sort(positions[positions >= 0])
    begins = split.sentence_starts
    if score:  # all but the first token of each lane
        assert len(scored) == len(split) - lanes
        assert set(range(len(split))) - set(scored.tolist()) <= set(begins.tolist())
    else:
        assert scored.tolist() == [n for n in range(len(split)) if n not in set(begins.tolist())]
    for segment in segments:
        real = segment["positions"] >= 0
        assert np.array_equal(segment["targets"][real], split.tokens[segment["positions"][real]])
        assert (segment["targets"][~real] == -1).all()
        T = segment["targets"].shape[1]
        inside = real & ~np.isin(segment["positions"], begins)
        inputs = segment["tokens"][:, -T:]
        assert np.array_equal(inputs[inside], split.tokens[segment["positions"][inside] - 1])
        assert not segment["document_starts"].any()  # memory runs on over sentences


@patient
@given(kind=st.sampled_from([Lanes, SentenceLanes]), shape=SHAPES, extra=st.integers(0, 80), stop=st.integers(0, 40))
def test_stopping_anywhere_and_going_on_gives_the_same_stream(any_split, kind, shape, extra, stop):
    split = any_split(kind, shape["own"] * shape["world"], extra)
    uninterrupted = readers(kind, split, shape)
    for _ in range(stop):
        for rank in uninterrupted:
            rank.next()
    states = [json.loads(json.dumps(rank.state())) for rank in uninterrupted]
    assert all(state == states[0] for state in states)  # it belongs to no rank
    # ... and may be dealt to another number of ranks.
    continued = readers(kind, split, shape, world=1)
    for rank in continued:
        rank.restore(states[0])
    assert continued[0].epoch == uninterrupted[0].epoch
    assert continued[0].at_start == uninterrupted[0].at_start
    for _ in range(2):
        assert same(epoch_of(uninterrupted), epoch_of(continued))


@patient
@given(kind=st.sampled_from([Lanes, SentenceLanes]), shape=SHAPES, extra=st.integers(0, 80))
def test_any_number_of_ranks_reads_the_same(any_split, kind, shape, extra):
    split = any_split(kind, shape["own"] * shape["world"], extra)
    assert same(epoch_of(readers(kind, split, shape)), epoch_of(readers(kind, split, shape, world=1)))


def test_the_paper_example(make):
    lanes = Lanes(make(range(13)), lanes=3, segment=2)
    first, second = lanes.next(), lanes.next()
    assert first.tokens.tolist() == [[0, 1], [4, 5], [8, 9]]
    assert first.targets.tolist() == [[1, 2], [5, 6], [9, 10]]
    assert second.tokens.tolist() == [[2], [6], [10]]
    assert lanes.segments_per_epoch == 2
    assert lanes.at_start
    assert lanes.epoch == 1
    for array in (first.tokens, first.targets, first.positions, first.document_starts):
        assert array.flags.c_contiguous
    assert (first.tokens.dtype, first.targets.dtype, first.positions.dtype) == (np.int64,) * 3
    assert first.document_starts.dtype == bool


def test_context_is_fed_again(make):
    lanes = Lanes(make(range(10)), lanes=1, segment=3, context=2)
    assert [lanes.next().tokens.tolist() for _ in range(3)] == [[[0, 1, 2]], [[1, 2, 3, 4, 5]], [[4, 5, 6, 7, 8]]]


def test_document_starts_are_marked(make):
    split = make(range(12), documents=[0, 4, 7, 11])
    lanes = Lanes(split, lanes=2, segment=5)
    assert lanes.next().document_starts.tolist() == [
        [True, False, False, False, True],
        [False, True, False, False, False],
    ]


def test_sentences_are_shuffled_by_seed_and_epoch(make):
    split = sentence_split(make, [1] * 40)
    orders = []
    for seed in (0, 0, 1):
        lanes = SentenceLanes(split, lanes=2, segment=200, seed=seed)
        orders += [lanes.next().positions.tolist(), lanes.next().positions.tolist()]
        assert lanes.epoch == 2
    assert orders[0] == orders[2]
    assert orders[1] == orders[3]
    assert orders[0] != orders[1]
    assert orders[0] != orders[4]


def test_variable_lengths_follow_the_paper():
    lengths = SegmentLengths(segment=100, variable=True, seed=1)
    drawn = np.array([lengths.draw() for _ in range(20_000)])
    assert drawn.max() <= 115
    assert drawn.min() >= 5
    assert 0.04 < (drawn < 75).mean() < 0.06
    assert 98.5 < np.median(drawn) < 100.5
    tiny = SegmentLengths(segment=4, variable=True, seed=1)
    assert min(tiny.draw() for _ in range(500)) == 5


def test_what_cannot_be_read_is_refused(make):
    split = make(range(10))
    with pytest.raises(DataError, match="too few for 6 lanes"):
        Lanes(split, lanes=6, segment=2)
    with pytest.raises(InputError, match="rank 0 of 2"):
        Lanes(split, lanes=3, segment=2, world=2)
    for wrong in ({"lanes": 0}, {"segment": 0}, {"context": -1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Lanes(split, **{"lanes": 1, "segment": 1, **wrong})
    with pytest.raises(DataError, match="not made of sentences"):
        SentenceLanes(split, lanes=1, segment=1)
    with pytest.raises(DataError, match="2 sentences, too few"):
        SentenceLanes(sentence_split(make, [1, 1]), lanes=3, segment=1)
    state = Lanes(split, lanes=2, segment=2).state()
    with pytest.raises(DataError, match="lanes 2, this reader has lanes 1"):
        Lanes(split, lanes=1, segment=2).restore(state)
    with pytest.raises(DataError, match="tokens 10, this reader has tokens 9"):
        Lanes(make(range(9)), lanes=2, segment=2).restore(state)


@pytest.mark.parametrize("kind", [Lanes, SentenceLanes])
def test_a_position_where_no_reader_can_stand_is_refused_and_changes_nothing(kind, make):
    lanes = kind(sentence_split(make, [3, 1, 2, 5, 4, 2]), lanes=2, segment=2, variable=True)
    lanes.next()
    state, generator = lanes.state(), lanes.state()["generator"]
    inner = generator["state"]
    wrong = [
        {"offset": -3},
        {"offset": 10**9},
        {"offset": True},
        {"offset": 1.0},
        {"epoch": -1},
        {"epoch": 10**30},
        {"epoch": None},
        {"generator": None},
        {"generator": {**generator, "bit_generator": "MT19937"}},
        {"generator": {**generator, "uinteger": 2**32}},
        {"generator": {**generator, "has_uint32": "no"}},
        {"generator": {**generator, "state": {**inner, "inc": inner["inc"] + 1}}},
        {"generator": {**generator, "state": {**inner, "state": -1}}},
        {"generator": {**generator, "state": {"state": inner["state"]}}},
        {"more": 1},
    ]
    for change in wrong:
        with pytest.raises(DataError, match="the saved position"):
            lanes.restore({**state, **change})
        assert lanes.state() == state
    with pytest.raises(DataError, match="lacks the field epoch"):
        lanes.restore({name: value for name, value in state.items() if name != "epoch"})
    lanes.restore({**state, "epoch": 3, "offset": 2})
    assert lanes.epoch == 3


STRETCHES = st.fixed_dictionaries(
    {
        "lanes": st.sampled_from([1, 2, 4]),
        "segment": st.integers(1, 6),
        "context": st.integers(0, 5),
        "variable": st.booleans(),
        "seed": st.integers(0, 3),
        "stretch": st.integers(1, 4),
    }
)


def spread(lanes, *, epochs):
    """Runs of segments that continue each other, [lanes, targets] positions each."""
    runs, last = [], lanes.epoch + epochs
    while lanes.epoch < last:
        if lanes.at_start:
            runs.append([])
        segment = lanes.next()
        T = segment.targets.shape[1]
        assert np.array_equal(segment.tokens[:, -T:], lanes.split.tokens[segment.positions - 1])
        assert segment.tokens.shape[1] - T <= sum(part.shape[1] for part in runs[-1])  # context is of the same stretch
        runs[-1].append(segment.positions)
    return [np.concatenate(parts, axis=1) for parts in runs]


@patient
@given(shape=STRETCHES, length=st.integers(30, 400))
def test_stretches_are_read_straight_on_and_no_token_twice(make, shape, length):
    lanes = Lanes(make(range(length)), **shape)
    runs = spread(lanes, epochs=1)
    targets = np.concatenate([run.reshape(-1) for run in runs])
    assert len(np.unique(targets)) == len(targets)
    for run in runs:
        assert (np.diff(run, axis=1) == 1).all()
    span, stretches = shape["stretch"] * shape["segment"], length // (shape["stretch"] * shape["segment"]) - 1
    if stretches >= shape["lanes"]:
        assert {run.shape[1] for run in runs} == {span}
        assert len(targets) == stretches // shape["lanes"] * shape["lanes"] * span
        assert lanes.segments_per_epoch in (None, len(runs) * shape["stretch"])
    else:  # too short: each lane once through its own part
        assert [run.shape for run in runs] == [(shape["lanes"], length // shape["lanes"] - 1)]


def test_a_small_share_of_an_epoch_is_spread_over_the_split(make):
    lanes = Lanes(make(np.arange(10_000) % 250), lanes=4, segment=5, stretch=4, seed=1)
    begins = np.concatenate([lanes.next().positions[:, 0] for _ in range(40)])
    assert begins.min() < 1_000
    assert begins.max() > 9_000
    epochs = [np.sort(np.concatenate([run[:, 0] for run in spread(lanes, epochs=1)])) for _ in range(2)]
    assert not np.array_equal(*epochs)  # other borders


@patient
@given(shape=STRETCHES, length=st.integers(30, 400), stop=st.integers(0, 60), world=st.sampled_from([1, 2]))
def test_stretches_go_on_where_they_stopped_with_any_number_of_ranks(make, shape, length, stop, world):
    split = make(range(length))
    if shape["lanes"] % world:
        return
    uninterrupted = Lanes(split, **shape)
    for _ in range(stop):
        uninterrupted.next()
    continued = [Lanes(split, rank=rank, world=world, **shape) for rank in range(world)]
    for rank in continued:
        rank.restore(json.loads(json.dumps(uninterrupted.state())))
    for _ in range(20):
        expected, found = uninterrupted.next(), [rank.next() for rank in continued]
        for name in vars(expected):
            assert np.array_equal(getattr(expected, name), np.concatenate([getattr(part, name) for part in found]))


def test_a_position_of_other_stretches_is_refused(make):
    split = make(range(200))
    saved = Lanes(split, lanes=2, segment=4, stretch=2, seed=1).state()
    for other in ({}, {"stretch": 3, "seed": 1}, {"stretch": 2, "seed": 2}):
        with pytest.raises(DataError, match="saved position"):
            Lanes(split, lanes=2, segment=4, **other).restore(saved)
    with pytest.raises(DataError, match="offset"):
        Lanes(split, lanes=2, segment=4, stretch=2, seed=1).restore({**saved, "offset": 12 * 8})
