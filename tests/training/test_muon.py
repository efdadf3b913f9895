"""Muon against what it stands for: singular values, by the slow and exact way."""

import math
from dataclasses import replace

import pytest
import torch
from torch.optim import AdamW

from card import inserted
from small_run import SMALL
from torchrun import checkpoint_of, launch
from transformer_xl.model import build_model, parameter_count
from transformer_xl.presets import find_preset
from transformer_xl.training import train
from transformer_xl.training.footprint import weights_of
from transformer_xl.training.muon import MOMENTUM, TURNS, half_for, orthogonal
from transformer_xl.training.optimisation import build_optimiser, gradient_norm, set_rate

RUN = replace(
    SMALL,
    model=replace(SMALL.model, norm="pre", final_norm=True),
    training=replace(
        SMALL.training, optimiser="muon", learning_rate=2e-3, weight_decay=0.01, embedding_rate_factor=2.0
    ),
)


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16), (1, 9)])
def test_singular_values_become_one(shape):
    """0.01 of the largest is as small as is asked for; what is smaller gets nearer to 1 than it was."""
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    rank = left.shape[-1]
    values = torch.logspace(0, -2, rank, dtype=torch.float64)
    found = orthogonal(1e3 * left @ torch.diag(values) @ right)
    assert found.shape == shape
    torch.testing.assert_close(found, left @ right, rtol=0, atol=0.05)


@pytest.mark.parametrize("shape", [(40, 40), (40, 56), (40, 160), (160, 40)])
def test_rounded_products_still_make_singular_values_about_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    found, exact = orthogonal(matrix, half=torch.bfloat16), orthogonal(matrix)
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert 0.6 < float(values.min()) < float(values.max()) < 1.4
    assert float((found * exact).sum() / found.norm() / exact.norm()) > 0.995


def test_products_are_rounded_on_a_card_that_multiplies_bfloat16_and_nowhere_else():
    half_for.cache_clear()
    assert half_for(torch.device("cpu")) is None
    for bfloat16 in (False, True):
        half_for.cache_clear()
        with inserted(bfloat16=bfloat16):
            assert half_for(torch.device("cuda")) == (torch.bfloat16 if bfloat16 else None)
    half_for.cache_clear()


def test_a_gradient_of_nothing_moves_nothing():
    assert torch.equal(orthogonal(torch.zeros(4, 6)), torch.zeros(4, 6))


def oracle(weight, gradients, *, turn, rate, decay):
    """One matrix alone, with its decomposition in place of the polynomial; it moves where its turn is 0."""
    momentum = torch.zeros_like(weight)
    for step, gradient in enumerate(gradients):
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        ahead = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        if (turn + step) % TURNS:
            continue
        left, _, right = torch.linalg.svd(ahead, full_matrices=False)
        weight = weight * (1 - rate * decay) - rate * 0.2 * math.sqrt(max(weight.shape)) * (left @ right)
    return weight


def test_matrices_move_by_their_momentum_made_orthogonal_and_all_else_as_adamw():
    torch.manual_seed(0)
    model, training = build_model(RUN.model).double(), RUN.training
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    gradients = [{name: torch.randn_like(weight) for name, weight in before.items()} for _ in range(5)]
    optimiser = build_optimiser(model, training)
    for step in gradients:
        set_rate(optimiser, training.learning_rate)
        for name, weight in model.named_parameters():
            weight.grad = step[name].clone()
        optimiser.step()

    others = {name: value.clone().requires_grad_() for name, value in before.items()}
    rates = [
        {"params": [value], "lr": training.learning_rate * (2 if "tables" in name else 1)}
        for name, value in others.items()
    ]
    adam = AdamW(rates, weight_decay=training.weight_decay)
    for step in gradients:
        for name, value in others.items():
            value.grad = step[name]
        adam.step()

    orthogonalised = 0
    for name, weight in model.named_parameters():
        if name.startswith(("layers.", "encoding.relative_key.")) and weight.dim() == 2:
            expected = oracle(
                before[name],
                [step[name] for step in gradients],
                turn=orthogonalised,
                rate=TURNS * training.learning_rate,
                decay=training.weight_decay,
            )
            moved = (weight - before[name]).norm()
            assert (weight - expected).norm() < 0.1 * moved, (
                name
            )  # a square matrix has a singular value near 0, which five polynomials leave there
            orthogonalised += 1
        else:
            torch.testing.assert_close(weight, others[name], msg=lambda text, name=name: f"{name}: {text}")
    assert orthogonalised == 6 * RUN.model.n_layer


