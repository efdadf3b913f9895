"""How good a model is on a split or a text, with the rule that made the figure. Results land in RUN/evaluations.

    txl evaluate runs/first
    txl evaluate runs/first --memory 512 --clamp 400 --same-length
    txl evaluate runs/first --sweep 0,64,128,256,512        (the paper's attention-length study: table and plot)
    txl evaluate runs/vanilla --sliding                     (a full window for each predicted token)
    txl evaluate runs/first --adapt both                    (learning while it reads, as txl tune-adaptation found)
    txl evaluate runs/first --text notes.txt                (on a text, in its own tokens)
    txl evaluate --text notes.txt                           (the same by the model in the box)

Rules: exact (default) scores every token after the first once, in full context, whatever the number of lanes; paper is the original's own
ten columns, each starting cold, the remainder dropped."""

import argparse
import hashlib
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.cli.adapting import add_adapt, chosen
from transformer_xl.cli.devices import ADAPTER_HELP, add_device, add_precision, say_device
from transformer_xl.cli.models import add_field, add_run, load_named, store_of_text
from transformer_xl.errors import ConfigError, shown

if TYPE_CHECKING:
    from transformer_xl.config import EvaluationConfig
    from transformer_xl.data.store import Split
    from transformer_xl.evaluation.scoring import RuleName
    from transformer_xl.library import Loaded


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add = parser.add_argument
    add("--data", metavar="DIR", help="the data, where it is not where the run was trained on it")
    add("--text", metavar="PATH", help="a text in place of a split, all of it, in the model's own tokens")
    add_field(parser)
    add("--split", help="train, valid or test (default)")
    add("--segment", metavar="T", type=int, help="tokens read at once")
    add("--memory", metavar="M", type=int, help="positions remembered")
    add("--clamp", dest="clamp_len", metavar="C", type=int, help="distances beyond C look alike; 0: never")
    add("--same-length", action="store_true", default=None, help="every token sees as many keys")
    add("--lanes", metavar="B", type=int, help="parallel streams; the exact figure does not depend on it")
    add("--rule", choices=("exact", "paper"), default="exact", help="how the figure is made")
    add("--tokens", metavar="N", type=int, help="only the first N tokens of the split")
    add("--sweep", metavar="M,M,...", help="evaluate with each of these memories")
    add("--sliding", action="store_true", help="vanilla evaluation, for models without memory")
    add("--per-token", metavar="FILE", help="write each token's loss in nats, in order, as a .npy array")
    add("--score-boundaries", action="store_true", help="lm1b: score the pair of marks between sentences too")
    add("--weights", choices=("exact", "int8"), default="exact", help="int8: what rounding the weights to bytes costs")
    add("--adapter", metavar="FILE", help=ADAPTER_HELP)
    add_device(parser)
    add_precision(parser, default="float32")
    add("--json", action="store_true", help="print the result as JSON")
    add_adapt(parser)


def run(arguments: argparse.Namespace) -> int:
    memories = sweep_lengths(arguments.sweep)
    if arguments.tokens is not None and arguments.tokens < 2:
        raise ConfigError(f"--tokens: {shown(arguments.tokens)} leaves nothing to predict; take at least 2")
    if arguments.sweep and (arguments.per_token or arguments.sliding or arguments.adapt):
        raise ConfigError("--sweep evaluates many times; it goes with neither --per-token nor --sliding nor --adapt")
    if arguments.per_token and not Path(arguments.per_token).parent.is_dir():
        raise ConfigError(f"--per-token: there is no folder {Path(arguments.per_token).parent}; make it first")
    if arguments.text is not None and arguments.data is not None:
        raise ConfigError("--text and --data are two texts; give one of them")
    if arguments.text is None and arguments.field:
        raise ConfigError(f"--field {arguments.field[0]} is for a --text of records; leave it out")
    if arguments.text is not None and arguments.split is not None:
        raise ConfigError("--split is of a store, and --text has none; leave one of them out")
    arguments.split = arguments.split or "test"
    where = {"device": arguments.device, "precision": arguments.precision, "adapter": arguments.adapter}
    loaded = load_named(arguments.run, **where)
    with ExitStack() as opened:
        if arguments.text is not None:
            text = store_of_text(loaded, arguments.text, field=arguments.field)
            arguments.data, arguments.split = opened.enter_context(text), "train"
        return measure(arguments, loaded, memories)


def measure(arguments: argparse.Namespace, loaded: "Loaded", memories: list[int]) -> int:
    if arguments.data is not None:  # figures are of the text that was read, whatever the model learned from
        read = loaded.store(arguments.data).manifest
        loaded.checkpoint.about = replace(loaded.checkpoint.about, corpus=read.name, rule=read.rule)
    asked = {name: getattr(arguments, name) for name in ("segment", "memory", "clamp_len", "same_length")}
    lengths = replace(loaded.config.evaluation, **{name: value for name, value in asked.items() if value is not None})
    say_device(arguments, loaded)
    return sweep(arguments, loaded, lengths, memories) if memories else single(arguments, loaded, lengths)


