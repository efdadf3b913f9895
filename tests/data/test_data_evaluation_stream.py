"""Evaluation: each token once, in context, whatever the lanes; and the paper's own rule beside it."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from data_helpers import patient, sentence_split, write_split
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data.feeding.evaluation_stream import EvaluationStream, PaperEvaluation
from transformer_xl.errors import DataError, InputError


@pytest.fixture(scope="module")
def make():
    with tempfile.TemporaryDirectory() as folder:
        names = iter(range(10**9))
        yield lambda tokens, **options: write_split(Path(folder) / str(next(names)), tokens, **options)


@patient
@given(size=st.integers(2, 200), lanes=st.integers(1, 12), segment=st.integers(1, 20), warm_up=st.integers(0, 50))
def test_every_token_after_the_first_is_scored_once(make, size, lanes, segment, warm_up):
    split = make(np.arange(size) % 251, documents=[0, size // 2])
    stream = EvaluationStream(split, lanes=lanes, segment=segment, warm_up=warm_up)
    segments = list(stream)
    assert len(segments) == len(stream)
    positions = np.concatenate([part.positions for part in segments], axis=1)
    assert sorted(positions[positions >= 0].tolist()) == list(range(1, size))
    tokens = np.concatenate([part.tokens for part in segments], axis=1)
    targets = np.concatenate([part.targets for part in segments], axis=1)
    marks = np.concatenate([part.document_starts for part in segments], axis=1)
    for lane in range(lanes):
        scored = np.flatnonzero(positions[lane] >= 0)
        if not len(scored):
            assert not tokens[lane].any()
            continue
        first, last = scored[0], scored[-1]
        begin = positions[lane, first] - 1
        assert np.array_equal(scored, np.arange(first, last + 1))
        # Fed without a gap from the warm-up to the end of the range, at the segment boundaries of a single lane.
        fed = begin - first + np.arange(last + 1)
        assert fed[0] % segment == 0
        assert first >= min(warm_up, begin)
        assert np.array_equal(tokens[lane, : last + 1], split.tokens[fed])
        assert np.array_equal(targets[lane, scored], split.tokens[positions[lane, scored]])
        assert np.array_equal(marks[lane, : last + 1], np.isin(fed, split.document_starts))
        assert (targets[lane, :first] == -1).all()
        assert not tokens[lane, last + 1 :].any()
        assert (targets[lane, last + 1 :] == -1).all()
        assert not marks[lane, last + 1 :].any()


def test_two_lanes_by_hand(make):
    stream = EvaluationStream(make(range(9)), lanes=2, segment=2, warm_up=2)
    first, second, third = stream
    assert first.tokens.tolist() == [[0, 1], [2, 3]]
    assert first.targets.tolist() == [[1, 2], [-1, -1]]
    assert second.targets.tolist() == [[3, 4], [5, 6]]
    assert third.tokens.tolist() == [[0, 0], [6, 7]]
    assert third.targets.tolist() == [[-1, -1], [7, 8]]


@patient
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=30), lanes=st.integers(1, 4))
def test_sentence_boundaries_are_scored_only_when_asked(make, lengths, lanes):
    split = sentence_split(make, lengths)
    for score in (False, True):
        stream = EvaluationStream(split, lanes=lanes, segment=5, warm_up=5, score_boundaries=score)
        positions = np.concatenate([part.positions.ravel() for part in stream])
        left_out = set() if score else set(split.sentence_starts.tolist())
        assert sorted(positions[positions >= 0].tolist()) == [n for n in range(1, len(split)) if n not in left_out]


@patient
@given(size=st.integers(20, 200), segment=st.integers(1, 20))
def test_the_paper_drops_the_remainder_and_starts_cold(make, size, segment):
    split = make(np.arange(size) % 251)
    evaluation = PaperEvaluation(split, segment=segment)
    segments = list(evaluation)
    assert len(segments) == len(evaluation)
    assert segments[0].tokens.shape[0] == 10
    positions = np.concatenate([part.positions for part in segments], axis=1)
    column = size // 10
    assert np.array_equal(positions, np.arange(10)[:, None] * column + np.arange(1, column))
    assert len(list(evaluation)) == len(segments)  # it can be read again


def test_what_cannot_be_read_is_refused(make):
    with pytest.raises(DataError, match="nothing to predict"):
        EvaluationStream(make([1]), lanes=1, segment=1, warm_up=0)
    with pytest.raises(DataError, match="too few for 10 lanes"):
        PaperEvaluation(make(range(10)), segment=4)
    with pytest.raises(InputError, match="warm_up is -1"):
        EvaluationStream(make(range(9)), lanes=1, segment=1, warm_up=-1)
