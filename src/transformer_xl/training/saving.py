"""Saving while training goes on: a snapshot in the host's memory, written by a thread.

    training   step . step . snapshot . step . step . step . snapshot ...      one is written at a time: who is to write the next waits
    thread                              writes ........ best.json . prune

What was saved before stays until the new folder stands whole (`files.atomic_folder`), so whoever is killed in between goes on from there. A write that fails
ends training at its next step, with the sentence of the disk.
"""

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from transformer_xl.checkpoint import About, Counters, RunFolder, TrainingState, write_checkpoint
from transformer_xl.checkpoint.adapter_file import Adapter
from transformer_xl.data.store import Store
from transformer_xl.model.adapters import factors, merged
from transformer_xl.training.background import Background
from transformer_xl.training.origin import Origin
from transformer_xl.training.session import Measured, Session
from transformer_xl.training.sharding import begin_shards

CHECKPOINTS_KEPT = 2


def save(
    session: Session,
    run: RunFolder,
    store: Store,
    validation: Measured | None,
    origin: Origin | None,
    background: Background,
) -> None:
    """Last and best are kept, and one before the last to fall back on; older ones go. All ranks call it; rank 0 writes."""
    background.wait()
    best, whole = is_best(session, validation), not session.config.training.shards
    loss = validation.figures.loss_nats if validation is not None and validation.step == session.step else None
    if best:
        session.best_nats = loss
    weights, state = session.weights_to_use(whole=whole), session.state(whole=whole)
    if whole and not session.ranks.first:
        return
    config, step = session.config, session.step
    about = About(
        corpus=store.manifest.name,
        rule=store.manifest.rule,
        unit=store.manifest.unit,
        data=store.place,
        step=step,
        validation_nats=loss,
    )
    # Training changes the counters and all tensors while they are written.
    counters = copy.deepcopy(state.counters)
    facts: dict[str, Any] = {"config": config, "about": about, "tokenizer": store.tokenizer}
    write: Callable[[], None]
    if whole:
        tensors = {"model": kept(weights), "training": kept(state.tensors)}
        write = partial(write_whole, run.checkpoint_at(step), tensors, counters=counters, origin=origin, **facts)
    else:
        of_ranks = {"model": weights, "training": state.tensors}
        write = begin_shards(run.checkpoint_at(step), of_ranks, session, background, counters=counters, **facts)

    def work() -> None:
        write()
        if session.ranks.first:
            if best and loss is not None:
                run.set_best(step, loss_nats=loss)
            run.prune(keep=CHECKPOINTS_KEPT)

    background.begin(work)


def write_whole(
    folder: Path, tensors: dict[str, dict[str, Tensor]], *, counters: Counters, origin: Origin | None, **facts: Any
) -> None:
    weights, about = tensors["model"], facts["about"]
    adapter = None
    if origin is not None and origin.rank is not None:
        made = {"base": origin.fingerprint, "corpus": about.corpus, "step": about.step}
        adapter = Adapter(rank=origin.rank, factors=factors(weights), **made)
    state = TrainingState(tensors=tensors["training"], counters=counters)
    write_checkpoint(folder, weights=merged(weights), training=state, adapter=adapter, **facts)


def is_best(session: Session, validation: Measured | None) -> bool:
    """Measured at this very step, and lower than ever before."""
    if validation is None or validation.step != session.step or not math.isfinite(validation.figures.loss_nats):
        return False
    return session.best_nats is None or validation.figures.loss_nats < session.best_nats


def kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of their own, in the host's memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
