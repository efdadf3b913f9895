"""Start to end in minutes, with nothing but this machine: prepares Python's own standard library, trains a small model on its bytes, evaluates it
with and without memory beside an n-gram model of the same bytes, draws, and writes some Python. Everything lands in one folder."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from transformer_xl.config import RunConfig
    from transformer_xl.data.store import Split, Store

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
    from transformer_xl.evaluation.ngram import witten_bell_bits
    from transformer_xl.files import write_json
    from transformer_xl.library import load
    from transformer_xl.pictures import can_draw
    from transformer_xl.training import train_unstuck

    folder = Path(arguments.run)
    store = prepared(folder / "data")
    command = f"txl demo --run {folder} --minutes {arguments.minutes:g}{' --paper' * arguments.paper}"
    runs = {"demo": folder, **({"paper-demo": folder / "paper"} if arguments.paper else {})}
    taken: dict[str, int] = {}
    for preset, place in runs.items():
        config = demo_config(place, minutes=arguments.minutes, preset=preset)
        which = "" if preset == "demo" else " the paper's configuration"
        heading(f"Training{which} for {config.training.minutes:g} minutes")
        outcome = train_unstuck(config, store=store, folder=place, command=command)
        if outcome.stopped_by is not None:
            print(f"stopped at step {outcome.step} and saved; txl demo goes on from there", file=sys.stderr)
            return 128 + int(outcome.stopped_by)
        taken[preset] = outcome.step
    config = read_config(RunFolder(folder).config)

    heading(f"Evaluating on {TEST_TOKENS:,} held-out bytes")
    loaded = load(folder)
    test = store.split("test").first(TEST_TOKENS)
    ngram = witten_bell_bits(
        seen_bytes(store, config, steps=taken["demo"]), test.tokens, order=NGRAM_ORDER, vocabulary=256
    )
    sweep = loaded.sweep(MEMORIES, data=store.folder, tokens=TEST_TOKENS)
    run_folder = RunFolder(folder)
    if can_draw():
        sweep.plot(run_folder.made("figures") / "sweep-test.png")
    write_json(
        run_folder.made("evaluations") / "demo.json",
        {"ngram_order": NGRAM_ORDER, "ngram_bits_per_byte": ngram, "sweep": [one.as_json() for one in sweep]},
    )
    print(sweep)
    without, trained = sweep.figures[0], sweep.figures[MEMORIES.index(config.model.memory)]
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
    print(f"  txl train demo --data {folder}/data --run runs/longer --minutes 10")
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


def demo_config(folder: Path, *, minutes: float, preset: str) -> "RunConfig":
    """The preset for so long; a demo that was begun keeps its time."""
    from transformer_xl.checkpoint import RunFolder
    from transformer_xl.checkpoint.folder import read_config
    from transformer_xl.presets import find_preset

    if RunFolder(folder).steps():
        return read_config(RunFolder(folder).config)
    config = find_preset(preset).run
    return replace(config, training=replace(config.training, minutes=minutes))


def seen_bytes(store: "Store", config: "RunConfig", *, steps: int) -> "NDArray[np.integer]":
    """What training has read, place after place: each of them once, or all of the text after an epoch."""
    import numpy as np

    from transformer_xl.training.session import lanes_of

    lanes, places, parts = lanes_of(config, store), [], []
    for _ in range(steps):
        parts.append(lanes.next().tokens)
        if lanes.at_start:
            places.append(np.concatenate(parts, axis=1).reshape(-1))
            parts = []
        if lanes.epoch:
            return np.asarray(store.split("train").tokens)
    return np.concatenate([*places, *(np.concatenate(parts, axis=1).reshape(-1) for _ in parts[:1])])
