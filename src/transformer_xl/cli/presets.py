"""Which preset? Below the table, by purpose. The models of the paper, and a few for small machines: exact parameter counts, training and evaluation lengths, the paper's figures, and where each number comes from.

    txl presets --memory                                  (what a training step takes, estimated)
    txl presets --memory --device cuda --devices 8        (with the lanes dealt to eight devices)

provenance of the sizes: script (released with the paper), author (told by an author), cited (of a paper that the paper cites), fitted (chosen here so that
the count is the paper's; never published), own (not in the paper: small models for two CPU cores)."""

import argparse
import json
from dataclasses import asdict

from transformer_xl.errors import ConfigError
from transformer_xl.presets import PRESETS, Preset


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print everything as JSON, for programs")
    add("--memory", action="store_true", help="the memory that training takes on each device, estimated")
    add("--devices", metavar="N", type=int, help="with --memory: how many share the lanes (1)")
    add("--device", choices=("cpu", "cuda"), help="with --memory: which kind (cpu)")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.memory and (arguments.devices is not None or arguments.device is not None):
        raise ConfigError("--devices and --device are for --memory; add it")
    if arguments.memory:
        return show_memory(arguments)
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


def show_memory(arguments: argparse.Namespace) -> int:
    from transformer_xl.cli.data import table
    from transformer_xl.model.attention import Backend
    from transformer_xl.training.footprint import footprint_of
    from transformer_xl.training.ranks import Parallel

    parallels: list[Parallel] = ["ddp", "fsdp"]
    devices = 1 if arguments.devices is None else arguments.devices
    by: Backend = "triton" if arguments.device == "cuda" else "native"
    if devices < 1:
        raise ConfigError(f"--devices: {devices} is too few; give 1 or more")
    found = {}
    for preset in PRESETS:
        if not preset.run.model.recurrent:
            found[preset.name] = {
                f"{parallel}{' recomputing' if recompute else ''}": footprint_of(
                    preset.run, devices=devices, parallel=parallel, recompute=recompute, by=by
                )
                for parallel in parallels[: 1 if devices == 1 else 2]
                for recompute in (False, True)
            }
    if arguments.json:
        told = {
            name: {way: {**asdict(part), "total": part.total} for way, part in ways.items()}
            for name, ways in found.items()
        }
        print(json.dumps({"devices": devices, "device": arguments.device or "cpu", "bytes": told}, indent=2))
        return 0
    titles = ["GB on each device", "lanes", "weights", "memory", "activations", "total", "recomputing"]
    titles += ["fsdp", "fsdp recomputing"] if devices > 1 else []
    rows = []
    for name, estimates in found.items():
        lanes = next(preset.run.training.lanes for preset in PRESETS if preset.name == name)
        plain, *others = estimates.values()
        parts = (plain.weights, plain.memory, plain.activations, plain.total, *(other.total for other in others))
        rows.append((name, str(-(-lanes // devices)), *(f"{part / 1e9:.2f}" for part in parts)))
    print(f"{table(titles, rows)}\n")
    print(
        "weights with gradients, optimiser and averages, float32; recomputing: --training.checkpoint_activations true;"
        " fewer lanes at once: --training.accumulation"
    )
    return 0


def print_table(counts: dict[str, int]) -> None:
    from transformer_xl.cli.data import table

    rows = []
    for preset in PRESETS:
        model, training, evaluation = preset.run.model, preset.run.training, preset.run.evaluation
        cells = (
            preset.name,
            str(model.n_layer),
            str(model.d_model),
            model.in_words.heads,
            model.in_words.inner,
            f"{counts[preset.name]:,}",
            f"{training.segment}/{model.memory}",
            f"{evaluation.segment}/{evaluation.memory}/{evaluation.clamp_len or '-'}",
            f"{preset.paper_parameters}, {preset.paper_result}" if preset.table else "-",
            preset.provenance,
        )
        rows.append(cells)
    sizes = ("preset", "layers", "d_model", "heads", "d_inner", "parameters", "train T/M", "evaluate T/M/clamp")
    print(f"{table((*sizes, 'paper', 'provenance'), rows, left=('preset', 'paper', 'provenance'))}\n")
    print("provenance: fitted sizes were chosen here so that the count is the paper's; they were never published.")
    for preset in PRESETS:
        if preset.note:
            print(f"{preset.name}: {preset.note}.")
    print("\nWhich preset? txl fit chooses for your own text and time. By hand, on a few cores, by what you have:")
    for preset in PRESETS:
        if preset.purpose:
            names = " or ".join((preset.name, *preset.aliases))
            print(f"  {names:<24}{preset.purpose}")
    print(f"  {'one of the paper':<24}by its own name, above: those are for GPUs and days")
    print(
        f"  {'none at all':<24}the model in the box writes, scores and serves without a run (docs/box.md); --from box begins with it"
    )
