"""Trains a model on a data store. Everything lands in the run's folder; the same command again goes on where it stopped.

    txl train tiny-byte --data data/enwik8 --run runs/first
    txl train wikitext-103-standard --data data/wikitext-103 --run runs/wt103 --model.memory 640 --training.lanes 30
    txl train my-config.toml --data data/logs --run runs/logs --print_config
    torchrun --nproc-per-node 4 -m -- transformer_xl train enwik8-12l --data data/enwik8 --run runs/e12 --device cuda

A preset (txl presets), or a JSON or TOML file, then --config files, then single fields: the later ones win."""

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.config import RunConfig
from transformer_xl.config.sources import options, resolve
from transformer_xl.errors import ConfigError
from transformer_xl.presets import find_preset

if TYPE_CHECKING:
    from transformer_xl.training.ranks import Ranks


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("start", metavar="PRESET_OR_CONFIG", help="a preset's name, or a .json or .toml file")
    parser.add_argument("--data", metavar="DIR", required=True, help="a store made by txl prepare")
    parser.add_argument("--run", metavar="RUN", help="the folder that everything lands in")
    parser.add_argument(
        "--config", metavar="FILE", action="append", default=[], help="fields that change the start; may be given again"
    )
    parser.add_argument(
        "--resume",
        metavar="auto|PATH|false",
        default="auto",
        help="go on where the run stopped (auto), or from a checkpoint",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        help="under torchrun: each process has the whole model (ddp, unless asked otherwise) or its share of every weight (fsdp)",
    )
    parser.add_argument("--print_config", action="store_true", help="print the resolved configuration as JSON and stop")
    group = parser.add_argument_group("fields of the configuration")
    for name, choices, explanation in options():
        group.add_argument(f"--{name}", metavar=choices or "VALUE", help=explanation.replace("%", "%%"))


def run(arguments: argparse.Namespace) -> int:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if arguments.parallel is not None:
            raise ConfigError(
                f"--parallel {arguments.parallel} is for several processes, and this is one; start them with:"
                " torchrun --nproc-per-node N -m -- transformer_xl train ..."
            )
        return run_rank(arguments, ranks=None)
    from transformer_xl.training.ranks import joined

    with joined(parallel=arguments.parallel or "ddp", device=arguments.device) as ranks:
        return run_rank(arguments, ranks=ranks)


def run_rank(arguments: argparse.Namespace, *, ranks: "Ranks | None") -> int:
    """`ranks` is None outside torchrun: then nothing is loaded that a wrong word does not need."""
    from transformer_xl.data.store import open_store

    store = open_store(arguments.data)
    config = resolved(arguments, vocabulary=store.manifest.vocabulary_size)
    talks = ranks is None or ranks.first
    if arguments.print_config:
        if talks:
            print(json.dumps(asdict(config), indent=2))
        return 0
    if arguments.run is None:
        raise ConfigError("--run is missing; name the folder that everything lands in")
    from transformer_xl.training import train
    from transformer_xl.training.ranks import ALONE

    outcome = train(
        config,
        store=store,
        folder=Path(arguments.run),
        resume=arguments.resume,
        device=arguments.device,
        command=shlex.join([*launcher(ranks), "train", *arguments.words]),
        ranks=ranks or ALONE,
    )
    if outcome.stopped_by is not None:
        if talks:
            print(f"stopped at step {outcome.step} and saved; the same command goes on", file=sys.stderr)
        return 128 + int(outcome.stopped_by)
    if talks:
        print(f"{arguments.run}: trained to step {outcome.step}; next: txl evaluate {arguments.run}")
    return 0


def launcher(ranks: "Ranks | None") -> list[str]:
    """The words before the command, so that what is written down can be typed again. Without `--`, torchrun of some Pythons takes --run for its
    own --run-path."""
    if ranks is None or ranks.count == 1:
        return ["txl"]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.count))
    machines = ["--nnodes", str(ranks.count // here)] if here != ranks.count else []
    return ["torchrun", *machines, "--nproc-per-node", str(here), "-m", "--", "transformer_xl"]


def resolved(arguments: argparse.Namespace, *, vocabulary: int) -> RunConfig:
    """The configuration that the words ask for, with the vocabulary of the data unless another is asked for by name."""
    words = {name: getattr(arguments, name) for name, _, _ in options() if getattr(arguments, name) is not None}
    files = [Path(file) for file in arguments.config]
    start = Path(arguments.start)
    is_file = start.suffix in (".json", ".toml") or start.is_file()
    base = None if is_file else find_preset(arguments.start).run
    config = resolve(base, vocabulary=vocabulary, files=[start, *files] if is_file else files, words=words)
    if config.model.vocabulary != vocabulary:
        raise ConfigError(
            f"model.vocabulary: {config.model.vocabulary} where {arguments.data} has {vocabulary} tokens; leave it out, or prepare other data"
        )
    return config
