"""Where a run begins: from nothing, or exactly where it stopped."""

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import torch

from transformer_xl.checkpoint import RunFolder, TrainingState, read_training_state, same_tokenizer, verify
from transformer_xl.checkpoint.folder import CHECKSUMS, read_about, read_config, read_weights
from transformer_xl.config import RunConfig
from transformer_xl.console import say
from transformer_xl.data.store import Store
from transformer_xl.errors import CheckpointError
from transformer_xl.files import put_back, write_json
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
    run: RunFolder, config: RunConfig, *, store: Store, resume: str, device: torch.device, ranks: Ranks = ALONE
) -> Session:
    """`resume`: "auto" goes on where the run stopped, if it has begun; "false" refuses if it has; else the checkpoint to go on from."""
    if ranks.first:
        run.clear_half_written()
    session = Session.fresh(config, store=store, device=device, ranks=ranks)
    checkpoint = ranks.from_first(lambda: checkpoint_to_go_on_from(run, resume))
    if checkpoint is not None:
        state = read_training_state(checkpoint)
        check_same_run(read_config(checkpoint / "config.json"), config, checkpoint, free=free_to_change(state))
        if not same_tokenizer(checkpoint, store.folder):
            raise CheckpointError(
                f"{store.folder} has another vocabulary than {checkpoint} was trained on; give the data it began with"
            )
        check_same_data(state, store, checkpoint)
        weights = read_weights(checkpoint / "model.safetensors", model=session.model)
        session.restore(state, weights=weights, folder=checkpoint)
        say(f"going on from step {session.step} ({checkpoint})")
        if ranks.first and checkpoint.parent == run.checkpoints:
            name_the_best(run, session, checkpoint)
        if (saved := state.counters.ranks) != ranks.count:
            say(
                f"going on with {ranks.count} rank{'s' * (ranks.count > 1)} where {saved} saved: each lane keeps its place and memory, but the random"
                " states of dropout are drawn anew from the seed, so weights are no longer bit-identical"
            )
    if ranks.first:
        write_json(run.config, asdict(config))
    return session


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


def check_same_run(before: RunConfig, now: RunConfig, checkpoint: Path, *, free: Collection[str] = ()) -> None:
    then, here = asdict(before), asdict(now)
    changed = [
        (f"{part}.{name}", then[part].get(name), here[part].get(name))
        for part in ("model", "training")
        for name in then[part] | here[part]
        if then[part].get(name) != here[part].get(name)
    ]
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
