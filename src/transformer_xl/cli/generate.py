"""Text out of a model, as it is drawn.

txl generate --prompt "The history of"              (by the model in the box)
txl generate runs/first --prompt "import os" --tokens 300
txl generate runs/first --prompt "def " --stop "\\n\\n" --samples 4 --top-p 0.9 --top-k 0
txl generate runs/first --prompt "class " --beams 4 --tokens 40
txl generate runs/first --prompt-file chapter.txt --adapt both       (learns from the prompt before it goes on)
txl generate runs/wt103 --paper                     (the paper's protocol: a context from the test set, 500 tokens of the 40 likeliest, the true text beside them)"""

import argparse
import json
import sys
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli.adapting import add_adapt, chosen
from transformer_xl.cli.devices import ADAPTER_HELP, add_device, add_precision, say_device
from transformer_xl.cli.models import add_run, load_named
from transformer_xl.errors import InputError, shown

if TYPE_CHECKING:
    from transformer_xl.decoding import Sampling
    from transformer_xl.library import Loaded

TOKENS = 200
PAPER_CONTEXT, PAPER_TOKENS = 512, 500
MOST_SAMPLES = 4096
LARGEST_PROMPT = 64 << 20
"""Bytes of a prompt's file."""
CHANCE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add = parser.add_argument
    prompt = parser.add_mutually_exclusive_group().add_argument
    prompt(
        "--prompt",
        metavar="TEXT",
        default="",
        help="what to continue; without one, a text begins at a line's beginning",
    )
    prompt("--prompt-file", metavar="FILE", help="the same from a file; - reads standard input")
    prompt(
        "--paper",
        action="store_true",
        help=f"{PAPER_CONTEXT} tokens of the test set, at a place drawn by --seed, and what really came after them (Appendix E)",
    )
    add("--data", metavar="DIR", help="for --paper: the data, where it is not where the run was trained on it")
    add(
        "--tokens",
        metavar="N",
        type=int,
        help=f"at most so many ({TOKENS}; with --paper {PAPER_TOKENS}: the paper has {PAPER_TOKENS} and 1,000)",
    )
    add(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        type=lambda text: text.replace("\\n", "\n").replace("\\t", "\t"),
        help=r"end before this text (\n and \t are a line's end and a tab); repeatable",
    )
    # What is not given is None, so that options which exclude each other can be told from defaults.
    add("--temperature", type=float, help="above 1 bolder, below 1 safer (1); 0: always the likeliest")
    add("--top-k", metavar="K", type=int, help="only the K likeliest (40); 0: all")
    add("--top-p", metavar="P", type=float, help="only the likeliest that together have this share (1: all)")
    add("--min-p", metavar="P", type=float, help="only those at least P times as likely as the likeliest (0: all)")
    add(
        "--repetition-penalty",
        metavar="X",
        type=float,
        help="probabilities of the last 512 tokens, prompt included, are raised to this power (1: none)",
    )
    add("--seed", type=int, help="the same seed, the same text (0)")
    add("--samples", metavar="N", type=int, help="N texts side by side, with the seeds from --seed on (1)")
    add("--beams", metavar="N", type=int, help="beam search: the text likeliest per token, of N carried on at a time")
    add("--memory", metavar="M", type=int, help="positions remembered, where not as trained")
    add("--weights", choices=("exact", "int8"), default="exact", help="int8: faster, and a little less exact")
    add("--adapter", metavar="FILE", help=ADAPTER_HELP)
    add_device(parser)
    add_precision(parser, default="auto")
    add("--json", action="store_true", help="print texts, speed and settings as one JSON object")
    add_adapt(parser)


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    from transformer_xl.decoding import Sampling

    arguments.tokens = arguments.tokens or (PAPER_TOKENS if arguments.paper else TOKENS)
    prompt = read_prompt(arguments)
    arguments.stop = [typed_text("--stop", text) for text in arguments.stop]
    sampling = Sampling(**{name: getattr(arguments, name) for name in CHANCE if getattr(arguments, name) is not None})
    where = {"device": arguments.device, "precision": arguments.precision, "adapter": arguments.adapter}
    loaded = load_named(arguments.run, memory=arguments.memory, **where)
    say_device(arguments, loaded)
    if arguments.paper:
        return paper(arguments, loaded, sampling)
    if arguments.beams or arguments.samples or arguments.json:
        return whole(arguments, loaded, prompt, sampling)
    options = {"tokens": arguments.tokens, "stop": arguments.stop, "weights": arguments.weights}
    options["adapt"] = chosen(arguments, loaded)
    pieces = iter(loaded.stream(prompt, **options, **vars(sampling)))
    # The prompt is read before it is shown: nothing said meanwhile on stderr, such as that kernels are built, then stands in the middle of a line.
    for piece in chain([prompt + next(pieces, "")], pieces):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Nothing asked for is silently ignored: what cannot go together is refused."""
    for name in ("tokens", "samples", "beams"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InputError(f"--{name}: {shown(value)} {name} are none; ask for at least 1")
    if arguments.samples is not None and arguments.samples > MOST_SAMPLES:
        raise InputError(
            f"--samples: {shown(arguments.samples)} texts are too many side by side; ask for at most {MOST_SAMPLES:,}, and again with another --seed"
        )
    given = [name for name in (*CHANCE, "samples") if getattr(arguments, name) is not None]
    if arguments.beams and given:
        raise InputError(f"{option(given[0])} goes with drawing, and --beams draws nothing; drop one of the two")
    if arguments.temperature == 0.0:
        for name in given:
            if name not in ("temperature", "repetition_penalty"):
                raise InputError(f"{option(name)} changes nothing at --temperature 0, the likeliest; drop one of them")
    if arguments.adapt:
        for name in ("samples", "beams", "json", "paper"):
            if getattr(arguments, name):
                raise InputError(f"--adapt learns from one prompt and continues it once; drop {option(name)}")
    if arguments.paper:
        for name in ("stop", "samples", "beams", "json"):
            if getattr(arguments, name):
                raise InputError(f"--paper shows one text of full length in its own form; drop {option(name)}")
    elif arguments.data:
        raise InputError("--data names the test set for --paper; give --paper too, or drop it")


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def whole(arguments: argparse.Namespace, loaded: "Loaded", prompt: str, sampling: "Sampling") -> int:
    """Several texts, or texts for a program to read: shown when all are finished."""
    settings = {"tokens": arguments.tokens, "stop": arguments.stop, "weights": arguments.weights}
    started_at = time.perf_counter()
    if arguments.beams:
        seeds: list[int] = []
        texts = loaded.likeliest(prompt, beams=arguments.beams, **settings)
        used = {"beams": arguments.beams}
        titles = [f"beam {n} of {len(texts)}, {text.score:.4f} nats per token" for n, text in enumerate(texts, 1)]
    else:
        seeds = [sampling.seed + place for place in range(arguments.samples or 1)]
        used = {name: value for name, value in vars(sampling).items() if name != "seed"}
        texts = loaded.generate_many([prompt] * len(seeds), seeds=seeds, **settings, **used)
        titles = [f"sample {place} of {len(seeds)}, seed {seed}" for place, seed in enumerate(seeds, 1)]
    seconds = time.perf_counter() - started_at
    if not arguments.json:
        print("\n\n".join(f"--- {title}\n{prompt}{text.text}" for title, text in zip(titles, texts, strict=True)))
        return 0
    result = {
        "prompt": prompt,
        "texts": [text.text for text in texts],
        "tokens": [text.tokens for text in texts],
        "tokens_per_second": sum(text.tokens for text in texts) / seconds,
        "seeds": seeds,
        "settings": {**settings, **used, "memory": loaded.config.model.memory},
    }
    if arguments.beams:
        result["scores"] = [text.score for text in texts]
    print(json.dumps(result, indent=2, ensure_ascii=False))
    return 0


def read_prompt(arguments: argparse.Namespace) -> str:
    from transformer_xl.files import strange_file

    if arguments.prompt_file is None:
        return typed_text("--prompt", arguments.prompt)
    name = "standard input" if arguments.prompt_file == "-" else arguments.prompt_file
    most = LARGEST_PROMPT + 1
    try:
        if arguments.prompt_file == "-":
            raw = sys.stdin.buffer.read(most)
        elif strange_file([Path(name)], links=True):
            way_out = "a pipe is standard input, with --prompt-file -"
            raise InputError(f"--prompt-file: {name} is no plain file; {way_out}")
        else:
            with Path(name).open("rb") as file:
                raw = file.read(most)
        if len(raw) > LARGEST_PROMPT:
            raise InputError(f"{name} has more than {LARGEST_PROMPT >> 20} MB, too many for a prompt; give its end")
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 at byte {error.start}; convert it") from None
    except FileNotFoundError:
        way_out = "write the prompt into it, or give it with --prompt"
        raise InputError(f"--prompt-file: {name} does not exist; {way_out}") from None


def typed_text(option: str, word: str) -> str:
    """What Python cannot read as the locale's letters it hands on byte by byte. Text is UTF-8, whatever the locale."""
    try:
        return word.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise InputError(f"{option} is not UTF-8; convert it, or give it in a file with --prompt-file") from None


