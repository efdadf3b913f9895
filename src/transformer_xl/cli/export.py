"""Writes a run's model for other software.

    txl export runs/first --to huggingface --out first-hf

huggingface: config.json, model.safetensors and vocab.txt, as TransfoXL (transformers up to 4.35) reads them. A model that it cannot compute is refused by
the field that it lacks."""

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--to", choices=("huggingface",), required=True, help="the layout to write")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to make")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.checkpoint import load_checkpoint
    from transformer_xl.interop.exporting import export_huggingface

    names = export_huggingface(load_checkpoint(arguments.run), arguments.out)
    print(f"{arguments.out}: {', '.join(names)}; read it back with: txl import {arguments.out} --out RUN")
    return 0
