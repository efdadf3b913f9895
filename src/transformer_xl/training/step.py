"""One update: gradients over the micro-batches, each with its own lanes and memory, then clip and step. Nothing that is not finite gets in.

Whether all is finite, a processor says at once. A card is not waited for: a flag on it keeps the weights as they were, and the host reads what
happened when it has already queued the next step.

    host   queues 1 . queues 2 . reads 1 . queues 3 . reads 2 . ...
    card              computes 1 ........ computes 2 ........ ...
"""

import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from transformer_xl.config import NOT_A_TARGET, TrainingConfig
from transformer_xl.data.feeding.lanes import Segment
from transformer_xl.model import AnyMemory, AnyModel, Output, RecurrentState, products
from transformer_xl.model.vocabulary import Places
from transformer_xl.training.optimisation import gradient_norm, learning_rate, set_rate
from transformer_xl.training.session import PRECISIONS, Session
from transformer_xl.training.travelling import Coming, sent, sent_together


class Update:
    """What a step has done. Reading anything but `step`, `tokens` and `rate` waits until the device has computed it."""

    def __init__(self, found: Tensor, *, step: int, tokens: int, rate: float, parts: int) -> None:
        """`found`: the norm, the summed losses of so many parts, and what several ranks have asked for."""
        self.step, self.tokens, self.rate = step, tokens, rate
        self._coming, self._parts = Coming(found), parts

    @cached_property
    def _found(self) -> list[float]:
        return self._coming.read()

    @property
    def norm(self) -> float:
        """Of all gradients together, before they were clipped."""
        return self._found[0]

    @cached_property
    def nats(self) -> float:
        """Summed over the scored tokens of all ranks."""
        return sum(self._found[1 : 1 + self._parts])

    @property
    def taken(self) -> bool:
        """False where something was not finite and the weights stayed as they were."""
        return math.isfinite(self.nats) and math.isfinite(self.norm)

    @property
    def asked(self) -> list[bool]:
        """What any of several ranks asked for (`Session.asks`) when it took this step."""
        return [value > 0.5 for value in self._found[1 + self._parts :]]


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
    nats: list[Tensor] = []
    memories: list[AnyMemory | None] = []
    for part, rows in enumerate(np.array_split(ranks.rows(len(segment.tokens)), training.accumulation)):
        last = part == training.accumulation - 1
        ranks.exchange_gradients(session.wrapped, now=last)
        starts_BT = segment.document_starts[rows]
        memory = session.memories[part]
        if memory is not None and training.reset_memory_at_documents:
            memory = memory.reset(np.flatnonzero(starts_BT[:, 0]).tolist())
        # Backwards too: with recomputation a layer's products are made there once more.
        with products.rounded(to):
            with torch.autocast(session.device.type, dtype=half, enabled=half is not None and to is None):
                output = ranks.forward(
                    session.wrapped,
                    sent(segment.tokens[rows], session.device),
                    targets_BT=sent(segment.targets[rows], session.device),
                    memory=memory,
                    overlap=min(training.context, fed),
                    progress=session.position / training.steps,
                    places=places(model, segment.tokens[rows], segment.targets[rows], device=session.device),
                )
            assert output.loss_BT is not None
            # The mean over the tokens of all lanes; gradients are averaged over the ranks, so each gives as many times its share.
            mean = output.loss_BT.sum() / (max(1, tokens) / ranks.count)
            objective = session.scaler.scale(mean + extra_losses(output, training) / training.accumulation)
            nats.append(output.loss_BT.detach().sum())
            if last:
                numbers = torch.stack(nats)
                if ranks.count > 1:
                    asks = sent(np.array(session.asks(), dtype=np.float32), session.device)
                    numbers = torch.cat([numbers, asks])
                    objective = objective + ranks.carrier(session.wrapped, numbers)
            torch.autograd.backward(objective)
        memories.append(forgetting_documents(output.memory, starts_BT, training))

    if ranks.count > 1:
        leave_tails_without_targets(model, segment.targets)
    session.scaler.unscale_(optimiser)
    norm, numbers = gradient_norm(model, clip=training.clip), ranks.carried(session.wrapped, numbers)
    found = torch.cat([norm[None], numbers])
    update = Update(found, step=session.step + 1, tokens=tokens, rate=rate, parts=training.accumulation)
    if session.late:
        broken = ~found[: 1 + training.accumulation].isfinite().all()
        optimiser.found_inf = broken.float()  # type: ignore[attr-defined]
        optimiser.step()
        for layer in (layer for memory in memories if memory is not None for layer in memory.layers):
            layer.masked_fill_(broken, 0.0)  # ours alone: nobody else has seen it yet
        session.memories = memories
    elif update.taken:
        optimiser.step()
        session.memories = memories
    session.scaler.update()
    return update


def places(model: AnyModel, tokens_BT: np.ndarray, targets_BT: np.ndarray, *, device: torch.device) -> Places | None:
    """Where the clusters' members stand, found here and sent with them."""
    if model.config.clusters == 1:
        return None
    of_tokens, of_targets = model.vocabulary.places(tokens_BT, targets_BT)
    placed = sent_together([*of_tokens, *of_targets], device)
    return Places(tokens=placed[: len(of_tokens)] or None, targets=placed[len(of_tokens) :])


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
