"""Makes a run of somebody else's checkpoint, without running anything that is in it.

    txl import model.pt --out runs/theirs                       (the authors' PyTorch code: model.pt, cache.pt, optimizer.pt)
    txl import transfo-xl-wt103/ --out runs/wt103               (Hugging Face: config.json, weights, vocab.*)
    txl import checkpoint_last.pt --out runs/nvidia             (NVIDIA)
    txl import model.ckpt-1000000 --out runs/tensorflow --memory 384 --vocabulary cache.pkl

Old checkpoints are pickles, which are programs. They are read by an interpreter that knows only what such files need, in a process with little
memory and time; anything else in them is refused with its place. Lengths are the file's own unless given."""

import argparse
import json
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="a checkpoint's file, or its folder")
    add("--out", metavar="RUN", type=Path, required=True, help="the folder of the run to make")
    add(
        "--vocabulary",
        metavar="FILE",
        type=Path,
        help="cache.pt, vocab.pkl, a text file with a symbol a line, or a data store",
    )
    add("--segment", metavar="T", type=int, help="tokens read at once")
    add("--memory", metavar="M", type=int, help="positions remembered")
    add("--clamp", dest="clamp_len", metavar="C", type=int, help="distances beyond C look alike; 0: never")
    add("--same-length", action="store_true", default=None, help="every token sees as many keys")
    add("--json", action="store_true", help="print what was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.cli.data import aligned
    from transformer_xl.interop.formats.foreign_model import Lengths
    from transformer_xl.interop.importing import NAMES, import_run

    names = ("segment", "memory", "clamp_len", "same_length")
    lengths = Lengths(**{name: getattr(arguments, name) for name in names})
    imported = import_run(arguments.source, arguments.out, lengths=lengths, vocabulary=arguments.vocabulary)
    model, evaluation = imported.model, imported.evaluation
    tokenizer = imported.vocabulary.tokenizer
    if arguments.json:
        provenance = json.loads((arguments.out / "provenance.json").read_text(encoding="utf-8"))
        facts = {"run": str(arguments.out), "parameters": imported.parameters, "vocabulary": tokenizer.size}
        print(json.dumps({**facts, "tokenizer": tokenizer.kind, "step": imported.step, **provenance}, indent=2))
        return 0
    heads = f"{model.n_head} heads of {model.d_head}, inner {model.d_inner}, encoding {model.encoding}"
    facts = {
        "made by": NAMES[imported.kind],
        "shape": f"{model.n_layer} layers, {model.d_model} wide, {heads}",
        "parameters": f"{imported.parameters:,}",
        "vocabulary": f"{tokenizer.size:,} {tokenizer.kind} tokens: {imported.vocabulary.reason}",
        "lengths": f"segment {evaluation.segment}, memory {evaluation.memory}, clamp {evaluation.clamp_len}",
        "optimiser": imported.optimiser,
    }
    print(aligned(facts))
    print(f"{arguments.out} is an ordinary run; next: txl generate {arguments.out}")
    return 0
