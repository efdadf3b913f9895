"""One update: gradients over the micro-batches, each with its own lanes and memory, then clip and step. Nothing that is not finite gets in."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer_xl.config import NOT_A_TARGET, TrainingConfig
from transformer_xl.data.feeding.lanes import Segment
from transformer_xl.model import AnyMemory, AnyModel, Output, RecurrentState, products
from transformer_xl.training.optimisation import gradient_norm, learning_rate, set_rate
from transformer_xl.training.session import Session

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Update:
    nats: float
    """Summed over the scored tokens."""
    tokens: int
    norm: float
    rate: float
    taken: bool
    """False where something was not finite and the weights stayed as they were."""


def take_step(session: Session, segment: Segment) -> Update:
    with session.chance:
        return _take_step(session, segment)


def _take_step(session: Session, segment: Segment) -> Update:
    training, model, optimiser, ranks = session.config.training, session.model, session.optimiser, session.ranks
    fed, scored = segment.tokens.shape[1], segment.targets.shape[1]
    tokens = int((segment.targets != NOT_A_TARGET).sum())
    rate = learning_rate(training, update=session.position) * session.rate_scale
    if training.rate_by_segment_length:
        rate *= scored / training.segment
    set_rate(optimiser, rate)

    if ranks.count == 1:  # exchanged gradients stand in memory that is not ours to use
        model.vocabulary.give_back_gradient()
    optimiser.zero_grad(set_to_none=True)
    # bfloat16 on a processor: factors of products are rounded and all else is float32, so that the kernels take part. Elsewhere: autocast.
    half = PRECISIONS.get(training.precision)
    to = half if session.device.type == "cpu" and half is torch.bfloat16 else None
    nats = 0.0
    memories: list[AnyMemory | None] = []
    for part, rows in enumerate(np.array_split(ranks.rows(len(segment.tokens)), training.accumulation)):
        ranks.exchange_gradients(session.wrapped, now=part == training.accumulation - 1)
        starts_BT = segment.document_starts[rows]
        memory = session.memories[part]
        if memory is not None and training.reset_memory_at_documents:
            memory = memory.reset(np.flatnonzero(starts_BT[:, 0]).tolist())
        # Backwards too: with recomputation a layer's products are made there once more.
        with products.rounded(to):
            with torch.autocast(session.device.type, dtype=half, enabled=half is not None and to is None):
                output = session.wrapped(
                    torch.from_numpy(segment.tokens[rows]).to(session.device),
                    targets_BT=torch.from_numpy(segment.targets[rows]).to(session.device),
                    memory=memory,
                    overlap=min(training.context, fed),
                    progress=session.position / training.steps,
                )
            # The mean over the tokens of all lanes; gradients are averaged over the ranks, so each gives as many times its share.
            mean = output.loss_BT.sum() / (max(1, tokens) / ranks.count)
            objective = mean + extra_losses(output, training) / training.accumulation
            session.scaler.scale(objective).backward()
        nats += float(output.loss_BT.detach().sum())
        memories.append(forgetting_documents(output.memory, starts_BT, training))

    if ranks.count > 1:
        leave_tails_without_targets(model, segment.targets)
    session.scaler.unscale_(optimiser)
    norm = gradient_norm(model, clip=training.clip)
    nats, broken = ranks.total(nats, not math.isfinite(norm))
    taken = math.isfinite(nats) and not broken
    if taken:
        session.scaler.step(optimiser)
        session.memories = memories
    session.scaler.update()
    return Update(nats=nats, tokens=tokens, norm=norm, rate=rate, taken=taken)


def leave_tails_without_targets(model: AnyModel, targets_BT: np.ndarray) -> None:
    """What no lane of any rank has used gets no gradient at all, as in one process: a gradient of 0 would still move it, by its momentum."""
    edges = model.config.cluster_edges
    for cluster in range(1, model.config.clusters):
        if not ((targets_BT >= edges[cluster]) & (targets_BT < edges[cluster + 1])).any():
            for weight in model.vocabulary.weights_of_tail(cluster):
                weight.grad = None


def extra_losses(output: Output[AnyMemory], training: TrainingConfig) -> Tensor:
    """Activation and temporal activation regularisation of the last hidden states, and Al-Rfou's auxiliary losses."""
    total = output.hidden_BTD.new_zeros(())
    if training.activation_regularisation:
        total = total + training.activation_regularisation * output.hidden_BTD.pow(2).mean()
    if training.temporal_regularisation and output.hidden_BTD.shape[1] > 1:
        total = total + training.temporal_regularisation * output.hidden_BTD.diff(dim=1).pow(2).mean()
    if output.auxiliary_loss is not None:
        total = total + output.auxiliary_loss
    return total


def forgetting_documents(memory: AnyMemory, starts_BT: np.ndarray, training: TrainingConfig) -> AnyMemory:
    """With `reset_memory_at_documents`, what lies before the last document start of a lane is no longer real."""
    if not training.reset_memory_at_documents or isinstance(memory, RecurrentState):
        return memory
    fed = starts_BT.shape[1]
    kept_B = np.where(starts_BT.any(1), fed - (fed - 1 - starts_BT[:, ::-1].argmax(1)), np.iinfo(np.int64).max)
    return memory.limited(torch.from_numpy(kept_B - min(training.context, fed)))
