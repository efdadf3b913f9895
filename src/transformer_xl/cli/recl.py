"""How much context models make use of: the paper's Relative Effective Context Length, of a group of models. Each model's losses land in
RUN/evaluations, and are not computed again while its weights, the text and the lengths stay the same; an interrupted command goes on.

    txl recl runs/xl runs/vanilla                           (table, figures and recl.json in runs/xl/evaluations/recl)
    txl recl runs/xl runs/vanilla --step 50 --longest 600 --tokens 5000
    txl recl runs/xl --losses lstm.npz qrnn.npz             (models of others join as losses)
    txl recl --losses a.npz b.npz --json

A file of losses has one array for each context length, named c100, c200, ...: the loss in nats of each token, in corpus order, given exactly
so many tokens before it. Which tokens: the first N of the split that have the longest context before them."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.cli.devices import add_device, say_device
from transformer_xl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from transformer_xl.analysis.contexts import Stretch
    from transformer_xl.analysis.recl import EffectiveLength, Group
    from transformer_xl.config import EvaluationConfig
    from transformer_xl.data.store import Split
    from transformer_xl.library import Loaded

STEP = 100
STEPS = 10
"""Context lengths where no longest is given."""
TOKENS = 10_000
"""Scored where nothing else is asked for."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="*", help="runs' folders, or checkpoints")
    add("--losses", metavar="FILE", nargs="+", default=[], help="losses of other models, as .npz")
    add("--step", metavar="C", type=int, help=f"from one context length to the next (default: {STEP})")
    add("--start", metavar="C", type=int, help="the shortest context (default: one step)")
    add("--longest", metavar="L", type=int, help=f"the longest context (default: {STEPS} lengths)")
    add("--ratio", metavar="R,R,...", default="0.1,0.5,1.0", help="shares of the hardest tokens (default: %(default)s)")
    add("--threshold", metavar="G", type=float, default=0.01, help="the least gain of a step (default: %(default)s)")
    add("--tokens", metavar="N", type=int, help=f"how many are scored (default: up to {TOKENS})")
    add("--split", default="test", help="train, valid or test (default)")
    add("--data", metavar="DIR", help="the data, where it is not where the first run was trained on it")
    add("--memory", metavar="M", type=int, help="positions remembered by the models that have a memory")
    add("--out", metavar="DIR", help="where recl.json and the figures go")
    add_device(parser)
    add("--json", action="store_true", help="print the result as JSON")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A model of the group."""

    name: str
    losses: "dict[int, NDArray[Any]]"
    about: dict[str, Any]
    """What made the losses; nothing for files of others."""


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.analysis.loss_files import read_losses
    from transformer_xl.analysis.recl import effective_lengths, make_group
    from transformer_xl.analysis.recl_pictures import draw_recl
    from transformer_xl.files import write_json

    if not arguments.runs and not arguments.losses:
        raise ConfigError("no model is named; give runs, or --losses with files of losses")
    for option in () if arguments.runs else ("tokens", "memory", "data"):
        if getattr(arguments, option) is not None:
            raise ConfigError(f"--{option} is for runs, and only files of losses are given; leave it out")
    ratios = chosen_ratios(arguments.ratio)
    if not 0 < arguments.threshold < float("inf"):
        raise ConfigError(f"--threshold: {arguments.threshold} is no gain to ask for; give one above 0, such as 0.01")
    check_names([*arguments.runs, *arguments.losses])
    files = []
    for path in arguments.losses:
        losses, about = read_losses(Path(path))
        files.append(Member(name=name_of(path), losses=losses, about=about))
    lengths = chosen_lengths(arguments, files)
    if files:  # looked at before runs are read, which may take long
        make_group({member.name: member.losses for member in files}, lengths=lengths)
    runs, run_folder = read_runs(arguments, files, lengths) if arguments.runs else ([], None)
    members = [*runs, *files]
    known = [member for member in members if "text" in member.about]  # files of others do not say
    for member in known[1:]:
        if member.about["text"] != known[0].about["text"]:
            both = f"{known[0].name} and {member.name} were scored on different tokens"
            raise DataError(f"{both}; compare models on one text with one tokenizer")
    group = make_group({member.name: member.losses for member in members}, lengths=lengths)
    found = {ratio: effective_lengths(group, ratio=float(ratio), threshold=arguments.threshold) for ratio in ratios}
    result = summary(arguments, group, found, members)
    folder = Path(arguments.out) if arguments.out else run_folder
    pictures = []
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "recl.json", result)
        pictures = draw_recl(group, folder, ratio=ratios[0])
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{table(group, found)}\n")
    contexts = f"contexts {lengths[0]} to {lengths[-1]} by {group.step}"
    print(f"{group.positions:,} tokens, {contexts}, gain {arguments.threshold}")
    for line in remarks(group, found, members):
        print(line)
    for path in pictures:
        print(f"plot: {path}")
    if folder and not pictures:
        print("no figures: matplotlib is not installed (pip install 'transformer-xl[viz]')")
    return 0


# --- what was asked for


def chosen_ratios(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        try:
            ratio = float(word)
        except ValueError:
            raise ConfigError(f"--ratio: {word!r} is no number; write shares as 0.1,0.5,1.0") from None
        if not 0 < ratio <= 1:
            raise ConfigError(f"--ratio: {word} is not a share of the tokens; give one above 0 and up to 1")
    return words


def chosen_lengths(arguments: argparse.Namespace, files: list[Member]) -> list[int]:
    for name in ("step", "longest"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name}: {value} is no length; give 1 or more tokens")
    held = sorted({length for member in files for length in member.losses}) if not arguments.runs else []
    step, start, longest = arguments.step, arguments.start, arguments.longest
    if step is None:
        gaps = [later - earlier for earlier, later in pairwise(held)]
        step = min(gaps, default=STEP)
    if start is None:
        start = held[0] if held else step
    if longest is None:
        longest = held[-1] if held else start + (STEPS - 1) * step
    if start < 0 or (start < 1 and arguments.runs):
        raise ConfigError(f"--start: a model with a context of {start} tokens sees nothing; give 1 or more")
    lengths = list(range(start, longest + 1, step))
    if len(lengths) < 2:
        raise ConfigError(
            f"contexts from {start} to {longest} by {step} are {len(lengths)}, and a gain needs two;"
            " choose --start, --step and --longest so that there are more"
        )
    return lengths


def name_of(path: str) -> str:
    return Path(path).stem if path.endswith(".npz") else Path(path).resolve().name


def check_names(paths: list[str]) -> None:
    seen: dict[str, str] = {}
    for path in paths:
        if (name := name_of(path)) in seen:
            raise ConfigError(f"{seen[name]} and {path} would both be called {name}; rename one of them, or drop it")
        seen[name] = path


# --- losses


def read_runs(
    arguments: argparse.Namespace, files: list[Member], lengths: list[int]
) -> tuple[list[Member], Path | None]:
    """The runs with their losses, and where the result goes unless told."""
    from transformer_xl.analysis.contexts import make_stretch
    from transformer_xl.checkpoint import same_tokenizer
    from transformer_xl.library import load

    loaded = [load(path, device=arguments.device) for path in arguments.runs]
    first = loaded[0]
    for path, other in zip(arguments.runs[1:], loaded[1:], strict=True):
        if not same_tokenizer(other.checkpoint.folder, first.checkpoint.folder / "tokenizer"):
            raise DataError(
                f"{arguments.runs[0]} ({first.tokenizer.size:,} {first.tokenizer.kind} tokens) and {path}"
                f" ({other.tokenizer.size:,} {other.tokenizer.kind} tokens) have different tokenizers; compare models of the same tokens"
            )
    split = first.store(arguments.data).split(arguments.split)
    tokens = arguments.tokens
    if tokens is None and files:  # they say how many are scored
        tokens = len(files[0].losses[min(files[0].losses)])
    stretch = make_stretch(split, lengths=lengths, tokens=tokens, most=TOKENS)
    settings = chosen_evaluation(arguments, loaded)
    say_device(arguments, first)
    members = [
        read_contexts(path, one, split, stretch=stretch, evaluation=evaluation)
        for path, one, evaluation in zip(arguments.runs, loaded, settings, strict=True)
    ]
    run_folder = first.checkpoint.run
    return members, run_folder.inside("evaluations", "recl") if run_folder else None


def chosen_evaluation(arguments: argparse.Namespace, loaded: "list[Loaded]") -> "list[EvaluationConfig]":
    """Each run's own lengths, with another memory for those that have one."""
    own = [one.config.evaluation for one in loaded]
    if arguments.memory is None:
        return own
    if arguments.memory < 0:
        raise ConfigError(f"--memory: {arguments.memory} is negative; a memory has 0 or more positions")
    if not any(evaluation.memory for evaluation in own):
        raise ConfigError(f"--memory: {arguments.memory} where no run reads with a memory; leave it out")
    return [
        replace(evaluation, memory=arguments.memory, same_length=evaluation.same_length and arguments.memory > 0)
        if evaluation.memory
        else evaluation
        for evaluation in own
    ]


