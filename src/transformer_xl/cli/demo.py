"""Start to end in minutes, with nothing but this machine: prepares Python's own standard library, trains a small model on its bytes, evaluates it
with and without memory beside an n-gram model of the same bytes, draws, and writes some Python. Everything lands in one folder."""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from transformer_xl.config import RunConfig
    from transformer_xl.data.store import Split, Store

WARM_UP_STEPS, CALIBRATION_STEPS = 8, 16
FEWEST_STEPS, MOST_STEPS = 100, 100_000
TEST_TOKENS = 200_000
NGRAM_ORDER = 5
MEMORIES = (0, 128, 256, 512)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="RUN", default="runs/demo", help="the folder that everything lands in")
    parser.add_argument("--minutes", type=float, default=4.0, help="how long to train")
    parser.add_argument("--paper", action="store_true", help="train the paper's own configuration for as long, too")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.minutes > 0:
        raise InputError(f"--minutes: {arguments.minutes} is no time; give more than 0")
    from transformer_xl.checkpoint import RunFolder
    from transformer_xl.checkpoint.folder import read_config
    from transformer_xl.console import progress
    from transformer_xl.evaluation import evaluate, make_rule
    from transformer_xl.evaluation.ngram import witten_bell_bits
    from transformer_xl.evaluation.sweep import draw_sweep, sweep_table
    from transformer_xl.files import write_json
    from transformer_xl.library import load
    from transformer_xl.training import train_unstuck

    folder = Path(arguments.run)
    store = prepared(folder / "data")
    command = f"txl demo --run {folder} --minutes {arguments.minutes:g}{' --paper' * arguments.paper}"
    runs = {"demo": folder, **({"paper-demo": folder / "paper"} if arguments.paper else {})}
    for preset, place in runs.items():
        config = demo_config(place, store, minutes=arguments.minutes, preset=preset)
        which = "" if preset == "demo" else " of the paper's configuration"
        heading(f"Training {config.training.steps} steps{which}, about {arguments.minutes:g} minutes")
        outcome = train_unstuck(config, store=store, folder=place, command=command)
        if outcome.stopped_by is not None:
            print(f"stopped at step {outcome.step} and saved; txl demo goes on from there", file=sys.stderr)
            return 128 + int(outcome.stopped_by)
    config = read_config(RunFolder(folder).config)

    heading(f"Evaluating on {TEST_TOKENS:,} held-out bytes")
    loaded = load(folder)
    test = store.split("test").first(TEST_TOKENS)
    ngram = witten_bell_bits(seen_bytes(store, config), test.tokens, order=NGRAM_ORDER, vocabulary=256)
    results = []
    for memory in MEMORIES:
        rule = make_rule(loaded.model, replace(config.evaluation, memory=memory), tokens=len(test))
        with progress(f"memory {memory}", total=len(test) - 1, unit="tokens") as advance:
            results.append(evaluate(loaded.model, test, rule=rule, advance=advance))
    run_folder = RunFolder(folder)
    draw_sweep(
        results,
        run_folder.made("figures") / "sweep-test.png",
        unit="bits_per_byte",
        trained=config.model.memory,
        title="demo",
    )
    write_json(
        run_folder.made("evaluations") / "demo.json",
        {"ngram_order": NGRAM_ORDER, "ngram_bits_per_byte": ngram, "sweep": [result.as_json() for result in results]},
    )
    print(sweep_table(results, unit="bits_per_byte", trained=config.model.memory))
    without, trained = results[0], results[MEMORIES.index(config.model.memory)]
    print("\nbits per byte, lower is better")
    rows = (
        (f"order-{NGRAM_ORDER} Witten-Bell n-gram of the same bytes", ngram),
        ("this model without memory", without.bits_per_byte),
        (f"this model with memory {config.model.memory}", trained.bits_per_byte),
        *(("the paper's configuration, as long", bits_of(place, test)) for place in (*runs.values(),)[1:]),
    )
    for name, bits in rows:
        print(f"  {name:<46}{bits:.3f}")

    heading("A sample, from 'import '")
    print("import " + loaded.generate("import ", tokens=400, temperature=0.8))

    heading("Next")
    print(f"  txl generate {folder} --prompt 'class ' --tokens 500")
    print(f"  txl evaluate {folder} --split valid --sweep 0,64,128,256,512")
    print(
        f"  txl train demo --data {folder}/data --run runs/longer --training.steps 5000 --training.validate_every 500"
    )
    print(f"\nLook at {folder}/figures/ and {folder}/README.md.")
    return 0


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def prepared(folder: Path) -> "Store":
    """The store of Python's standard library, made where it is not there yet."""
    from transformer_xl.cli import main
    from transformer_xl.data.store import MANIFEST, open_store

    heading("Preparing Python's standard library")
    if not (folder / MANIFEST).exists() and main(["prepare", "python", "--out", str(folder)]):
        raise InputError(f"the demo's data could not be prepared in {folder}")
    return open_store(folder)


def bits_of(run: Path, test: "Split") -> float:
    from transformer_xl.evaluation import evaluate, make_rule
    from transformer_xl.library import load

    loaded = load(run)
    rule = make_rule(loaded.model, loaded.config.evaluation, tokens=len(test))
    return evaluate(loaded.model, test, rule=rule).bits_per_byte


def demo_config(folder: Path, store: "Store", *, minutes: float, preset: str) -> "RunConfig":
    """The preset with as many steps as fit into `minutes` on this machine; a demo that was begun keeps its number."""
    from transformer_xl.checkpoint import RunFolder
    from transformer_xl.checkpoint.folder import read_config
    from transformer_xl.presets import find_preset
    from transformer_xl.training.session import Session
    from transformer_xl.training.step import take_step

    if RunFolder(folder).steps():
        return read_config(RunFolder(folder).config)
    import torch

    config = find_preset(preset).run
    session = Session.fresh(config, store=store, device=torch.device("cpu"))
    for number in range(WARM_UP_STEPS + CALIBRATION_STEPS):
        if number == WARM_UP_STEPS:  # those before are slower: memory is allocated, kernels are chosen
            started_at = time.perf_counter()
        if session.lanes.at_start:
            session.memories = [None]
        take_step(session, session.lanes.next())
    steps_per_minute = CALIBRATION_STEPS / (time.perf_counter() - started_at) * 60
    steps = max(FEWEST_STEPS, min(MOST_STEPS, int(steps_per_minute * minutes)))
    return replace(config, training=replace(config.training, steps=steps))


def seen_bytes(store: "Store", config: "RunConfig") -> "NDArray[np.integer]":
    """What training has read, place after place: each of them once, or all of the text after an epoch."""
    import numpy as np

    from transformer_xl.training.session import lanes_of

    lanes, places, parts = lanes_of(config, store), [], []
    for _ in range(config.training.steps):
        parts.append(lanes.next().tokens)
        if lanes.at_start:
            places.append(np.concatenate(parts, axis=1).reshape(-1))
            parts = []
        if lanes.epoch:
            return np.asarray(store.split("train").tokens)
    return np.concatenate([*places, *(np.concatenate(parts, axis=1).reshape(-1) for _ in parts[:1])])
