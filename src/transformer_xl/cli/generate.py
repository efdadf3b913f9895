"""Text out of a model, as it is drawn.

txl generate runs/first --prompt "import os" --tokens 300
txl generate runs/wt103 --paper --tokens 500        (the paper's protocol: a context from the test set, top-40, the true text beside it)"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.errors import InputError

if TYPE_CHECKING:
    from transformer_xl.generation import Sampling
    from transformer_xl.library import Loaded

PAPER_CONTEXT = 512


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder, or one of its checkpoints")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", default="", help="what to continue")
    prompts.add_argument("--prompt-file", metavar="FILE", help="the same from a file; - reads standard input")
    prompts.add_argument(
        "--paper",
        action="store_true",
        help=f"at most {PAPER_CONTEXT} tokens of the test set, and what really came after them",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="for --paper: the data, where it is not where the run was trained on it"
    )
    parser.add_argument("--tokens", metavar="N", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest")
    parser.add_argument("--top-k", metavar="K", type=int, default=40, help="only the K likeliest; 0: all")
    parser.add_argument(
        "--top-p", metavar="P", type=float, default=1.0, help="only the likeliest that together have this probability"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", metavar="M", type=int, help="positions remembered, where not as trained")
    parser.add_argument("--device", default="cpu")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.generation import Sampling
    from transformer_xl.library import load

    if arguments.tokens < 1:
        raise InputError(f"--tokens: {arguments.tokens} tokens are none; ask for at least 1")
    prompt = read_prompt(arguments)
    sampling = Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, seed=arguments.seed
    )
    loaded = load(arguments.run, memory=arguments.memory, device=arguments.device)
    if arguments.paper:
        return paper(arguments, loaded, sampling)
    sys.stdout.write(prompt)
    for piece in loaded.stream(prompt, tokens=arguments.tokens, **vars(sampling)):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def read_prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is None:
        return str(arguments.prompt)
    name = "standard input" if arguments.prompt_file == "-" else arguments.prompt_file
    try:
        raw = sys.stdin.buffer.read() if arguments.prompt_file == "-" else Path(arguments.prompt_file).read_bytes()
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 at byte {error.start}; convert it") from None


def paper(arguments: argparse.Namespace, loaded: "Loaded", sampling: "Sampling") -> int:
    """Appendix E: nothing is picked by hand; the seed chooses where in the test set the context begins."""
    import numpy as np

    from transformer_xl.data.detokenize import detokenize
    from transformer_xl.files import write_text
    from transformer_xl.generation import generate, text_pieces

    test = loaded.store(arguments.data).split("test")
    room = len(test) - PAPER_CONTEXT - arguments.tokens
    if room < 1:
        raise InputError(
            f"the test set has {len(test):,} tokens, too few for {PAPER_CONTEXT} of context and {arguments.tokens} more; lower --tokens"
        )
    start = int(np.random.default_rng(arguments.seed).integers(room))
    context = [int(token) for token in test.tokens[start : start + PAPER_CONTEXT]]
    reference = test.tokens[start + PAPER_CONTEXT : start + PAPER_CONTEXT + arguments.tokens]
    words = loaded.tokenizer.kind == "word"
    readable = detokenize if words else str

    def show(title: str, text: str) -> str:
        print(f"--- {title}\n{text}\n")
        return f"## {title}\n\n{text}\n"

    parts = [
        show(
            f"context: {PAPER_CONTEXT} tokens of the test set from token {start:,}",
            readable(loaded.tokenizer.decode(context)),
        )
    ]
    drawn = list(generate(loaded.model, context, tokens=arguments.tokens, sampling=sampling))
    generated = readable("".join(text_pieces(loaded.tokenizer, iter(drawn), before=context)))
    parts.append(show(f"generated: {arguments.tokens} tokens, top {sampling.top_k}, seed {sampling.seed}", generated))
    parts.append(show("reference: what really came", readable(loaded.tokenizer.decode(reference))))
    if loaded.checkpoint.run is not None:
        path = loaded.checkpoint.run.made("samples") / f"paper-seed-{sampling.seed}.md"
        write_text(path, "\n".join(parts))
        print(f"written to {path}")
    return 0
