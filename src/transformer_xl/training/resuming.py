"""Where a run begins: from nothing, or exactly where it stopped."""

from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from transformer_xl.checkpoint import (
    Counters,
    RunFolder,
    Timetable,
    TrainingState,
    read_training_state,
    same_tokenizer,
    verify,
)
from transformer_xl.checkpoint.adapter_file import read_adapter
from transformer_xl.checkpoint.folder import CHECKSUMS, read_about, read_config, read_weights
from transformer_xl.checkpoint.run_folder import ADAPTER_FILE
from transformer_xl.checkpoint.shards import AnyTensor
from transformer_xl.config import RunConfig
from transformer_xl.console import say
from transformer_xl.data.store import Store
from transformer_xl.errors import CheckpointError
from transformer_xl.files import put_back, write_json
from transformer_xl.training.clock import make_timetable
from transformer_xl.training.origin import Origin
from transformer_xl.training.ranks import ALONE, Ranks
from transformer_xl.training.session import Session

MUST_STAY = (
    "segment",
    "context",
    "stretch",
    "variable_segments",
    "lanes",
    "accumulation",
    "optimiser",
    "average",
    "average_from",
    "seed",
)
"""Fields of `training`, beside all of `model`, that what is saved was made by. The others may change when a run goes on, and it is said."""


def start_or_resume(
    run: RunFolder,
    config: RunConfig,
    *,
    store: Store,
    resume: str,
    device: torch.device,
    ranks: Ranks = ALONE,
    origin: Origin | None = None,
) -> Session:
    """`resume`: "auto" goes on where the run stopped, if it has begun; "false" refuses if it has; else the checkpoint to go on from. `origin`: whose
    weights it begins with, if it has not."""
    if ranks.first:
        run.clear_half_written()
    checkpoint = ranks.from_first(lambda: checkpoint_to_go_on_from(run, resume))
    state = None if checkpoint is None else read_training_state(checkpoint)
    if checkpoint is not None and state is not None:
        check_goes_on(checkpoint, state, config, store=store, origin=origin)
    how: dict[str, Any] = {"store": store, "device": device, "ranks": ranks, "origin": origin}
    table = planned(config, state, **how)
    if table is not None:
        config = replace(config, training=replace(config.training, steps=table.steps))
    session = Session.fresh(config, **how)
    if checkpoint is not None and state is not None:
        weights = saved_weights(checkpoint, session, origin)
        session.restore(state, weights=weights, folder=checkpoint)
        say(f"going on from step {session.step} ({checkpoint})")
        if ranks.first and checkpoint.parent == run.checkpoints:
            name_the_best(run, session, checkpoint)
        if (saved := state.counters.ranks) != ranks.count:
            say(
                f"going on with {ranks.count} rank{'s' * (ranks.count > 1)} where {saved} saved: each lane keeps its place and memory, but the random"
                " states of dropout are drawn anew from the seed, so weights are no longer bit-identical"
            )
    session.timetable = table
    if ranks.first:
        write_json(run.config, asdict(config))
    return session


def check_goes_on(
    checkpoint: Path, state: TrainingState, config: RunConfig, *, store: Store, origin: Origin | None
) -> None:
    """Whether what was saved is of this configuration, these words and this text, and began with these weights."""
    check_same_run(read_config(checkpoint / "config.json"), config, checkpoint, free=free_to_change(state))
    if not same_tokenizer(checkpoint, store.folder):
        raise CheckpointError(
            f"{store.folder} has another vocabulary than {checkpoint} was trained on; give the data it began with"
        )
    check_same_data(state, store, checkpoint)
    check_same_origin(state, origin, checkpoint)


def planned(config: RunConfig, state: TrainingState | None, *, store: Store, **how: Any) -> Timetable | None:
    """Where minutes decide: the timetable that was saved or, for another number of minutes, a new one for those that are left. `how`: what
    else a fresh session is made of."""
    training = config.training
    if not training.minutes:
        return None
    counters = Counters.unbegun(step=0) if state is None else state.counters
    saved = counters.timetable
    if saved is not None and saved.minutes == training.minutes:
        return saved
    spent = counters.seconds if saved is None else saved.spent
    table = make_timetable(config, store=store, step=counters.step, seconds=counters.seconds, spent=spent, **how)
    steps, wanted = table.steps - counters.step, training.validation_tokens or None
    say(f"about {steps:,} {'more ' * bool(counters.step)}steps fit into {training.minutes:g} minutes")
    if table.validation_tokens and table.validation_tokens < (wanted or len(store.split("valid"))):
        say(f"validating on the first {table.validation_tokens:,} tokens of valid, which is what there is time for")
    return table


def name_the_best(run: RunFolder, session: Session, checkpoint: Path) -> None:
    """A trainer killed between saving its best checkpoint and writing down that it is the best leaves this to the next."""
    loss = read_about(checkpoint / "about.json").validation_nats
    if loss is not None and loss == session.best_nats and run.best_step() != session.step:
        run.set_best(session.step, loss_nats=loss)


