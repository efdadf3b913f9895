"""Adaptive input and softmax: a distribution, PyTorch's own where the two define the same function, in token order, tails only where needed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.config import NOT_A_TARGET, ModelConfig
from transformer_xl.model.vocabulary import Vocabulary

D = 8


def build(**changes):
    torch.manual_seed(0)
    fields = {"vocabulary": 30, "d_model": D, "cutoffs": (6, 14), "init_std": 0.5, "projection_init_std": 0.5} | changes
    vocabulary = Vocabulary(ModelConfig(**fields)).double()
    vocabulary.initialise()
    with torch.no_grad():
        for parameter in vocabulary.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return vocabulary


VARIANTS = {
    "plain": {"cutoffs": ()},
    "plain projected": {"cutoffs": (), "d_embed": 5},
    "plain projected tied": {"cutoffs": (), "d_embed": 5, "tie_projections": (True,)},
    "adaptive": {},
    "adaptive projected": {"d_embed": 5},
    "adaptive projected tied": {"d_embed": 5, "tie_projections": (False, True, True)},
    "div 2": {"div_val": 2},
    "div 2, all projected": {"div_val": 2, "projections": "always", "tie_projections": (False, True, True)},
    "div 2, untied": {"div_val": 2, "tie_embeddings": False},
    "untied": {"tie_embeddings": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_probabilities_sum_to_one_and_losses_are_theirs(variant):
    vocabulary = build(**VARIANTS[variant])
    hidden = torch.randn(3, 10, D, dtype=torch.float64)
    target = torch.arange(30).view(3, 10)
    log_probability = vocabulary.log_probabilities(hidden)
    torch.testing.assert_close(log_probability.exp().sum(-1), torch.ones(3, 10, dtype=torch.float64))
    expected = -log_probability.gather(-1, target[..., None]).squeeze(-1)
    torch.testing.assert_close(vocabulary.loss(hidden, target), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_embeddings_come_in_token_order(variant):
    vocabulary = build(**VARIANTS[variant])
    config = vocabulary.config
    tokens = torch.randperm(30).view(5, 6)
    embedded = vocabulary.embed(tokens)
    for lane, position in [(0, 0), (2, 3), (4, 5)]:
        token = int(tokens[lane, position])
        cluster = sum(token >= edge for edge in config.cutoffs)
        table = 0 if config.div_val == 1 else cluster
        row = vocabulary.tables[table][token - (0 if config.div_val == 1 else config.cluster_edges[cluster])]
        if config.has_projection(cluster):
            row = vocabulary.input_projections["0" if config.div_val == 1 else str(cluster)] @ row
        torch.testing.assert_close(embedded[lane, position], row * D**0.5)


@given(targets=st.lists(st.integers(-1, 29), min_size=1, max_size=20), div=st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_a_token_scores_the_same_alone_as_among_others(targets, div):
    vocabulary = build(div_val=div)
    hidden = torch.randn(1, len(targets), D, dtype=torch.float64)
    together = vocabulary.loss(hidden, torch.tensor([targets]))
    alone = [vocabulary.loss(hidden[:, i : i + 1], torch.tensor([[target]])).item() for i, target in enumerate(targets)]
    torch.testing.assert_close(together, torch.tensor([alone], dtype=torch.float64), rtol=0, atol=1e-12)
    assert all(loss == 0.0 for loss, target in zip(alone, targets, strict=True) if target == NOT_A_TARGET)


@pytest.mark.parametrize("div", [1.0, 2.0])
def test_equals_pytorchs_own(div):
    """PyTorch's tails are projection then linear without bias, its head has no projection: set ours so, and the functions are one."""
    theirs = nn.AdaptiveLogSoftmaxWithLoss(D, 30, [6, 14], div_value=div, head_bias=True).double()
    ours = build(div_val=int(div), tie_embeddings=False, projections="always")
    with torch.no_grad():
        ours.bias_V.zero_()
        ours.output_projections["0"].copy_(torch.eye(D))
        ours.tail_weight_CE.copy_(theirs.head.weight[6:])
        ours.tail_bias_C.copy_(theirs.head.bias[6:])
        ours.bias_V[:6] = theirs.head.bias[:6]
        tables = [theirs.head.weight[:6]]
        for cluster, (projection, output) in enumerate(theirs.tail, start=1):
            width = ours.config.cluster_width(cluster)
            if (
                projection.weight.shape[0] != width
            ):  # PyTorch divides the first tail too: D / div, D / div^2; ours D / div^1, D / div^2
                pytest.fail(f"cluster {cluster}: {projection.weight.shape[0]} against {width}")
            ours.output_projections[str(cluster)].copy_(projection.weight.T)
            tables.append(output.weight)
        if div == 1.0:
            ours.output_tables[0].copy_(torch.cat(tables))
        else:
            for mine, table in zip(ours.output_tables, tables, strict=True):
                mine.copy_(table)
    hidden, target = torch.randn(40, D, dtype=torch.float64), torch.randint(30, (40,))
    torch.testing.assert_close(
        ours.loss(hidden[None], target[None])[0], -theirs(hidden, target).output, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(ours.log_probabilities(hidden), theirs.log_prob(hidden), rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["adaptive", "div 2, all projected"])
def test_tails_are_computed_on_their_own_targets_only(variant):
    """Counted in multiply-adds: each tail costs its rows times its own targets, nothing for everybody else's."""
    vocabulary = build(**VARIANTS[variant])
    config = vocabulary.config

    def multiply_adds(targets):
        hidden = torch.randn(1, len(targets), D, dtype=torch.float64)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            vocabulary.loss(hidden, torch.tensor([targets]))
        return counter.get_total_flops() // 2

    head = multiply_adds([0] * 12)
    for tail in (1, 2):
        low, high = config.cluster_edges[tail : tail + 2]
        width = config.cluster_width(tail)
        per_target = (high - low) * width + (D * width if config.has_projection(tail) else 0)
        assert multiply_adds([0] * 9 + [low] * 3) == head + 3 * per_target
    whole = build(cutoffs=())
    hidden = torch.randn(1, 12, D, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        whole.loss(hidden, torch.tensor([[0] * 12]))
    assert head < counter.get_total_flops() // 2


def test_a_tail_without_targets_gets_no_gradient():
    vocabulary = build(div_val=2, tie_embeddings=False)
    vocabulary.loss(torch.randn(1, 4, D, dtype=torch.float64), torch.tensor([[0, 1, 7, 8]])).sum().backward()
    assert vocabulary.output_tables[1].grad is not None
    assert vocabulary.output_tables[2].grad is None