def test_rows_of_runs_move_only_when_they_are_touched():
    """Each by its gradient over the root of its own mean square, whatever other rows do."""
    torch.manual_seed(0)
    shape = replace(RUN.model, ngrams=(2, 3), ngram_rows=7, d_ngram=4)
    model = build_model(shape).double()
    table, optimiser = model.ngrams.tables_GRE, build_optimiser(model, RUN.training)
    expected, square = table.detach().clone(), torch.zeros(2, 7, dtype=torch.float64)
    for step in range(6):
        gradient = torch.randn_like(table) * (torch.rand(2, 7, 1) < 0.4)
        table.grad = gradient.clone()
        set_rate(optimiser, 0.01 * (step + 1))
        optimiser.step()
        for order, row in torch.cartesian_prod(torch.arange(2), torch.arange(7)).tolist():
            if gradient[order, row].any():
                square[order, row] = 0.999 * square[order, row] + gradient[order, row].square().mean()
                expected[order, row] -= 0.01 * (step + 1) * gradient[order, row] / square[order, row].sqrt()
    torch.testing.assert_close(table.detach(), expected, rtol=0, atol=1e-9)


def test_a_sparse_gradient_of_the_rows_that_were_read_moves_them_as_a_dense_one_does():
    """Through whole steps: forward, backward, clipping, norm and optimiser, over two micro-batches."""
    shape = replace(RUN.model, ngrams=(2, 3), ngram_rows=31, d_ngram=4)
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = build_model(shape).double()
        model.ngrams.sparse_gradient = sparse
        optimiser, norms = build_optimiser(model, RUN.training), []
        for _ in range(4):
            set_rate(optimiser, 0.01)
            optimiser.zero_grad(set_to_none=True)
            for _ in range(2):
                tokens = torch.randint(shape.vocabulary, (3, 9))
                model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT.sum().backward()
            assert model.ngrams.tables_GRE.grad.is_sparse == sparse
            norms.append(float(gradient_norm(model, clip=0.5)))
            optimiser.step()
        found.append((norms, model.state_dict()))
    (norms, weights), (sparse_norms, sparse_weights) = found
    assert norms == pytest.approx(sparse_norms, rel=1e-12)
    for name, weight in weights.items():
        torch.testing.assert_close(sparse_weights[name], weight, rtol=0, atol=1e-10)
    assert weights["ngrams.tables_GRE"].abs().max() > 0


def test_weights_without_a_gradient_stay():
    model = build_model(RUN.model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimiser = build_optimiser(model, RUN.training)
    model.layers[0].query.weight.grad = torch.ones_like(model.layers[0].query.weight)
    optimiser.step()
    assert [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])] == [
        "layers.0.query.weight"
    ]


def test_it_keeps_one_number_for_a_weight_of_a_matrix():
    """One momentum in place of Adam's two moments, and the estimate of memory knows."""
    adam = replace(RUN, training=replace(RUN.training, optimiser="adam"))
    model = build_model(RUN.model)
    matrices = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if name.startswith(("layers.", "encoding.relative")) and weight.dim() == 2
    )
    estimates = [weights_of(run, devices=1, parallel="ddp") for run in (adam, RUN)]
    assert estimates[0] - estimates[1] == 4 * matrices


@pytest.mark.parametrize("kind", ["byte", "word"])
def test_modern_presets_are_of_the_size_of_what_they_are_compared_with(kind):
    """The paper's post-norm of the same lengths; the final norm, and a weight for each neighbour's value, is all they have more."""
    modern, tiny = (find_preset(f"{family}-{kind}").run for family in ("modern", "tiny"))
    paper = replace(tiny.model, norm="post", final_norm=False)
    beside = paper.n_layer * modern.model.neighbours * paper.n_head * paper.d_head
    assert parameter_count(modern.model) - parameter_count(paper) == 2 * paper.d_model + beside
    assert modern.model.memory == paper.memory
    assert (modern.training.segment, modern.evaluation) == (tiny.training.segment, tiny.evaluation)


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_are_one(parallel, byte_store, tmp_path, without_pictures):
    """Where singular values are almost 0, orthogonalising makes more of rounding than Adam does; sharded matrices are gathered whole."""
    from safetensors.torch import load_file

    train(RUN, store=byte_store, folder=tmp_path / "one")
    answer = launch(RUN, byte_store, tmp_path / "two", "--parallel", parallel)
    assert answer.returncode == 0, answer.stderr
    mine, theirs = (load_file(checkpoint_of(tmp_path / name) / "model.safetensors") for name in ("one", "two"))
    fresh = build_model(RUN.model).state_dict()
    for name, weight in mine.items():
        assert not torch.equal(weight, fresh[name])
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-4)
