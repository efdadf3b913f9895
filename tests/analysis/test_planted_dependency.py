"""A dependency of known length is planted in a stream, a model is trained on it, and its RECL is that length. Whoever cannot reach that far stays below."""

from copy import copy

import numpy as np
import pytest
import torch

from transformer_xl.analysis.contexts import Stretch, context_losses
from transformer_xl.analysis.recl import effective_lengths, make_group
from transformer_xl.config import EvaluationConfig, ModelConfig, TrainingConfig
from transformer_xl.model import TransformerXL

SYMBOLS = 16
DISTANCE = 32
STEP = 8
START = DISTANCE - STEP // 2
"""The step that begins here is the one that reaches the dependency; steps before it would gain nothing, and the search would end there."""


def planted(length, *, lanes, seed):
    """Random symbols, nine of ten of them copied from so many back."""
    generator = np.random.default_rng(seed)
    symbols = generator.integers(0, SYMBOLS, (lanes, length))
    copied = generator.random((lanes, length)) < 0.9
    for place in range(DISTANCE, length):
        symbols[:, place] = np.where(copied[:, place], symbols[:, place - DISTANCE], symbols[:, place])
    return symbols


def trained(*, memory, segment, steps):
    torch.manual_seed(0)
    config = ModelConfig(
        vocabulary=SYMBOLS, n_layer=1, d_model=32, n_head=4, d_head=8, d_inner=64, memory=memory, norm="pre", final_norm=True
    )  # fmt: skip
    model, state = TransformerXL(config), None
    symbols = torch.from_numpy(planted(segment * steps + 1, lanes=32, seed=1))
    optimiser = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
    for step, start in enumerate(range(0, segment * steps, segment)):
        if (
            step % 2 == 0
        ):  # every second segment starts anew: a model that never met a short context is only confused by it
            state = None
        targets = symbols[:, start + 1 : start + segment + 1]
        output = model(symbols[:, start : start + segment], targets_BT=targets, memory=state)
        state = output.memory
        optimiser.zero_grad()
        output.loss_BT.mean().backward()
        optimiser.step()
        schedule.step()
    return model.eval()


@pytest.fixture
def split(byte_store):
    split = copy(byte_store.split("test"))
    split.tokens = planted(1700, lanes=1, seed=2)[0]
    return split


def test_recl_finds_the_planted_distance_and_only_where_memory_reaches_it(split):
    def read(model, *, memory, lengths=tuple(range(START, 64, STEP))):
        stretch = Stretch(lengths=lengths, tokens=1500)
        evaluation, training = EvaluationConfig(memory=memory), TrainingConfig(segment=24)
        return context_losses(model, split, stretch=stretch, evaluation=evaluation, training=training).losses

    model, without = trained(memory=48, segment=32, steps=500), trained(memory=0, segment=24, steps=100)
    losses = {
        "remembers": read(model, memory=48),
        "the same with a short memory": read(model, memory=24),
        "trained without": read(without, memory=0),
    }
    group = make_group(losses, lengths=sorted(losses["remembers"]))
    for ratio in (0.1, 0.5, 1.0):
        found = effective_lengths(group, ratio=ratio)
        assert DISTANCE <= found["remembers"].length < DISTANCE + 2 * STEP
        assert not found["remembers"].at_least
        assert found["the same with a short memory"].length < DISTANCE
        assert found["trained without"].length < DISTANCE
    # And to the token: one too few, and nothing is known; that one more, and nearly all is.
    exact = read(model, memory=48, lengths=(DISTANCE - 1, DISTANCE))
    assert exact[DISTANCE - 1].mean() > 2.0
    assert exact[DISTANCE].mean() < 0.9
