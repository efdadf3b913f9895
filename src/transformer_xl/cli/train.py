"""Trains a model on a data store. Everything lands in the run's folder; the same command again goes on where it stopped.

    txl train tiny-byte --data data/enwik8 --run runs/first
    txl train bytes --data data/logs --run runs/logs --minutes 10
    txl train wikitext-103-standard --data data/wikitext-103 --run runs/wt103 --model.memory 640 --training.lanes 30
    txl train my-config.toml --data data/logs --run runs/logs --print_config
    txl train --from runs/first --data data/mine --run runs/mine --training.steps 500
    txl train --from runs/first --adapter rank=8 --data data/mine --run runs/mine
    torchrun --nproc-per-node 4 -m -- transformer_xl train enwik8-12l --data data/enwik8 --run runs/e12 --device cuda

A preset (txl presets), or a JSON or TOML file, or the run whose weights it begins with (--from), then --config files, then single fields: the later
ones win."""

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.config import RunConfig
from transformer_xl.config.sources import options, resolve
from transformer_xl.devices import AUTO, DEVICES_HELP, choose_device
from transformer_xl.errors import ConfigError, shown
from transformer_xl.presets import find_preset

if TYPE_CHECKING:
    from transformer_xl.data.store import Store
    from transformer_xl.training.origin import Origin
    from transformer_xl.training.ranks import Ranks


ENDS = ("training.steps", "training.minutes")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "start",
        nargs="?",
        metavar="PRESET_OR_CONFIG",
        help="a preset's name, or a .json or .toml file; not with --from",
    )
    parser.add_argument(
        "--data", metavar="DIR", required=True, help="a store made by txl prepare: a folder, or s3://bucket/store"
    )
    parser.add_argument("--run", metavar="RUN", help="the folder that everything lands in")
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="RUN",
        help="begin with the weights of this run (box: of the model in the box); optimiser, schedule and place in the data are new, all fields are its own unless given",
    )
    parser.add_argument(
        "--adapter",
        metavar="rank=N",
        help="with --from: leave its weights as they are, and train a small adapter to them",
    )
    parser.add_argument(
        "--config", metavar="FILE", action="append", default=[], help="fields that change the start; may be given again"
    )
    parser.add_argument(
        "--resume",
        metavar="auto|PATH|false",
        default="auto",
        help="go on where the run stopped (auto), or from a checkpoint",
    )
    parser.add_argument(
        "--minutes", metavar="N", type=float, help="train so long, whatever the machine, in place of so many steps"
    )
    parser.add_argument("--epochs", metavar="N", type=float, help="or read the text so many times")
    parser.add_argument("--device", default=AUTO, help=DEVICES_HELP)
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        help="under torchrun: each process has the whole model (ddp, unless asked otherwise) or its share of every weight (fsdp)",
    )
    parser.add_argument(
        "--track",
        action="append",
        choices=("wandb", "mlflow"),
        default=[],
        help="also tell these trackers, beside TensorBoard; may be given again",
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

    device = choose_device().type.replace("mps", "cpu") if arguments.device == AUTO else arguments.device
    with joined(parallel=arguments.parallel or "ddp", device=device) as ranks:
        arguments.device = device
        return run_rank(arguments, ranks=ranks)


def run_rank(arguments: argparse.Namespace, *, ranks: "Ranks | None") -> int:
    """`ranks` is None outside torchrun: then nothing is loaded that a wrong word does not need."""
    from transformer_xl.data.store import open_store

    store = open_store(arguments.data)
    origin = begun_from(arguments, store)
    config = resolved(arguments, vocabulary=store.manifest.vocabulary_size, origin=origin)
    if arguments.epochs is not None:
        from transformer_xl.training.clock import steps_in

        steps = steps_in(arguments.epochs, config, store)
        config = replace(config, training=replace(config.training, steps=steps, minutes=0.0))
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
        started_at=arguments.started_at,
        track=list(dict.fromkeys(arguments.track)),
        origin=origin,
    )
    if outcome.stopped_by is not None:
        if talks:
            print(f"stopped at step {outcome.step} and saved; the same command goes on", file=sys.stderr)
        return 128 + int(outcome.stopped_by)
    if talks:
        for gain in outcome.gains:
            print(gain.sentence())
        if outcome.gains:
            print(f"rule {outcome.gains[0].after.rule.sentence()}")
        print(f"{arguments.run}: trained to step {outcome.step}; next: txl evaluate {arguments.run}")
    return 0


def begun_from(arguments: argparse.Namespace, store: "Store") -> "Origin | None":
    if arguments.origin is None:
        if arguments.adapter is not None:
            raise ConfigError("--adapter is trained beside a model that exists; name its run with --from")
        if arguments.start is None:
            raise ConfigError(
                "there is no model to train; give a preset (txl presets), a .json or .toml file, or --from RUN"
            )
        return None
    if arguments.start is not None:
        raise ConfigError(
            f"{arguments.start} describes a model, and --from {arguments.origin} brings one; drop one of the two, and give fields by name"
        )
    if arguments.run is not None and Path(arguments.run).resolve() == Path(arguments.origin).resolve():
        raise ConfigError(f"--run and --from are both {arguments.run}; what begins with a run's weights is another run")
    from transformer_xl.training.origin import open_origin

    return open_origin(arguments.origin, store=store, rank=adapter_rank(arguments.adapter))


def adapter_rank(text: str | None) -> int | None:
    """Of rank=8: 8."""
    if text is None:
        return None
    name, _, number = text.partition("=")
    if name != "rank" or not (number.isascii() and number.isdigit() and len(number) < 10):
        raise ConfigError(f"--adapter: {shown(text)} where rank=N is expected; write --adapter rank=8")
    return int(number)


def launcher(ranks: "Ranks | None") -> list[str]:
    """The words before the command, so that what is written down can be typed again. Without `--`, torchrun of some Pythons takes --run for its
    own --run-path."""
    if ranks is None or ranks.count == 1:
        return ["txl"]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.count))
    machines = ["--nnodes", str(ranks.count // here)] if here != ranks.count else []
    return ["torchrun", *machines, "--nproc-per-node", str(here), "-m", "--", "transformer_xl"]


def resolved(arguments: argparse.Namespace, *, vocabulary: int, origin: "Origin | None" = None) -> RunConfig:
    """The configuration that the words ask for, with the vocabulary of the data unless another is asked for by name."""
    words = {name: getattr(arguments, name) for name, _, _ in options() if getattr(arguments, name) is not None}
    ends = [name for name in ("minutes", "epochs", *ENDS) if getattr(arguments, name) is not None]
    if len(ends) > 1:
        raise ConfigError(f"--{ends[0]} and --{ends[1]} both say how long to train; give one of them")
    if arguments.minutes is not None:
        if not arguments.minutes > 0:
            raise ConfigError(f"--minutes: {arguments.minutes:g} is no time; give more than 0")
        words["training.minutes"] = str(arguments.minutes)
    files = [Path(file) for file in arguments.config]
    if origin is not None:
        config = resolve(origin.checkpoint.config, vocabulary=vocabulary, files=files, words=words)
        origin.check(config)
        return config
    start = Path(arguments.start)
    is_file = start.suffix in (".json", ".toml") or start.is_file()
    base = None if is_file else find_preset(arguments.start).run
    config = resolve(base, vocabulary=vocabulary, files=[start, *files] if is_file else files, words=words)
    if config.model.vocabulary != vocabulary:
        raise ConfigError(
            f"model.vocabulary: {config.model.vocabulary} where {arguments.data} has {vocabulary} tokens; leave it out, or prepare other data"
        )
    return config
