"""Teaches an old checkpoint new text: imports it, trains a small adapter beside its weights, and tells what was gained and lost.

    python examples/teach_imported.py transfo-xl-wt103/ mine.txt --minutes 10

The checkpoint may be of Hugging Face's TransfoXL, of the authors' PyTorch or TensorFlow code, or of NVIDIA's. Nothing in it is run.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import transformer_xl as txl

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint")
parser.add_argument("text", help="a file or folder of your own")
parser.add_argument("--minutes", type=float, default=10.0)
parser.add_argument("--out", default="runs/taught")
arguments = parser.parse_args()

out = Path(arguments.out)
txl_command = [sys.executable, "-m", "transformer_xl"]


def txl_run(*words: object) -> None:
    print("$ txl", *words, flush=True)
    subprocess.run([*txl_command, *map(str, words)], check=True)


txl_run("import", arguments.checkpoint, "--out", out / "imported")
txl_run("prepare", arguments.text, "--tokenizer-of", out / "imported", "--out", out / "data")
before = txl.load(out / "imported").evaluate(data=out / "data", split="test")
txl_run(
    *("train", "--from", out / "imported", "--adapter", "rank=8", "--data", out / "data", "--run", out / "run"),
    *(
        "--minutes",
        arguments.minutes,
        "--training.lanes",
        4,
        "--training.segment",
        32,
        "--training.learning_rate",
        1e-3,
    ),
)
after = txl.load(out / "run").evaluate(data=out / "data", split="test")
print(f"bits per token of your text: {before.bits_per_token:.4f} before, {after.bits_per_token:.4f} after")
