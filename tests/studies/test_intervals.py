"""Intervals over seeds and text: as wide as they should be, and blind to what two rows share."""

import numpy as np
import pytest

from transformer_xl.studies.intervals import BLOCKS, block_means, effect_of


def difference(first, second):
    return second - first


def test_blocks_are_the_text_in_order():
    losses = np.arange(1001, dtype=np.float32)
    losses[0] = np.nan
    means = block_means(losses)
    assert len(means) == BLOCKS
    assert means == sorted(means)
    assert np.mean(means) == pytest.approx(500.5)
    assert block_means(np.array([np.nan, 1.0, 3.0])) == [1.0, 3.0]


def test_the_interval_of_a_mean_is_as_wide_as_theory_says():
    """One seed: only places of the text are drawn, and the mean of K blocks varies by their spread over the root of K."""
    random = np.random.default_rng(0)
    block_1K = random.normal(size=(1, 400))
    found = effect_of(np.zeros((1, 400)), block_1K, difference, paired=False)
    assert found.value == pytest.approx(block_1K.mean())
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * block_1K.std() / 20, rel=0.06)
    assert found.low < found.value < found.high


def test_seeds_widen_it_where_they_differ():
    text_K = np.random.default_rng(0).normal(size=50)
    same, apart = text_K + np.zeros((5, 1)), text_K + np.array([[-1.0], [-0.5], [0.0], [0.5], [1.0]])
    narrow = effect_of(same, same, difference, paired=False)
    assert (narrow.low, narrow.high) == pytest.approx((0, 0), abs=1e-12)  # hard places are hard for both
    wide = effect_of(same, apart, difference, paired=False)
    # The variance of 5 values over 5.
    assert (wide.high - wide.low) / 2 == pytest.approx(1.96 * np.sqrt(0.5 / 5), rel=0.1)
    twins = effect_of(apart, apart - 0.25, difference, paired=True)
    assert (twins.value, twins.low, twins.high) == pytest.approx((-0.25,) * 3)
    assert effect_of(apart, apart - 0.25, difference, paired=False).low < -0.5
