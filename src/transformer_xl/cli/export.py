"""Writes a run's model for other software.

    txl export runs/first --to huggingface --out first-hf
    txl export runs/first --to onnx --out first-onnx
    txl export runs/first --adapter mine/adapter.safetensors --to safetensors --out merged

huggingface  config.json, model.safetensors and vocab.txt, as TransfoXL (transformers up to 4.35) reads them
original     the authors' PyTorch code: the state of their module (no pickled program), what to make it with, vocab.txt
onnx         a graph for any number of lanes, tokens and remembered positions, checked against torch, on --device, before it is kept
safetensors  weights by our names, configuration and tokenizer in one folder, which txl itself takes in place of a run

A model that a format cannot express is refused by the field that is in the way."""

import argparse
from pathlib import Path

from transformer_xl.cli.devices import ADAPTER_HELP, add_device

FORMATS = ("huggingface", "original", "onnx", "safetensors")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's folder, or one of its checkpoints")
    add("--to", choices=FORMATS, required=True, help="the layout to write")
    add("--adapter", metavar="FILE", help=ADAPTER_HELP)
    add("--out", metavar="DIR", type=Path, required=True, help="the folder to make")
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.interop.exporting import export
    from transformer_xl.library import load

    checkpoint = load(arguments.run, device=arguments.device, adapter=arguments.adapter).checkpoint
    exported = export(checkpoint, arguments.out, to=arguments.to)
    print(f"{arguments.out}: {', '.join(exported.files)}")
    for note in exported.notes:
        print(note)
    if arguments.to in ("huggingface", "original"):
        print(f"read it back with: txl import {arguments.out} --out RUN")
    return 0