def read_contexts(
    path: str, loaded: "Loaded", split: "Split", *, stretch: "Stretch", evaluation: "EvaluationConfig"
) -> Member:
    from transformer_xl.analysis.contexts import context_losses
    from transformer_xl.checkpoint.folder import CHECKSUMS
    from transformer_xl.files import digest

    checkpoint = loaded.checkpoint
    found = context_losses(
        loaded.model,
        split,
        stretch=stretch,
        evaluation=evaluation,
        training=loaded.config.training,
        keep=checkpoint.run.made("evaluations") / f"recl-{split.name}.npz" if checkpoint.run else None,
        made_by={"checkpoint": digest(checkpoint.folder / CHECKSUMS), "step": checkpoint.about.step},
    )
    return Member(name=name_of(path), losses=found.losses, about=found.about)


# --- what came out


def summary(
    arguments: argparse.Namespace, group: "Group", found: "dict[str, dict[str, EffectiveLength]]", members: list[Member]
) -> dict[str, Any]:
    from transformer_xl.analysis.recl import relative_gains

    def by_length(value_IC: "NDArray[Any]") -> dict[str, dict[str, float]]:
        rows = zip(group.names, value_IC.tolist(), strict=True)
        return {name: dict(zip(map(str, group.lengths), row, strict=False)) for name, row in rows}

    return {
        "recl": {name: {ratio: found[ratio][name].length for ratio in found} for name in group.names},
        "at_least": {
            name: [ratio for ratio in found if found[ratio][name].at_least]
            for name in group.names
            if any(found[ratio][name].at_least for ratio in found)
        },
        "lengths": list(group.lengths),
        "threshold": arguments.threshold,
        "tokens": group.positions,
        "perplexity": by_length(group.perplexities()),
        "gain": {ratio: by_length(relative_gains(group, ratio=float(ratio))) for ratio in found},
        "models": {member.name: member.about for member in members},
    }


def table(group: "Group", found: "dict[str, dict[str, EffectiveLength]]") -> str:
    width = max(len("model"), *map(len, group.names))
    lines = [f"{'model':<{width}}" + "".join(f"{'r=' + ratio:>9}" for ratio in found)]
    lines += [f"{name:<{width}}" + "".join(f"{found[ratio][name]!s:>9}" for ratio in found) for name in group.names]
    return "\n".join(lines)


def remarks(group: "Group", found: "dict[str, dict[str, EffectiveLength]]", members: list[Member]) -> Iterator[str]:
    for member in members:
        seen = member.about.get("sees_at_most")
        if isinstance(seen, int) and seen < group.lengths[-1]:
            yield f"{member.name} sees at most {seen} tokens: longer contexts change nothing for it"
    if any(effective.at_least for by_name in found.values() for effective in by_name.values()):
        yield ">= : every step up to the longest context was worth it; a larger --longest may show more"
