"""The words of `txl bench compression`: how small and how fast, beside other compressors.

txl bench compression --corpus data/english data/code --plot ratio.png             (by the model in the box)
txl bench compression --model runs/first --corpus data/first
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli.data import table
from transformer_xl.errors import ConfigError, suggest
from transformer_xl.pictures import ENDINGS

if TYPE_CHECKING:
    from transformer_xl.benchmarks.compression import Comparison

NAMES = {
    "xz": "xz -9e",
    "zstd": "zstd -19",
    "zstd-dictionary": "zstd -19 with a dictionary",
    "brotli": "brotli 11",
    "bzip3": "bzip3",
    "ppmd": "PPMd",
    "zpaq": "zpaq -m5",
}
OPTIONS = ("model", "sizes", "prime_bytes")
PRIME_BYTES, TINY_SIZES, TINY_PRIME_BYTES = 8_000_000, "300,1000", 20_000


def configure(group: "argparse._ArgumentGroup") -> None:
    """None stands for what is not given: the other kinds take none of these."""
    group.add_argument(
        "--model", metavar="RUN", help="what compresses (the model in the box); --corpus: stores with train and test"
    )
    group.add_argument("--sizes", metavar="N,M", help="bytes of the pieces of test (1000,10000,100000,1000000)")
    group.add_argument(
        "--prime-bytes",
        type=int,
        metavar="N",
        help=f"of the end of train, before what the others compress ({PRIME_BYTES})",
    )


def refuse(arguments: argparse.Namespace) -> None:
    for name in OPTIONS:
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for txl bench compression; leave it out")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.cli import bench_learning

    bench_learning.refuse(arguments, but=("corpus",))
    tiny = arguments.scale == "tiny"
    if not arguments.corpus:
        raise ConfigError("--corpus is missing; name stores, such as: txl bench compression --corpus data/first")
    if arguments.preset or arguments.tokens:
        raise ConfigError(f"--{'preset' if arguments.preset else 'tokens'}: compression has none; leave it out")
    sizes = sizes_of(arguments.sizes or (TINY_SIZES if tiny else "1000,10000,100000,1000000"))
    prime_bytes = arguments.prime_bytes or (TINY_PRIME_BYTES if tiny else PRIME_BYTES)
    if prime_bytes < 20_000:
        raise ConfigError(f"--prime-bytes: {prime_bytes} is too few to train a dictionary on; take at least 20000")
    if arguments.plot and (Path(arguments.plot).suffix not in ENDINGS or not Path(arguments.plot).parent.is_dir()):
        raise ConfigError(f"--plot: {arguments.plot} must end in {', '.join(ENDINGS)}, in a folder that exists")
    others = [name for name in (arguments.against or ",".join(NAMES)).split(",") if name != "none"]
    for name in others:
        if name not in NAMES:
            raise ConfigError(f"--against: no compressor {name}{suggest(name, NAMES)}")
    from transformer_xl.benchmarks.compression import compare_codecs, draw
    from transformer_xl.console import say
    from transformer_xl.data.store import open_store
    from transformer_xl.library import load

    comparison = compare_codecs(
        load(arguments.model, device="cpu").checkpoint,
        [open_store(path) for path in arguments.corpus],
        against=[NAMES[name] for name in others],
        sizes=sizes,
        train_bytes=prime_bytes,
    )
    if arguments.json:
        print(json.dumps(comparison.as_json(), indent=2))
    else:
        print_comparison(comparison)
        if tiny:
            print("tiny pieces: these figures say that the command works and nothing about compressors")
    if arguments.plot:
        draw(comparison, Path(arguments.plot))
        say(f"plot: {arguments.plot}")
    return 0


def sizes_of(text: str) -> list[int]:
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise ConfigError(f"--sizes: {text} must be whole numbers such as 1000,10000") from None
    if sizes[0] < 1:
        raise ConfigError(f"--sizes: {text} must not be below 1")
    return sizes


def print_comparison(comparison: "Comparison") -> None:
    sizes = sorted({row.size for row in comparison.rows})
    titles = ["compressor", *(f"{size:,}" for size in sizes), "KB/s", "and back"]
    for corpus in comparison.train_bytes:
        lines, rows = list[tuple[str, ...]](), [row for row in comparison.rows if row.corpus == corpus]
        for codec, primed in dict.fromkeys((row.codec, row.primed) for row in rows):
            here = {row.size: row for row in rows if (row.codec, row.primed) == (codec, primed)}
            speeds = (here[max(here)].compress_kb_per_second, here[max(here)].decompress_kb_per_second)
            bits = (f"{here[size].bits_per_byte:.3f}" if size in here else "" for size in sizes)
            told = ("" if speed is None else f"{speed:,.1f}" for speed in speeds)
            lines.append((f"{codec}, primed" if primed else codec, *bits, *told))
        print(f"{corpus}\n{table(titles, lines, left=titles[:1])}\n")
    print("bits per byte of pieces of test, all bytes of the file counted; speeds are of the largest piece")
    for corpus, trained in comparison.train_bytes.items():
        wins = comparison.wins_from()[corpus]
        what = f"from {wins:,} bytes on" if wins else "at no size"
        model = f"with its model of {comparison.model_bytes:,} bytes counted once ours is the smallest {what}"
        print(f"{corpus}: primed with {trained:,} bytes; {model}")
    for codec, why in comparison.skipped.items():
        print(f"{codec} was left out: {why}")
