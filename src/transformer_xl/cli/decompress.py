"""Makes the file again that `txl compress` was given, with the same model, on any machine.

    txl decompress notes.txt.txl                                     (writes notes.txt)
    txl decompress notes.txt.txl --model runs/notes                  (made with a model of your own)
    txl decompress - --model runs/logs < log.txl | less

A file that is damaged, cut off or made with another model is refused, and nothing is written. To standard output each MB is written once its checksum
was compared."""

import argparse

from transformer_xl.cli.compress import ENDING, add_files, sink_of, size_of, source_of, unused
from transformer_xl.errors import InputError


def configure(parser: argparse.ArgumentParser) -> None:
    add_files(parser, f"FILE without {ENDING}")


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out or ("-" if arguments.file == "-" else unused(without_ending(arguments.file)))
    with source_of(arguments.file, out=out) as source:
        from transformer_xl.cli.models import load_named
        from transformer_xl.compressing import coder_of
        from transformer_xl.compression import decompress_stream, survey
        from transformer_xl.console import progress

        name = "standard input" if arguments.file == "-" else arguments.file
        total = None
        if size_of(source) is not None:
            here = source.tell()
            total = survey(source, name=name)
            source.seek(here)
        coder = coder_of(load_named(arguments.model, device="cpu"))
        with sink_of(out) as sink, progress("decompressing", total=total, unit="bytes") as advance:
            written = decompress_stream(source, sink, coder, name=name, advance=advance, hold=out == "-")
    if out != "-":
        print(f"{out}: {written:,} bytes")
    return 0


def without_ending(name: str) -> str:
    if not name.endswith(ENDING) or name == ENDING:
        raise InputError(f"{name} does not end in {ENDING}; name the file to write with --out")
    return name.removesuffix(ENDING)
