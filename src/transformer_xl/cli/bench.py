"""How fast this machine reads and writes text, in rounds that take turns; what is compared is first shown to compute the same.

    txl bench generation                          (one token after another: exact weights, int8 weights, many lanes)
    txl bench evaluation --against huggingface    (the last transformers release that has TransfoXL, in its own environment)
    txl bench sliding                             (memory against a vanilla window read anew for each token)
    txl bench training --against huggingface      (whole steps: forward, backward, clip, Adam)
    txl bench adaptation --tokens 1000000         (learning while reading beside weights that stand still; and whether it stays flat)
    txl bench serving                             (txl serve: 16 streams against one, and the wait for a first token)
    txl bench generation --plot flat.png          (time and memory per token as the text grows)
    txl bench versions --against ../before        (this version and the one in another checkout, on the demo's model)
    txl bench learning --corpus data/novel        (how well models learn a text in equal time; docs/benchmarks.md)
    txl bench compression --model runs/novel --corpus data/novel   (how small and how fast, beside xz, zstd, brotli, bzip3, PPMd and zpaq)

Weights are random: speed does not depend on them. --scale tiny tries everything in seconds; its figures mean nothing."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli import bench_compression, bench_learning
from transformer_xl.console import say
from transformer_xl.errors import ConfigError
from transformer_xl.files import write_text

if TYPE_CHECKING:
    from transformer_xl.benchmarks.measuring import Result, Row

KINDS = (
    "generation",
    "evaluation",
    "sliding",
    "training",
    "adaptation",
    "serving",
    "versions",
    "learning",
    "compression",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        metavar="|".join(KINDS),
        choices=KINDS,
    )
    parser.add_argument(
        "--preset",
        metavar="P",
        help="training: a preset's model, segment and lanes in place of the two shapes; adaptation: a preset's model and the segment it is evaluated with; learning: who learns (bytes, or text for byte pairs), a preset or a .toml or .json file, or several: A,B",
    )
    parser.add_argument(
        "--against",
        metavar="WHO",
        help="also huggingface, on the same weights; for versions: the folder of another checkout; for learning: any of lstm,qrnn,gpt2,x-transformers, or none (lstm,qrnn); for compression: any of xz,zstd,zstd-dictionary,brotli,bzip3,ppmd,zpaq, or none (all)",
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="every implementation runs once in each (5)")
    parser.add_argument(
        "--scale", choices=("full", "tiny"), default="full", help="tiny: toy shapes, to try the command"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="generation: only draw time per token and memory as a text grows; learning: also draw bits against minutes; compression: bits against speed",
    )
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        help="how long that text grows (200000); adaptation: of a text that is read on",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the result as JSON; learning, adaptation: or write it to FILE",
    )
    bench_learning.configure(parser.add_argument_group("learning"))
    bench_compression.configure(parser.add_argument_group("compression"))


def run(arguments: argparse.Namespace) -> int:
    if arguments.kind == "compression":
        return bench_compression.run(arguments)
    bench_compression.refuse(arguments)
    if arguments.kind == "learning":
        return bench_learning.run(arguments)
    bench_learning.refuse(arguments)
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds: {arguments.rounds} is too few; take at least 1")
    if arguments.tokens is not None and not arguments.plot and arguments.kind != "adaptation":
        raise ConfigError("--tokens is the length of the text that --plot draws; give --plot FILE with it")
    if arguments.preset and arguments.kind not in ("training", "adaptation"):
        raise ConfigError(f"--preset: {arguments.preset} is for txl bench training and adaptation; leave it out")
    if arguments.plot:
        return plot(arguments)
    if arguments.kind == "versions":
        return versions(arguments)
    if arguments.against not in (None, "huggingface"):
        raise ConfigError(
            f"--against: {arguments.against} is unknown; it can be huggingface, or a folder with txl bench versions"
        )
    if arguments.kind == "serving":
        return serving(arguments)
    if arguments.kind == "adaptation":
        return adaptation(arguments)
    from transformer_xl.benchmarks.measuring import measure

    result = measure(
        arguments.kind,
        scale=arguments.scale,
        rounds=arguments.rounds,
        against_huggingface=arguments.against == "huggingface",
        preset=arguments.preset,
    )
    if arguments.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        print_result(result)
    return 0


def serving(arguments: argparse.Namespace) -> int:
    if arguments.against:
        raise ConfigError("--against: there is no other server to compare with; leave it out")
    from transformer_xl.benchmarks.serving import measure_serving

    result = measure_serving(scale=arguments.scale, rounds=arguments.rounds)
    if arguments.json:
        print(json.dumps(result.as_json(), indent=2))
        return 0
    for row in result.rows:
        if row.tokens_per_second is not None and row.spread is not None:
            speed = f"{number(row.tokens_per_second)} tokens/s ({number(row.spread[0])}-{number(row.spread[1])})"
            told = "" if row.ratio_to_one_stream is None else f", {number(row.ratio_to_one_stream)}x one stream"
        else:
            speed, told = f"{number(row.first_token_seconds or 0.0)} s", ""
        print(f"{row.workload}, {row.implementation}: {speed}{told}; {row.peak_memory_mb:,.0f} MB")
    print(f"{result.processor}, {result.cores} cores, torch {result.torch}, rounds: {result.rounds}; medians")
    if result.scale == "tiny":
        print("tiny shapes: these figures say that the command works and nothing about speed")
    return 0


def adaptation(arguments: argparse.Namespace) -> int:
    if arguments.against:
        raise ConfigError("--against: there is no other implementation to compare with; leave it out")
    if arguments.preset and arguments.scale == "tiny":
        raise ConfigError(f"--preset: {arguments.preset} has a size of its own; leave out --scale tiny")
    if arguments.json not in (None, "-") and not Path(arguments.json).parent.is_dir():
        raise ConfigError(f"--json: there is no folder {Path(arguments.json).parent}; make it first")
    from transformer_xl.benchmarks.adaptation import measure_adaptation

    asked = {"tokens": arguments.tokens, "preset": arguments.preset}
    result = measure_adaptation(scale=arguments.scale, rounds=arguments.rounds, **asked)
    written = json.dumps(result.as_json(), indent=2)
    if arguments.json == "-":
        print(written)
        return 0
    if arguments.json:
        write_text(Path(arguments.json), written + "\n")
        say(f"written: {arguments.json}")
    for cost in result.costs:
        print(f"{cost.way:<26}{number(cost.tokens_per_second):>9} tokens/s {cost.ratio_to_static:>7.2f}x the time")
    for part in result.parts:
        print(f"after {part.tokens:,} tokens: {number(part.tokens_per_second)} tokens/s, {part.peak_memory_mb:,.0f} MB")
    print(
        f"{result.model}, segments of {result.segment}, lessons of {result.lesson}, one lane, rounds: {result.rounds}; medians, ratios within rounds"
    )
    if result.scale == "tiny":
        print("tiny shapes: these figures say that the command works and nothing about speed")
    return 0


def versions(arguments: argparse.Namespace) -> int:
    if not arguments.against:
        raise ConfigError("--against: name the folder of another checkout, such as one made with: git worktree add")
    from transformer_xl.benchmarks.versions import compare_versions, machine_in_words

    rows = compare_versions(Path(arguments.against), rounds=arguments.rounds, scale=arguments.scale)
    if arguments.json:
        print(json.dumps([row.as_json() for row in rows], indent=2))
        return 0
    print(f"{'work':<20}{'tokens/s':>10}{'before':>10}{'ratio':>8}  (range)")
    for row in rows:
        low, high = (f"{value:.2f}" for value in row.ratio_spread)
        print(
            f"{row.work:<20}{number(row.tokens_per_second):>10}{number(row.before):>10}{row.ratio:>8.2f}  ({low}-{high})"
        )
    print(machine_in_words())
    return 0


def plot(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from transformer_xl.benchmarks.text_length import DEFAULT_TOKENS, flatness, follow_and_draw

    if arguments.kind != "generation" or arguments.against:
        raise ConfigError("--plot draws our own generation alone; give it as: txl bench generation --plot FILE")
    path = Path(arguments.plot)
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent}; make it first")
    tokens = DEFAULT_TOKENS if arguments.tokens is None else arguments.tokens
    points = follow_and_draw(path, tokens=tokens, scale=arguments.scale)
    if arguments.json:
        print(
            json.dumps(
                {"scale": arguments.scale, **flatness(points), "points": [asdict(point) for point in points]}, indent=2
            )
        )
        return 0
    found = flatness(points)
    for name, unit in (("ms_per_token", "ms per token"), ("memory_mb", "MB")):
        print(f"{found[f'{name}_first']:.3f} {unit} in the first tenth, {found[f'{name}_last']:.3f} in the last")
    print(f"plot: {path}")
    return 0


def print_result(result: "Result") -> None:
    from transformer_xl.benchmarks.measuring import TOLERANCE
    from transformer_xl.benchmarks.workloads import FORMULAS
    from transformer_xl.cli.data import table

    machine = result.machine
    titles = (
        "workload",
        "implementation",
        "tokens/s (range)",
        "ratio (range)",
        "peak MB",
        "of the limit",
        "difference",
    )
    rows = [
        (
            row.workload,
            row.implementation,
            f"{number(row.tokens_per_second)} ({number(row.spread[0])}-{number(row.spread[1])})",
            ratio(row),
            f"{row.peak_memory_mb:,.0f}",
            f"{row.share_of_limit:.0%}",
            "" if row.max_difference is None else f"{row.max_difference:.1e}",
        )
        for row in result.rows
    ]
    print(table(titles, rows, left=("implementation",)), end="\n\n")
    if result.scale == "tiny":
        print("tiny shapes: these figures say that the command works and nothing about speed")
    print(
        f"{machine.processor}, {machine.cores} cores, torch {machine.torch}, float32, rounds: {result.rounds}; medians, ratios within rounds",
        f"peaks: {machine.flops_per_second / 1e9:,.0f} GFLOP/s matrix product, {machine.bytes_per_second / 1e9:,.1f} GB/s reading",
        f"outputs were checked before timing: at most {TOLERANCE:.0e} apart (int8 is not exact: its difference is shown, not limited)",
        "limit: " + "; ".join(FORMULAS),
        sep="\n",
    )


def ratio(row: "Row") -> str:
    """To Hugging Face, to one lane, or to the sliding window with the paper's beside it."""
    shown = []
    for value, limits, to in (
        (row.ratio_to_huggingface, row.ratio_to_huggingface_spread, "huggingface"),
        (row.ratio_to_one_lane, row.ratio_to_one_lane_spread, "one lane"),
        (row.ratio_to_sliding, row.ratio_to_sliding_spread, "window"),
    ):
        if value is not None and limits is not None and row.implementation != to:
            shown.append(f"{number(value)}x {to} ({number(limits[0])}-{number(limits[1])})")
    if row.paper_ratio_to_sliding:
        shown.append(f"paper {row.paper_ratio_to_sliding}x")
    return ", ".join(shown)


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
