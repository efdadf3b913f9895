"""Is everything right on this machine? Kernels, training, reading and serving, each beside what it must give, in a few minutes.

    txl doctor                    (a GPU where there is one)
    txl doctor --device cpu
    txl doctor --json > report    (for an issue)

Exit code 0: all is green. 1: something is not, and the report says what to do."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from transformer_xl.devices import AUTO, DEVICES_HELP

if TYPE_CHECKING:
    from transformer_xl.doctor.examining import Report

MARKS = {"ok": "ok", "failed": "FAILED", "skipped": "-"}
TELLING = ("paths", "engine")
"""Checks in which something right but slow is said in passing: kernels that cannot be had, a step that cannot be recorded."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=AUTO, help=f"what to examine: {DEVICES_HELP} ({AUTO})")
    parser.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.console import say
    from transformer_xl.devices import choose_device, computing_on
    from transformer_xl.doctor.examining import examine

    device = choose_device(arguments.device)
    say(computing_on(device))
    report = examine(device)
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print_report(report)
    return 1 if report.failed else 0


def print_report(report: "Report") -> None:
    details = {result.name: result.details for result in report.results}
    if "paths" in details:
        columns = ("preset", "attention by", "read by", "why", "off the formula")
        print_table(
            columns, [preset_row(name, ways, details.get("formula", {})) for name, ways in details["paths"].items()]
        )
    rows = [(result.name, MARKS[result.status], f"{result.seconds:.1f} s", result.figure) for result in report.results]
    print_table(("check", "found", "took", "figure"), rows)
    for result in report.results:
        if result.status != "ok":
            print(f"{result.name}: {result.sentence}.{f' What to do: {result.remedy}.' if result.remedy else ''}")
        for line in result.said if result.status == "failed" or result.name in TELLING else ():
            print(f"{result.name} said: {line}")
    counts = {status: sum(result.status == status for result in report.results) for status in MARKS}
    print(
        f"{counts['ok']} green, {counts['failed']} failed, {counts['skipped']} not to be had here; {report.seconds:.0f} s on {report.device}."
        " For an issue:\n"
    )
    print(json.dumps(report.as_json()))


def preset_row(
    name: str, ways: Mapping[str, Mapping[str, str]], off: Mapping[str, Mapping[str, float]]
) -> tuple[str, ...]:
    def told(of: str) -> str:
        """Once, where all precisions have the same."""
        words = ways.get(of, {})
        alike = {*words.values()}
        return ", ".join(alike) if len(alike) < 2 else ", ".join(f"{way} {word}" for way, word in words.items())

    apart = max(off[name].values(), default=None) if name in off else None
    return name, told("training"), told("reading"), told("why"), "" if apart is None else f"{apart:.0e}"


def print_table(titles: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    from transformer_xl.cli.data import table

    lines = table(titles, rows, left=titles[:-1] if titles[0] == "preset" else ("found", "figure")).splitlines()
    print("\n".join(line.rstrip() for line in lines), end="\n\n")
