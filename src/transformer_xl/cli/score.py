"""How surprising each token of a text is, as JSON lines, while the text is still coming. Memory does not grow with the text.

    txl score runs/first notes.txt --summary
    tail -f server.log | txl score runs/first -

One line for each token: {"token": "d", "id": 100, "bits": 3.21, "offset": 17}. Bits are minus the base-2 logarithm of its probability given all before it
(null for the first token, which has nothing before it); offset is the byte at which it begins. Bytes of a token that are no whole character are
shown as \\xe2; line ends of word models by their mark, such as <eos>; words they do not know as <unk>."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from transformer_xl.errors import InputError

if TYPE_CHECKING:
    from transformer_xl.library import Loaded

READ_BYTES = 1 << 16


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's folder, or one of its checkpoints")
    add("file", metavar="FILE", help="the text; - reads standard input, which may never end")
    add("--summary", action="store_true", help="at the end, means over the text on standard error")
    add("--memory", metavar="M", type=int, help="positions remembered, where not as trained")
    add("--weights", choices=("exact", "int8"), default="exact", help="int8: faster, and a little less exact")
    add("--device", default="cpu")


class Source:
    """The bytes of a text as they come, and how many they were."""

    def __init__(self, stream: BinaryIO) -> None:
        self.read = 0
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        # read1 gives what is there and waits only where nothing is: a slow pipe is scored as it comes.
        while data := self._stream.read1(READ_BYTES):  # type: ignore[attr-defined]
            self.read += len(data)
            yield data


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.library import load

    loaded = load(arguments.run, memory=arguments.memory, device=arguments.device)
    if arguments.file == "-":
        return print_scores(arguments, loaded, sys.stdin.buffer, name="standard input")
    try:
        with Path(arguments.file).open("rb") as stream:
            return print_scores(arguments, loaded, stream, name=arguments.file)
    except FileNotFoundError:
        raise InputError(f"{arguments.file} does not exist; name a file, or - for standard input") from None


def print_scores(arguments: argparse.Namespace, loaded: "Loaded", stream: BinaryIO, *, name: str) -> int:
    from transformer_xl.data.text.display import readable

    source, totals, names = Source(stream), Totals(), dict[int, str]()
    try:
        for piece in loaded.score_stream(source, name=name, weights=arguments.weights):
            rows = zip(piece.token_P.tolist(), piece.offset_P.tolist(), piece.loss_P.tolist(), strict=True)
            for token, offset, loss_nats in rows:
                if token not in names:
                    names[token] = readable(loaded.tokenizer, token)
                bits = totals.add(loss_nats, offset)
                line = {"token": names[token], "id": token, "bits": bits, "offset": offset}
                sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
            sys.stdout.flush()
        if not totals.tokens:
            raise InputError(f"{name} holds no tokens, so there is nothing to score; give it some text")
    finally:
        # Also for a stream that is stopped by hand.
        if arguments.summary and totals.tokens:
            print(totals.sentence(source.read), file=sys.stderr)
    return 0


@dataclass
class Totals:
    tokens: int = 0
    bits: float = 0.0
    first_scored: int = 0
    """The byte at which the second token, the first with a context, begins."""

    def add(self, loss_nats: float, offset: int) -> float | None:
        """The token's bits, counted; None for the first."""
        self.tokens += 1
        if math.isnan(loss_nats) and self.tokens == 1:
            return None
        if self.tokens == 2:
            self.first_scored = offset
        bits = loss_nats / math.log(2)
        self.bits += bits
        return round(bits, 6)

    def sentence(self, read: int) -> str:
        scored = self.tokens - 1
        if not scored:
            return "1 token, which has nothing before it: nothing could be predicted"
        mean = self.bits / scored
        per_byte = self.bits / (read - self.first_scored)
        return f"{scored:,} tokens after the first: {mean:.4f} bits per token, {per_byte:.4f} bits per byte, perplexity {2.0 ** min(mean, 1000.0):,.2f}"
