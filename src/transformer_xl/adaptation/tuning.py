"""How a model should learn while it reads, found on valid in few passes.

pass 1       weights that stand still, and all thetas of a cache at once; of each the best lambda is found without reading again
pass 2       weights that stand still, in segments as long as a lesson: what learning is compared with, because a token then sees as much
then         rate by rate in the direction that helps, then decay by decay
last pass    the best rate and decay, and all thetas once more, for both together
"""

import math
import time
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transformer_xl.adaptation.evaluating import adaptive_rule, read_through
from transformer_xl.adaptation.neural_cache import NeuralCache
from transformer_xl.adaptation.reader import AdaptiveReader
from transformer_xl.adaptation.statistics import Statistics
from transformer_xl.adaptation.tuned import Trial, Tuned
from transformer_xl.checkpoint.adapter_file import fingerprint
from transformer_xl.config import AdaptationConfig
from transformer_xl.console import Advance, say
from transformer_xl.data.store import Split
from transformer_xl.errors import InputError
from transformer_xl.evaluation.scoring import Rule, score_split, using_lengths
from transformer_xl.model import AnyModel

THETAS = tuple(10.0 ** (power / 3) for power in range(-9, 4))
SHARES = np.concatenate([[0.0], np.geomspace(1e-3, 0.9, 60)])
FIRST_RATE = {"sgd": 0.05, "rms": 2e-4}
RATE_FACTOR, DECAYS = 2.0, (1e-3, 3e-3, 1e-2, 3e-2)
MOST_RATES = 8


class Recorder(NeuralCache):
    """A cache that mixes nothing in, and writes down what it would have."""

    def __init__(self, how: AdaptationConfig, *, width: int, like: Tensor) -> None:
        super().__init__(how, width=width, like=like)
        self.losses: list[NDArray[np.float64]] = []
        self.given: list[NDArray[np.float64]] = []

    def mixed(self, loss_T: Tensor, hidden_TD: Tensor, token_T: Tensor, target_T: Tensor) -> Tensor:
        shares = self.shares(hidden_TD, token_T, target_T, *THETAS)
        self.losses.append(loss_T.double().cpu().numpy())
        self.given.append(torch.stack(shares).nan_to_num_(-1.0).double().cpu().numpy())
        return loss_T

    def best(self) -> tuple[float, float, float]:
        """Theta, lambda, and the mean loss that they give."""
        probability, found = np.exp(-np.concatenate(self.losses)), (math.inf, 0.0, 0.0)
        for theta, given in zip(THETAS, np.concatenate(self.given, axis=1), strict=True):
            cached = np.where(given < 0, probability, given)  # where nothing is cached, the model alone speaks
            for share in SHARES:
                nats = float(-np.log((1 - share) * probability + share * cached).mean())
                found = min(found, (nats, theta, float(share)))
        return found[1], found[2], found[0]


class Tuning:
    def __init__(
        self, model: AnyModel, valid: Split, *, rule: Rule, statistics: Statistics, advance: Advance | None = None
    ) -> None:
        self.model, self.valid, self.rule, self.statistics, self.advance = model, valid, rule, statistics, advance
        self.passes = 0

    def tune(self, start: AdaptationConfig, *, corpus: str) -> Tuned:
        """`start` says everything but rate, decay, theta and lambda."""
        still = replace(start, rate=0.0, decay=0.0, cache_lambda=0.5).in_segments(self.rule.segment)
        static, cache = self._with_cache(still)
        say(f"static: {_told(static, static)}")
        say(f"cache: {_told(cache, static)}, {cache.how.sentence()}")
        level = self._still(replace(still, cache_lambda=0.0))
        say(f"static, in segments of {still.segment} tokens as lessons are: {_told(level, level)}")
        gradient = self._gradient(replace(still, cache_lambda=0.0), level)
        say(f"gradient: {_told(gradient, level)}, {gradient.how.sentence()}")
        _, both = self._with_cache(replace(gradient.how, cache_lambda=0.5))
        say(f"both: {_told(both, level if gradient.how.moves else static)}, {both.how.sentence()}")
        return Tuned(
            base=fingerprint(self.model.state_dict()),
            corpus=corpus,
            tokens=len(self.valid),
            static=static,
            gradient=gradient,
            cache=cache,
            both=both,
            passes=self.passes,
        )

    def _still(self, how: AdaptationConfig) -> Trial:
        """Nothing learns, and segments are those of lessons."""
        self.passes += 1
        started_at = time.perf_counter()
        rule = replace(self.rule, lanes=1, segment=how.segment)
        losses = score_split(self.model, self.valid, rule=rule, advance=self.advance)
        nats = float(np.nanmean(losses, dtype=np.float64))
        return Trial(how=how, nats=nats, seconds=time.perf_counter() - started_at)

    def _gradient(self, how: AdaptationConfig, level: Trial) -> Trial:
        rate = FIRST_RATE[how.rule]
        best = self._tried(replace(how, rate=rate))
        for factor in (RATE_FACTOR, 1 / RATE_FACTOR):
            for _ in range(MOST_RATES):
                trial = self._tried(replace(best.how, rate=best.how.rate * factor))
                if trial.nats >= best.nats:
                    break
                best = trial
            if best.how.rate > rate:  # the other direction is known to be worse
                break
        for decay in DECAYS:
            trial = self._tried(replace(best.how, decay=decay))
            if trial.nats >= best.nats:
                break
            best = trial
        # Nothing is learned from where learning only hurts.
        return best if best.nats < level.nats else replace(level, how=replace(best.how, rate=0.0))

    def _tried(self, how: AdaptationConfig) -> Trial:
        try:
            nats, seconds, _ = self._pass(how)
        except InputError:  # weights that went where no numbers are
            nats, seconds = 1e9, 0.0
        say(f"  rate {how.rate:g}, decay {how.decay:g}: {nats:.5f} nats")
        return Trial(how=how, nats=nats, seconds=seconds)

    def _with_cache(self, how: AdaptationConfig) -> tuple[Trial, Trial]:
        """Without the cache, and with the best one; `seconds` of the second are those of comparing all thetas."""
        nats, seconds, recorder = self._pass(how)
        assert recorder is not None
        theta, share, mixed = recorder.best()
        without = Trial(how=replace(how, cache_lambda=0.0), nats=nats, seconds=seconds)
        return without, Trial(how=replace(how, cache_lambda=share, cache_theta=theta), nats=mixed, seconds=seconds)

    def _pass(self, how: AdaptationConfig) -> tuple[float, float, Recorder | None]:
        self.passes += 1
        started_at = time.perf_counter()
        rule, how = adaptive_rule(self.rule, how)
        with using_lengths(self.model, rule):
            reader = AdaptiveReader(self.model, how, statistics=self.statistics, sight="segment")
            recorder = None
            if how.caches:
                like, width = self.model.vocabulary.bias_V, self.model.config.d_model
                recorder = reader.lane(0).cache = Recorder(how, width=width, like=like)
            losses = read_through(reader, self.valid, segment=rule.segment, advance=self.advance)
        return float(np.nanmean(losses, dtype=np.float64)), time.perf_counter() - started_at, recorder


def _told(trial: Trial, static: Trial) -> str:
    gain = f", {100 * (1 - trial.nats / static.nats):.2f} % fewer bits, {100 * (1 - math.exp(trial.nats - static.nats)):.2f} % less perplexity"
    return f"{trial.nats:.5f} nats per token" + (gain if trial is not static else "")