def paper(arguments: argparse.Namespace, loaded: "Loaded", sampling: "Sampling") -> int:
    """Appendix E: nothing is picked by hand; the seed chooses where in the test set the context begins."""
    import numpy as np

    from transformer_xl.data.text.display import detokenize
    from transformer_xl.decoding import generate, text_pieces
    from transformer_xl.files import write_text

    test = loaded.store(arguments.data).split("test")
    room = len(test) - PAPER_CONTEXT - arguments.tokens
    if room < 1:
        raise InputError(
            f"the test set has {len(test):,} tokens, too few for {PAPER_CONTEXT} of context and {arguments.tokens} more; lower --tokens"
        )
    start = int(np.random.default_rng(sampling.seed).integers(room))
    context = [int(token) for token in test.tokens[start : start + PAPER_CONTEXT]]
    reference = test.tokens[start + PAPER_CONTEXT : start + PAPER_CONTEXT + arguments.tokens]
    readable = detokenize if loaded.tokenizer.kind == "word" else str

    def show(title: str, text: str) -> str:
        print(f"--- {title}\n{text}\n")
        return f"## {title}\n\n{text}\n"

    title = f"context: {PAPER_CONTEXT} tokens of the test set from token {start:,}"
    parts = [show(title, readable(loaded.tokenizer.decode(context)))]
    drawn = generate(loaded.model, context, tokens=arguments.tokens, sampling=sampling, weights=arguments.weights)
    generated = readable("".join(text_pieces(loaded.tokenizer, drawn, before=context)))
    parts.append(show(f"generated: {arguments.tokens} tokens, top {sampling.top_k}, seed {sampling.seed}", generated))
    parts.append(show("reference: what really came", readable(loaded.tokenizer.decode(reference))))
    if loaded.checkpoint.run is not None:
        path = loaded.checkpoint.run.made("samples") / f"paper-seed-{sampling.seed}.md"
        write_text(path, "\n".join(parts))
        print(f"written to {path}")
    return 0
