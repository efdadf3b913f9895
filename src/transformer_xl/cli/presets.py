"""The models of the paper, and a few for small machines: exact parameter counts, training and evaluation lengths, the paper's figures, and where each number comes from.

provenance: script (the authors' released script), author (told by an author), derived (fitted to the paper's count),
own (not in the paper: small models for two CPU cores)."""

import argparse
import json
from dataclasses import asdict

from transformer_xl.config import RecurrentConfig
from transformer_xl.presets import PRESETS, Preset


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.model import parameter_count

    counts = {preset.name: parameter_count(preset.run.model) for preset in PRESETS}
    if arguments.json:
        print(json.dumps([as_json(preset, parameters=counts[preset.name]) for preset in PRESETS], indent=2))
    else:
        print_table(counts)
    return 0


def as_json(preset: Preset, *, parameters: int) -> dict[str, object]:
    facts = asdict(preset)
    return {"name": facts.pop("name"), "parameters": parameters, **facts.pop("run"), **facts}


def print_table(counts: dict[str, int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (
        "preset",
        "layers",
        "d_model",
        "heads",
        "d_inner",
        "parameters",
        "train T/M",
        "evaluate T/M/clamp",
        "paper",
        "provenance",
    ):
        table.add_column(
            title, justify="right" if title in ("layers", "d_model", "d_inner", "parameters") else "left", no_wrap=True
        )
    for preset in PRESETS:
        model, training, evaluation = preset.run.model, preset.run.training, preset.run.evaluation
        table.add_row(
            preset.name,
            str(model.n_layer),
            str(model.d_model),
            model.cell if isinstance(model, RecurrentConfig) else f"{model.n_head}x{model.d_head}",
            str(model.d_hidden if isinstance(model, RecurrentConfig) else model.d_inner),
            f"{counts[preset.name]:,}",
            f"{training.segment}/{model.memory}",
            f"{evaluation.segment}/{evaluation.memory}/{evaluation.clamp_len or '-'}",
            f"{preset.paper_parameters}, {preset.paper_result}" if preset.table else "-",
            preset.provenance,
        )
    # Not a terminal: as wide as the table needs, so that nothing is cut where it is piped.
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)
    for preset in PRESETS:
        if preset.note:
            console.print(f"{preset.name}: {preset.note}.", soft_wrap=True, highlight=False)