def single(arguments: argparse.Namespace, loaded: "Loaded", lengths: "EvaluationConfig") -> int:
    import time

    import numpy as np

    from transformer_xl.adaptation.evaluating import adaptive_rule, score_adapting
    from transformer_xl.config import AdaptationConfig
    from transformer_xl.console import progress
    from transformer_xl.evaluation import UNIT_NAMES, figures, make_rule
    from transformer_xl.files import atomic_file

    split = chosen_split(arguments, loaded)
    name: RuleName = "sliding" if arguments.sliding else arguments.rule
    rule = make_rule(loaded.model, lengths, name=name, tokens=len(split), **asked_of_rule(arguments))
    how, statistics = AdaptationConfig(), None
    if asked := chosen(arguments, loaded):
        how, statistics = loaded.with_statistics(asked, segment=rule.segment)
        if arguments.lanes not in (None, 1):
            raise ConfigError(f"--lanes {arguments.lanes}: what is learned is carried on from token to token; take 1")
    rule, how = adaptive_rule(rule, how)
    started_at = time.perf_counter()
    with progress(f"evaluating {arguments.split}", total=len(split) - 1, unit="tokens") as advance:
        losses = score_adapting(loaded.model, split, how, rule=rule, statistics=statistics, advance=advance)
    found = figures(losses, split=split, rule=rule, seconds=time.perf_counter() - started_at)
    if arguments.per_token:
        with atomic_file(arguments.per_token) as file:
            np.save(file, losses[~np.isnan(losses)])  # scored tokens only, in order
    result = {**header(arguments, loaded), **found.as_json()}
    rounded = "" if rule.weights == "exact" else f"-{rule.weights}"
    rounded += "" if rule.precision == "float32" else f"-{rule.precision}"
    rounded += f"-adapt-{arguments.adapt}" if rule.adaptation else ""
    record(
        loaded, result, name=f"{read_name(arguments)}-{rule.name}-memory-{rule.memory}-segment-{rule.segment}{rounded}"
    )
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        about = loaded.checkpoint.about
        print(f"{UNIT_NAMES[about.unit]}: {found.value(about.unit):.4f}")
        print(
            f"loss {found.loss_nats:.5f} nats, {found.bits_per_token:.4f} bits per token, {found.bits_per_byte:.4f} bits per byte, perplexity {found.perplexity:.2f}"
        )
        read = arguments.text or f"{about.corpus} {arguments.split} ({about.rule})"
        print(f"{found.tokens:,} tokens of {read}")
        print(f"rule {rule.sentence()}")
        print(f"{found.tokens / found.seconds:,.0f} tokens/s")
    return 0


def sweep(arguments: argparse.Namespace, loaded: "Loaded", lengths: "EvaluationConfig", memories: list[int]) -> int:
    from transformer_xl.pictures import can_draw

    found = loaded.sweep(
        memories,
        data=arguments.data,
        split=arguments.split,
        segment=lengths.segment,
        clamp_len=lengths.clamp_len,
        same_length=lengths.same_length,
        rule=arguments.rule,
        tokens=arguments.tokens,
        **asked_of_rule(arguments),
    )
    result = {**header(arguments, loaded), "sweep": [one.as_json() for one in found]}
    record(loaded, result, name=f"{read_name(arguments)}-sweep")
    if loaded.checkpoint.run is not None and can_draw():
        path = loaded.checkpoint.run.made("figures") / f"sweep-{read_name(arguments)}{adapted(loaded)}.png"
        found.plot(path)
        if not arguments.json:
            print(f"plot: {path}")
    print(json.dumps(result, indent=2) if arguments.json else found)
    return 0


def asked_of_rule(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("lanes", "score_boundaries", "weights")}


def sweep_lengths(text: str | None) -> list[int]:
    try:
        lengths = [int(word) for word in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"--sweep: {text!r} is no list of lengths; write them as 0,128,256") from None
    if any(length < 0 for length in lengths):
        raise ConfigError(f"--sweep: {min(lengths)} is negative; a memory has 0 or more positions")
    return lengths


def chosen_split(arguments: argparse.Namespace, loaded: "Loaded") -> "Split":
    split = loaded.store(arguments.data).split(arguments.split)
    return split if arguments.tokens is None else split.first(arguments.tokens)


def header(arguments: argparse.Namespace, loaded: "Loaded") -> dict[str, object]:
    about = loaded.checkpoint.about
    return {
        "checkpoint": str(loaded.checkpoint.folder),
        "step": about.step,
        "corpus": about.corpus,
        "corpus_rule": about.rule,
        "split": arguments.split if arguments.text is None else None,
        **({} if arguments.text is None else {"text": str(Path(arguments.text).resolve())}),
        "unit": about.unit,
        **({} if arguments.adapter is None else {"adapter": arguments.adapter}),
    }


def read_name(arguments: argparse.Namespace) -> str:
    """Of what was read: a split's, or a text's, by its contents too, for many texts have one name."""
    if arguments.text is None:
        return str(arguments.split)
    folder = Path(arguments.data)
    (file,) = (file for file in folder.glob("train.tokens.bin"))
    return f"text-{Path(arguments.text).resolve().name}-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"


def record(loaded: "Loaded", result: dict[str, object], *, name: str) -> None:
    from transformer_xl.files import write_json

    if loaded.checkpoint.run is not None:
        write_json(loaded.checkpoint.run.made("evaluations") / f"{name}{adapted(loaded)}.json", result)


def adapted(loaded: "Loaded") -> str:
    """The end of a name, so that figures of a run with an adapter stand beside its own."""
    from transformer_xl.checkpoint.adapter_file import fingerprint

    adapter = loaded.checkpoint.adapter
    return "" if adapter is None else f"-adapter-{fingerprint(adapter.factors)[:8]}"
