"""The words of `txl bench learning`: how well models learn a text in equal time.

txl bench learning --corpus data/speeches data/code --against lstm,gpt2 --seeds 1,2,3 --results runs.jsonl --plot curves.png
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.errors import ConfigError, suggest
from transformer_xl.pictures import ENDINGS

if TYPE_CHECKING:
    from transformer_xl.benchmarks.learning.comparing import Comparison

DEFAULTS: dict[str, Any] = {
    "corpus": None,
    "minutes": 4.0,
    "seeds": "1",
    "size": "equal",
    "parameters": 2_000_000,
    "tune_on": "first",
    "one_core": False,
    "test_bytes": 200_000,
    "results": None,
}
TINY: dict[str, Any] = {"minutes": 0.02, "parameters": 40_000, "test_bytes": 2000}
TINY_VALID_BYTES, TINY_MARKS = 1000, 2
TINY_LADDER = (40_000, 80_000)


def configure(group: "argparse._ArgumentGroup") -> None:
    """None stands for what is not given: the other kinds take none of these."""
    group.add_argument(
        "--corpus", nargs="+", metavar="STORE", help="stores of bytes or byte pairs, each with train, valid and test"
    )
    group.add_argument("--minutes", type=float, metavar="M", help="of training for each, by the clock (4)")
    group.add_argument("--seeds", metavar="A,B,C", help="each a run of its own (1)")
    group.add_argument(
        "--size",
        choices=("equal", "best"),
        help="everybody has as many parameters (equal), or each takes the best of its own ladder",
    )
    group.add_argument("--parameters", type=int, metavar="N", help="how many that is, within 3 %% (2000000)")
    group.add_argument(
        "--tune-on",
        choices=("first", "each"),
        help="the peers' rates and batches are chosen on the first corpus (first)",
    )
    group.add_argument(
        "--one-core",
        action="store_true",
        default=None,
        help="each on one thread, and minutes are those of its own processor time: other work may go on meanwhile",
    )
    group.add_argument("--test-bytes", type=int, metavar="N", help="how much of test is read (200000)")
    group.add_argument("--results", metavar="FILE", help="JSON lines, one a run; runs already there are not repeated")


def refuse(arguments: argparse.Namespace, *, but: tuple[str, ...] = ()) -> None:
    for name in DEFAULTS:
        if name not in but and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for txl bench learning; leave it out")
    if arguments.json not in (None, "-") and arguments.kind != "adaptation":
        raise ConfigError(
            f"--json {arguments.json}: only txl bench learning and adaptation write a file; leave the name out"
        )


def run(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in DEFAULTS if getattr(arguments, name) is not None}
    asked = {**DEFAULTS, **(TINY if arguments.scale == "tiny" else {}), **given}
    if not asked["corpus"]:
        raise ConfigError(
            "--corpus is missing; name stores of bytes or byte pairs, made with: txl prepare ... --tokenizer byte, or bpe"
        )
    for name in ("minutes", "parameters", "test_bytes"):
        if asked[name] <= 0:
            raise ConfigError(f"--{name.replace('_', '-')}: {asked[name]} is too few; take more than 0")
    for path in (arguments.plot, asked["results"], arguments.json):
        if path not in (None, "-") and not Path(path).parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {Path(path).parent}; make it first")
    if arguments.plot and Path(arguments.plot).suffix not in ENDINGS:  # hours before it is drawn
        raise ConfigError(f"--plot: {arguments.plot} must end in {', '.join(ENDINGS)}")
    return compare_and_tell(arguments, asked, seeds=seeds_of(asked["seeds"]))


def seeds_of(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        raise ConfigError(f"--seeds: {text} must be whole numbers such as 1,2,3") from None
    if min(seeds) < 0:
        raise ConfigError(f"--seeds: {text} must not be below 0")
    return seeds


def compare_and_tell(arguments: argparse.Namespace, asked: dict[str, Any], *, seeds: tuple[int, ...]) -> int:
    from transformer_xl.benchmarks.learning.comparing import Settings, compare
    from transformer_xl.benchmarks.learning.entrants import PEERS, entrant_of
    from transformer_xl.benchmarks.learning.processes import learn_in_a_process
    from transformer_xl.benchmarks.learning.reporting import draw_curves
    from transformer_xl.benchmarks.learning.results import Results
    from transformer_xl.console import say
    from transformer_xl.data.store import open_store
    from transformer_xl.files import write_text

    peers = [name for name in (arguments.against or "lstm,qrnn").split(",") if name != "none"]
    for name in peers:
        if name not in PEERS:
            raise ConfigError(
                f"--against: nobody called {name}{suggest(name, PEERS)}; a preset of ours is named with --preset"
            )
    stores = [open_store(path) for path in asked["corpus"]]
    pairs = all(store.manifest.tokenizer_kind == "bpe" for store in stores)
    ours = (arguments.preset or ("text" if pairs else "bytes")).split(",")
    tiny = arguments.scale == "tiny"
    small: dict[str, Any] = {}
    if tiny:
        small = {"valid_bytes": TINY_VALID_BYTES, "marks": TINY_MARKS, "ladder": TINY_LADDER}
    settings = Settings(
        minutes=asked["minutes"],
        seeds=seeds,
        size=asked["size"],
        parameters=asked["parameters"],
        tune_on=asked["tune_on"],
        one_core=asked["one_core"],
        test_bytes=asked["test_bytes"],
        **small,
    )
    comparison = compare(
        stores,
        [entrant_of(name, scale=arguments.scale) for name in dict.fromkeys([*ours, *peers])],
        settings=settings,
        results=Results(None if asked["results"] is None else Path(asked["results"])),
        learn=learn_in_a_process,
    )
    written = json.dumps(comparison.as_json(), indent=2)
    if arguments.json == "-":
        print(written)
    else:
        show(comparison)
        if tiny:
            print("tiny models: these figures say that the command works and nothing about learning")
    if arguments.json not in (None, "-"):
        write_text(Path(arguments.json), written + "\n")
        say(f"written: {arguments.json}")
    if arguments.plot:
        draw_curves(comparison, Path(arguments.plot))
        say(f"plot: {arguments.plot}")
    return 0


def show(comparison: "Comparison") -> None:
    from transformer_xl.benchmarks.learning.reporting import COLUMNS, notes_of, rows_of
    from transformer_xl.cli.data import table

    rows, before = [], ""
    for row in rows_of(comparison):
        corpus, *cells = row.cells()
        rows.append(("" if corpus == before else corpus, *cells))
        before = corpus
    print(table(COLUMNS, rows, left=("entrant", "")), *notes_of(comparison), sep="\n")