def checkpoint_to_go_on_from(run: RunFolder, resume: str) -> Path | None:
    if resume == "auto":
        return newest_sound_checkpoint(run)
    if resume == "false":
        if run.steps():
            raise CheckpointError(f"{run.path} already holds a run; go on with `resume=auto`, or choose another `run=`")
        return None
    path = Path(resume)
    put_back(path)
    checkpoint = path if (path / CHECKSUMS).is_file() else newest_sound_checkpoint(RunFolder(path))
    if checkpoint is None:
        raise CheckpointError(f"{resume} holds no checkpoint to go on from; name a run or one of its checkpoints")
    verify(checkpoint)
    return checkpoint


def newest_sound_checkpoint(run: RunFolder) -> Path | None:
    """The newest that is whole. A damaged one is named and passed over; if all are damaged, that is an error, not a new start."""
    steps = run.steps()
    for step in reversed(steps):
        try:
            verify(run.checkpoint_at(step))
            return run.checkpoint_at(step)
        except CheckpointError as error:
            say(f"passing over a checkpoint: {error}")
    if steps:
        raise CheckpointError(f"no checkpoint of {run.path} is whole; restore one from a copy, or start another `run=`")
    return None


def free_to_change(state: TrainingState) -> set[str]:
    """Fields of MUST_STAY that nothing was made by yet: an imported run has no place in any data, and at most an optimiser's state."""
    if state.counters.lanes is not None:
        return set()
    has_momenta = any(name.startswith("optimiser.") for name in state.tensors)
    return {*MUST_STAY} - ({"optimiser"} if has_momenta else set())


def check_same_data(state: TrainingState, store: Store, checkpoint: Path) -> None:
    """A place in one text is no place in another. An imported run has none; and those saved before fingerprints were kept are believed."""
    if state.counters.lanes is None:
        return
    if state.counters.data is None:
        say(f"{checkpoint} does not say which text it was trained on; going on with {store.folder}, unchecked")
    elif state.counters.data != store.fingerprint():
        raise CheckpointError(
            f"{store.folder} holds other text than {checkpoint / 'training.json'} says it was trained on; give the `data=` it began with, or train on this"
            " text in another `run=`"
        )


def check_same_origin(state: TrainingState, origin: Origin | None, checkpoint: Path) -> None:
    has_adapter, asked = (checkpoint / ADAPTER_FILE).is_file(), origin is not None and origin.rank is not None
    if origin is not None and state.counters.origin != origin.fingerprint:
        raise CheckpointError(
            f"{checkpoint} did not begin with the weights of {origin.checkpoint.folder}; choose another `run=`, or name in `from=` the checkpoint it began with"
        )
    if has_adapter and not asked:
        raise CheckpointError(
            f"{checkpoint} is an adapter in training, beside another run's weights; go on with the `from=` and the `adapter=` it began with"
        )
    if asked and not has_adapter:
        raise CheckpointError(f"{checkpoint} trains all weights and no adapter; choose another `run=` for one")


def saved_weights(checkpoint: Path, session: Session, origin: Origin | None) -> dict[str, AnyTensor]:
    """The weights to use, as the session's model has them: where it trains an adapter, beside the weights that stand still."""
    if origin is None or origin.rank is None:
        return read_weights(checkpoint / "model.safetensors", model=session.model)
    adapter = read_adapter(checkpoint / ADAPTER_FILE, model=origin.checkpoint.model, base=origin.fingerprint)
    if adapter.rank != origin.rank:
        raise CheckpointError(
            f"{checkpoint} has an adapter of rank {adapter.rank} where {origin.rank} is asked for; give `adapter=rank={adapter.rank}`, or choose another `run=`"
        )
    return {**origin.weights, **adapter.factors}


def check_same_run(before: RunConfig, now: RunConfig, checkpoint: Path, *, free: Collection[str] = ()) -> None:
    then, here = asdict(before), asdict(now)
    changed = [
        (f"{part}.{name}", then[part].get(name), here[part].get(name))
        for part in ("model", "training")
        for name in then[part] | here[part]
        if then[part].get(name) != here[part].get(name)
    ]
    if now.training.minutes:  # then nobody asked for steps
        changed = [change for change in changed if change[0] != "training.steps"]
    shown = {name: f"{name} {old} -> {new}" for name, old, new in changed}
    fixed = [
        text
        for name, text in shown.items()
        if name.startswith("model.") or name.split(".")[1] in {*MUST_STAY} - {*free}
    ]
    if fixed:
        raise CheckpointError(
            f"{checkpoint} was made with another configuration ({', '.join(fixed[:3])}); choose another `run=`"
        )
    if changed:
        say(f"going on with changes: {', '.join(shown.values())}")
