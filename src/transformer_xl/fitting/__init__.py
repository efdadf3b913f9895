"""A model of somebody's own text, from the files to figures: looks, chooses, prepares, trains, and tells how it went.

    paths -> Findings (looking) -> Plan (beginning, choosing: weights, tokens, size, why) -> a store and a run -> Report (telling: beside xz and n-grams)

run = txl.fit("logs/", minutes=10)
run = txl.fit("new.log", from_="runs/logs")     begins with the weights of a run, and its tokens; "nothing": with none, whatever the model in the box knows
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformer_xl.arguments import checked
from transformer_xl.checkpoint.box import BOX
from transformer_xl.console import say
from transformer_xl.data.corpora.inputs import check_paths
from transformer_xl.data.corpora.own_text import prepare_own_text
from transformer_xl.data.corpora.selection import Inputs
from transformer_xl.data.store import Store, open_store
from transformer_xl.devices import AUTO
from transformer_xl.errors import ConfigError, DataError
from transformer_xl.files import atomic_folder, write_json
from transformer_xl.fitting.beginning import begin_with, check_wish
from transformer_xl.fitting.choosing import choose_model, choose_tokens
from transformer_xl.fitting.looking import look, on_disk
from transformer_xl.fitting.plan import DATA, PLAN, Plan, changes_of, plan_in
from transformer_xl.running import Run, preset_for
from transformer_xl.training import OnStep, train_unstuck
from transformer_xl.training.origin import open_origin

DEFAULT_MINUTES = 10.0


@checked
def fit(
    what: Path | str | Sequence[Path | str],
    *,
    minutes: float = DEFAULT_MINUTES,
    run: Path | str | None = None,
    inputs: Inputs | None = None,
    device: str = AUTO,
    on_step: OnStep | None = None,
    from_: Path | str | None = None,
) -> Run:
    """Looks at the text, chooses tokens and a model for it, this machine and this time, and trains it. Called again, it goes on where it stopped. Everything
    lands in the folder `run`, or runs/NAME of the text, with the store in its folder `data`. `from_`: a run that it begins with, its tokens, model and
    weights; "box": the model in the box; "nothing": no weights. Unless told, it begins with the model in the box where that knows such text."""
    folder, plan, store = prepared(what, minutes=minutes, run=run, inputs=inputs, device=device, from_=from_)
    words = f"{list(plan.paths)!r}, minutes={minutes:g}, run={str(folder)!r}"
    words += "" if plan.wish is None else f", from_={plan.wish!r}"
    return trained(folder, plan, store, device=device, on_step=on_step, command=f"txl.fit({words})")


def prepared(
    what: Path | str | Sequence[Path | str],
    *,
    minutes: float = DEFAULT_MINUTES,
    run: Path | str | None = None,
    inputs: Inputs | None = None,
    device: str = AUTO,
    from_: Path | str | None = None,
) -> tuple[Path, Plan, Store]:
    """Up to training: the run's folder, the plan and the store, made or found there."""
    if not 0 < minutes < math.inf:
        raise ConfigError(f"`minutes=` {minutes:g} is no time; give more than 0")
    paths = (str(what),) if isinstance(what, str | Path) else tuple(map(str, what))
    if not paths:
        raise DataError("nothing to fit; give files or folders")
    check_paths(paths)
    folder = Path(run) if run is not None else Path("runs") / (Path(paths[0]).resolve().stem or "text")
    asked: dict[str, Any] = {"paths": paths, "minutes": float(minutes), "inputs": inputs or Inputs()}
    asked["wish"] = wish = None if from_ is None else str(from_)
    if (folder / PLAN).exists():
        plan = plan_in(folder, asked)
        if plan.origin is not None and plan.origin != BOX and not Path(plan.origin).exists():
            raise ConfigError(
                f"{folder} was begun with the weights of {plan.origin}, which is not there any more; put it back to go on, or use {folder} as it is"
            )
        if any(plan.disk) and plan.disk != (now := on_disk(paths)):
            say(
                f"the text is not what it was when {folder} was begun: {plan.disk[0]:,} files of {plan.disk[1]:,} bytes then, {now[0]:,} of {now[1]:,} now;"
                f" going on with what was read then. To learn the new text, choose another `run=` and give `from={folder}`"
            )
        return folder, plan, open_store(folder / DATA)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty, and nothing was fitted there; choose another `run=`")
    for path in map(Path, paths):
        if path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
            raise DataError(f"{folder} lies in {path}, whose text goes into it; choose another `run=`")
    check_wish(wish)
    findings = look(paths, inputs=asked["inputs"])
    say(findings.in_words)
    origin, why = begin_with(wish, findings, device=device)
    tokens = choose_tokens(findings, origin)
    tokens["reasons"] = (*why, *tokens["reasons"])
    plan = Plan(**asked, **tokens, origin=origin, disk=on_disk(paths))
    # Whole or not at all: a plan without its text, or a text without its plan, is nothing to go on with.
    with atomic_folder(folder) as beside:
        store = prepare_own_text(paths, out=beside / DATA, settings=plan.settings)
        plan = plan if origin is not None else replace(plan, preset=preset_for(store))
        config, reasons = choose_model(store, plan.base, minutes=minutes, device=device, origin=origin)
        plan = replace(plan, reasons=(*plan.reasons, *reasons), changes=changes_of(config, plan.base))
        write_json(beside / PLAN, asdict(plan))
    return folder, plan, open_store(folder / DATA)


def trained(folder: Path, plan: Plan, store: Store, *, device: str = AUTO, **how: Any) -> Run:
    """`how`: what else training takes, such as `on_step`, and the `command` that asked for it."""
    origin = None if plan.origin is None else open_origin(plan.origin, store=store)
    outcome = train_unstuck(plan.config(store), store=store, folder=folder, device=device, origin=origin, **how)
    return Run(folder, stopped=outcome.stopped_by is not None)
