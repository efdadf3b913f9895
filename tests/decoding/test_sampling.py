"""One lane's choices: each setting does what it says, alone and together, and depends on its own seed and past alone."""

import numpy as np
import pytest

from transformer_xl.decoding import Sampler, Sampling
from transformer_xl.decoding import sampling as module
from transformer_xl.decoding.distribution import Lane
from transformer_xl.errors import TransformerXLError

PROBABILITIES = [0.1, 0.3, 0.15, 0.45]


def pick(sampler, probabilities=PROBABILITIES):
    """A plain softmax: there is no tail to ask for."""
    question = sampler.pick(Lane(np.log(np.array(probabilities)), edges=(0, len(probabilities))))
    with pytest.raises(StopIteration) as answered:
        next(question)
    return answered.value.value


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        ({"top_k": 2}, {3, 1}),
        ({"top_k": 0, "top_p": 0.6}, {3, 1}),
        ({"top_k": 0, "top_p": 0.3}, {3}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": 0, "min_p": 0.5}, {3, 1}),
        ({"top_k": 3, "top_p": 0.8}, {3, 1}),  # of the three, 0.45 and 0.3 are five sixths
        ({"top_k": 0, "top_p": 0.95, "min_p": 0.3}, {3, 1, 2}),
        ({"temperature": 0.0}, {3}),
        ({"top_k": 0, "top_p": 0.7, "temperature": 0.2}, {3}),  # 0.45^5 is seven eighths of all
    ],
)
def test_only_the_likeliest_are_drawn(settings, possible):
    sampler = Sampler(Sampling(**settings))
    assert {pick(sampler) for _ in range(300)} == possible


def test_draws_follow_the_probabilities():
    sampler = Sampler(Sampling(top_k=0))
    counts = np.bincount([pick(sampler) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, PROBABILITIES, atol=0.03)


def test_temperature_sharpens():
    sampler = Sampler(Sampling(temperature=0.5))
    assert np.mean([pick(sampler, [0.3, 0.7]) for _ in range(4000)]) == pytest.approx(0.49 / (0.49 + 0.09), abs=0.02)


def test_a_penalty_raises_what_was_seen_to_its_power():
    counts = np.zeros(2)
    for seed in range(2000):
        sampler = Sampler(Sampling(repetition_penalty=2.0, seed=seed))
        sampler.saw([1])
        counts[pick(sampler, [0.3, 0.7])] += 1
    assert counts[1] / 2000 == pytest.approx(0.49 / (0.49 + 0.3), abs=0.035)


def test_a_penalty_forgets_what_is_long_gone(monkeypatch):
    monkeypatch.setattr(module, "RECENT", 3)
    sampler = Sampler(Sampling(repetition_penalty=5.0, temperature=0.0))
    sampler.saw([3])
    assert [pick(sampler) for _ in range(3)] == [1, 2, 0]  # each in its turn, for the others were seen lately
    assert pick(sampler) == 3  # seen four tokens ago, which is further than it looks
    assert len(sampler._recent) == 3


def test_samplers_of_one_seed_agree_and_of_two_do_not():
    def drawn(seed):
        sampler = Sampler(Sampling(seed=seed))
        return [pick(sampler) for _ in range(50)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"top_p": 0.0}, r"sampling.top_p: 0.0 is no share"),
        ({"min_p": 1.5}, r"sampling.min_p: 1.5 is no share"),
        ({"repetition_penalty": 0.5}, r"sampling.repetition_penalty: 0.5 would reward repetition"),
        ({"repetition_penalty": float("nan")}, r"would reward repetition"),
        ({"temperature": -1.0}, r"sampling.temperature: -1.0 is negative"),
        ({"top_k": -1}, r"sampling.top_k: -1 is negative"),
    ],
)
def test_bad_settings_are_named(settings, sentence):
    with pytest.raises(TransformerXLError, match=sentence):
        Sampling(**settings)
