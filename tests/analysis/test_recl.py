"""RECL against a second implementation in plain loops, and on losses whose answer is known beforehand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.analysis.recl import (
    effective_lengths,
    hardest,
    make_group,
    perplexity_gains,
    relative_gains,
)
from transformer_xl.analysis.recl_pictures import draw_recl
from transformer_xl.errors import InputError


def by_the_letter(losses, start, step, ratio, threshold):
    """Appendix C, formula by formula, on lists. Returns the RECL of each model, whether the lengths ended first, and the gains it looked at."""
    models, last = list(losses), max(losses[next(iter(losses))])

    def baseline(c, t):
        return min(losses[model][c][t] for model in models)

    def f(model, c, longer):
        positions = range(len(losses[model][c]))
        ordered = sorted(positions, key=lambda t: (-baseline(c, t), t))
        chosen = ordered[: max(1, round(ratio * len(ordered)))]
        total = 0.0
        for t in chosen:
            total += min(baseline(c, t), losses[model][longer][t])
        return total / len(chosen)

    def g(model, c, longer):
        short = math.exp(f(model, c, c))
        return (short - math.exp(f(model, c, longer))) / short

    answers = {}
    for model in models:
        c, gains = start, []
        while c + step <= last:
            gains.append(g(model, c, c + step))
            if gains[-1] < threshold:
                break
            c += step
        answers[model] = (c, gains[-1] >= threshold, gains)
    return answers


@given(
    seed=st.integers(0, 10**6),
    models=st.integers(1, 4),
    lengths=st.integers(2, 6),
    positions=st.integers(1, 60),
    ratio=st.sampled_from([0.01, 0.1, 0.5, 0.93, 1.0]),
    ties=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_equals_the_formulas_written_as_loops(seed, models, lengths, positions, ratio, ties):
    generator = np.random.default_rng(seed)
    grid = [7 + 5 * place for place in range(lengths)]
    arrays = generator.gamma(2.0, 2.0, (models, lengths, positions))
    arrays -= 0.1 * np.arange(lengths)[:, None] * generator.random((models, 1, positions))
    arrays = (np.round(arrays) if ties else arrays).astype(np.float32)
    losses = {f"m{i}": dict(zip(grid, arrays[i], strict=True)) for i in range(models)}
    group = make_group(losses, lengths=grid)
    found = effective_lengths(group, ratio=ratio, threshold=0.05)
    plain = {name: {c: row.tolist() for c, row in by_length.items()} for name, by_length in losses.items()}
    expected = by_the_letter(plain, 7, 5, ratio, 0.05)
    gains = relative_gains(group, ratio=ratio)
    for number, (name, (length, at_least, looked_at)) in enumerate(expected.items()):
        np.testing.assert_allclose(gains[number, : len(looked_at)], looked_at, rtol=0, atol=1e-12)
        assert (found[name].length, found[name].at_least) == (length, at_least)


def falling(*means, positions=50):
    """Losses that are the same for every token: 10, 20, 30, ... tokens of context give these."""
    return {10 * (place + 1): np.full(positions, mean) for place, mean in enumerate(means)}


@pytest.mark.parametrize(
    ("means", "length", "at_least"),
    [
        ((3.0, 3.0, 2.0, 1.0), 10, False),  # nothing gained at first; what comes later does not count
        ((3.0, 2.5, 2.5, 2.5), 20, False),
        ((3.0, 2.5, 2.2, 2.2), 30, False),
        ((3.0, 2.5, 2.2, 2.0), 40, True),
        ((3.0, 3.0 - 0.0100, 2.0, 1.0), 10, False),  # 1 - exp(-0.0100) is a little less than 0.01
        ((3.0, 3.0 - 0.0101, 3.0 - 0.0101, 1.0), 20, False),
    ],
)
def test_known_answers(means, length, at_least):
    group = make_group({"only": falling(*means)}, lengths=[10, 20, 30, 40])
    for ratio in (0.1, 0.5, 1.0):
        found = effective_lengths(group, ratio=ratio)["only"]
        assert (found.length, found.at_least) == (length, at_least)
        assert str(found) == (f">={length}" if at_least else str(length))


def test_a_better_model_raises_everybodys_bar():
    """Alone, the weak model gains with every step; beside one that knew all that from the shortest context, it gains nothing."""
    weak, strong = falling(4.0, 3.0, 2.0), falling(1.0, 0.9, 0.9)
    lengths = [10, 20, 30]
    assert effective_lengths(make_group({"weak": weak}, lengths=lengths), ratio=1.0)["weak"].at_least
    both = effective_lengths(make_group({"weak": weak, "strong": strong}, lengths=lengths), ratio=1.0)
    assert both["weak"].length == 10
    assert both["strong"].length == 20


def test_only_hard_positions_count_for_a_small_ratio():
    """One token in ten is hard, and only it gains from context; among all of them the gain is lost."""
    short = np.where(np.arange(100) % 10 == 3, 5.0, 0.1)
    longer = np.where(np.arange(100) % 10 == 3, 4.95, 0.1)
    group = make_group({"only": {1: short, 2: longer}}, lengths=[1, 2])
    assert hardest(short, ratio=0.1).tolist() == list(range(3, 100, 10))
    assert relative_gains(group, ratio=0.1)[0, 0] == pytest.approx(1 - math.exp(-0.05))
    assert relative_gains(group, ratio=1.0)[0, 0] == pytest.approx(1 - math.exp(-0.005))
    assert effective_lengths(group, ratio=0.1)["only"].length == 2
    assert effective_lengths(group, ratio=1.0)["only"].length == 1


def test_the_hard_positions_are_chosen_anew_for_each_length():
    """The first token is hard until 20 tokens are known, then the second is: each step is judged on its own."""
    losses = {10: np.array([9.0, 5.0]), 20: np.array([1.0, 5.0]), 30: np.array([1.0, 2.0])}
    gains = relative_gains(make_group({"only": losses}, lengths=[10, 20, 30]), ratio=0.5)
    np.testing.assert_allclose(gains[0], [1 - math.exp(-8), 1 - math.exp(-3)])


def test_pairs_are_differences_of_perplexities():
    group = make_group({"a": falling(3.0, 2.0, 1.0), "b": falling(2.5, 2.5, 0.5)}, lengths=[10, 20, 30])
    gains = perplexity_gains(group, ratio=1.0)
    assert np.isnan(gains[:, np.tril_indices(3)[0], np.tril_indices(3)[1]]).all()
    assert gains[0, 0, 1] == pytest.approx(math.exp(2.5) - math.exp(2.0))
    assert gains[0, 1, 2] == pytest.approx(math.exp(2.0) - math.exp(1.0))
    assert gains[1, 0, 1] == pytest.approx(0.0)
    assert gains[1, 0, 2] == pytest.approx(math.exp(2.5) - math.exp(0.5))


def test_losses_beyond_every_perplexity_still_have_a_gain():
    group = make_group({"only": falling(2000.0, 1999.0)}, lengths=[10, 20])
    assert relative_gains(group, ratio=1.0)[0, 0] == pytest.approx(1 - math.exp(-1))


def test_long_sums_are_made_in_float64():
    """The mean of a million float32 values that cannot be told apart in a float32 sum."""
    short = np.full(1 << 20, 3.1, dtype=np.float32)
    group = make_group({"only": {1: short, 2: short}}, lengths=[1, 2])
    assert group.perplexities()[0, 0] == pytest.approx(math.exp(float(np.float32(3.1))), rel=1e-12)


@pytest.mark.parametrize(
    ("losses", "lengths", "words"),
    [
        ({"a": falling(1, 2)}, [10], "nothing to compare"),
        ({"a": falling(1, 2, 3, 4)}, [10, 20, 40], "not evenly spaced"),
        ({}, [10, 20], "without models"),
        ({"a": falling(1.0, 2.0)}, [10, 20, 30], "a has no losses for context 30 (it has 10, 20)"),
        ({"a": falling(1.0, 2.0), "b": falling(1.0, 2.0, positions=49)}, [10, 20], "50 positions and b (context 10) has 49"),
        ({"a": {10: np.array([1.0]), 20: np.array([np.nan])}}, [10, 20], "a (context 20) holds nan at position 0"),
        ({"a": {10: np.array([1.0]), 20: np.array([np.inf])}}, [10, 20], "holds inf"),
        ({"a": {10: np.zeros((2, 2)), 20: np.zeros((2, 2))}}, [10, 20], "one loss in nats for each token"),
        ({"a": {10: np.array(["x"]), 20: np.array(["y"])}}, [10, 20], "one loss in nats for each token"),
        ({"a": {10: np.zeros(0), 20: np.zeros(0)}}, [10, 20], "holds no losses"),
    ],
)  # fmt: skip
def test_wrong_losses_are_named(losses, lengths, words):
    with pytest.raises(InputError) as error:
        make_group(losses, lengths=lengths)
    assert words in str(error.value)


def test_wrong_ratios_and_thresholds_are_named():
    group = make_group({"a": falling(2.0, 1.0)}, lengths=[10, 20])
    for ratio in (0.0, -1.0, 1.1, math.nan):
        with pytest.raises(InputError, match="not a share"):
            effective_lengths(group, ratio=ratio)
    for threshold in (0.0, -0.01, math.nan, math.inf):
        with pytest.raises(InputError, match="threshold"):
            effective_lengths(group, ratio=1.0, threshold=threshold)


def test_pictures_of_pairs_are_left_out_where_they_could_not_be_read(tmp_path):
    few = make_group({"a": falling(3.0, 2.0, 1.5)}, lengths=[10, 20, 30])
    assert [path.name for path in draw_recl(few, tmp_path, ratio="0.5")] == [
        "gain.png",
        "perplexity.png",
        "gain-pairs.png",
    ]
    many = make_group({f"m{i}": falling(3.0, 2.0) for i in range(9)}, lengths=[10, 20])
    assert [path.name for path in draw_recl(many, tmp_path, ratio="1")] == ["gain.png", "perplexity.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
