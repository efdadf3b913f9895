"""How surprising each token, line or document of a text is, as JSON lines, while the text is still coming. Memory does not grow with the text.

    txl score notes.txt --summary                                        (by the model in the box; one word is the text)
    txl score runs/first notes.txt --summary
    tail -f server.log | txl score runs/first - --by line --above 99.9% --state watch.state
    tail -f server.log | txl score runs/first - --by line --adapt both --state watch.state      (learning from every line it has told)

Of each token: {"token": "d", "id": 100, "bits": 3.21, "offset": 17}. Bits are minus the base-2 logarithm of its probability given all before it
(null for the first token, which has nothing before it); offset is the byte at which it begins. Bytes of a token that are no whole character are
shown as \\xe2; line ends of word models by their mark, such as <eos>; words they do not know as <unk>.

Of each line: its number, offset and bytes, its bits, its bits_per_byte, its rank (the share of the last lines that had fewer bits), among how many, the
part of it that surprised most, and its text. A document ends with a blank line, and is told without its text."""

import argparse
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from transformer_xl.cli.adapting import add_adapt, chosen
from transformer_xl.cli.devices import ADAPTER_HELP, add_device, add_precision, say_device
from transformer_xl.cli.models import add_run, load_named
from transformer_xl.console import say
from transformer_xl.errors import InputError

if TYPE_CHECKING:
    from transformer_xl.evaluation.lines import LineScore, LineScorer
    from transformer_xl.library import Loaded

READ_BYTES = 1 << 16
SAVED_EVERY_SECONDS = 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add = parser.add_argument
    add("file", metavar="FILE", help="the text; - reads standard input, which may never end")
    add("--by", choices=("token", "line", "document"), default="token", help="what a line of the answer is about")
    add(
        "--above",
        type=threshold,
        metavar="BITS|SHARE",
        help="only what has as many bits (40), or more than such a share of the last lines (99.9%%)",
    )
    add("--last", type=int, metavar="N", help="lines or documents that each is compared with (default: 10000)")
    add(
        "--state",
        type=Path,
        metavar="FILE",
        help="go on from here, and keep here what is remembered: survives a restart",
    )
    add("--summary", action="store_true", help="at the end, means over the text on standard error")
    add("--memory", metavar="M", type=int, help="positions remembered, where not as trained")
    add("--weights", choices=("exact", "int8"), default="exact", help="int8: faster, and a little less exact")
    add("--adapter", metavar="FILE", help=ADAPTER_HELP)
    add_device(parser)
    add_precision(parser, default="float32")
    add_adapt(parser)


@dataclass(frozen=True, kw_only=True)
class Threshold:
    bits: float = 0.0
    share: float | None = None

    @property
    def fewest(self) -> int:
        """Lines before one can stand out: among too few, none is so far from the others."""
        return 0 if self.share is None else math.ceil((1 - 1e-9) / (1 - self.share))

    def lets(self, line: "LineScore") -> bool:
        if self.share is None:
            return line.bits >= self.bits
        return line.rank is not None and line.among >= self.fewest and line.rank >= self.share


def threshold(text: str) -> Threshold:
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if text.endswith("%") and 0 < number < 100:
        return Threshold(share=number / 100)
    if not text.endswith("%") and 0 <= number < math.inf:
        return Threshold(bits=number)
    raise argparse.ArgumentTypeError(f"{text!r} is neither bits, such as 40, nor a share below 100 %, such as 99.9%")


class Source:
    """The bytes of a text as they come, and how many they were. Asked to stop, it ends while it waits, and before the next piece."""

    def __init__(self, stream: BinaryIO) -> None:
        self.read = 0
        self.stopping = False
        self._waiting = False
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        # read1 gives what is there and waits only where nothing is: a slow pipe is scored as it comes.
        while data := self._next():
            self.read += len(data)
            yield data

    def _next(self) -> bytes:
        self._waiting = True
        try:
            if self.stopping:
                raise KeyboardInterrupt
            read: Callable[[int], bytes] = getattr(self._stream, "read1", self._stream.read)
            return read(READ_BYTES)
        finally:
            self._waiting = False

    def stop(self, *_: object) -> None:
        self.stopping = True
        if self._waiting:
            raise KeyboardInterrupt

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """So that what is kept is kept between two lines, never within one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.stop) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def run(arguments: argparse.Namespace) -> int:
    by_token = arguments.by == "token"
    for option in ("state", "last"):
        if by_token and getattr(arguments, option) is not None:
            raise InputError(f"--{option} is for --by line and --by document")
    if by_token and arguments.above is not None and arguments.above.share is not None:
        raise InputError("--above P% compares lines or documents; give --by line, or --above BITS")
    check_file(Path(arguments.file), alone=arguments.run is None)
    where = {"device": arguments.device, "precision": arguments.precision, "adapter": arguments.adapter}
    loaded = load_named(arguments.run, memory=arguments.memory, **where)
    show = print_scores if by_token else print_lines
    with ExitStack() as opened:
        if arguments.state is not None:
            opened.enter_context(only_user_of(arguments.state))
        if arguments.file == "-":
            return show(arguments, loaded, sys.stdin.buffer, name="standard input")
        return show(arguments, loaded, opened.enter_context(text_in(Path(arguments.file))), name=arguments.file)


def check_file(path: Path, *, alone: bool) -> None:
    """`alone`: one word is the text, and nobody named a run; or the run was named, and the text forgotten."""
    if str(path) != "-" and (not path.exists() or path.is_dir()):
        what = "is a folder" if path.is_dir() else "does not exist"
        told = " (one word is the text, two are RUN and FILE)" if alone else ""
        raise InputError(f"{path} {what}; name a file, or - for standard input{told}")


@contextmanager
def text_in(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes; of one that is compressed, what it holds."""
    from transformer_xl.data.corpora.sources import COMPRESSED_ENDINGS, Source

    if path.suffix.lower() in COMPRESSED_ENDINGS:
        with Source(path=path).open() as stream:
            yield cast(BinaryIO, stream)
    else:
        with path.open("rb") as plain:
            yield plain


@contextmanager
def only_user_of(state: Path) -> Iterator[None]:
    """Two that keep what they remember in one file would each forget what the other has read."""
    from transformer_xl.errors import CheckpointError
    from transformer_xl.locks import only_holder

    if state.is_dir() or not state.parent.is_dir():
        what = "is a folder" if state.is_dir() else f"cannot be written, because there is no folder {state.parent}"
        raise InputError(f"--state: {state} {what}; name a file")

    def taken(owner: str) -> CheckpointError:
        return CheckpointError(f"{state} is in use by process {owner}; wait for it, stop it, or give another --state")

    with only_holder(state.with_name(f"{state.name}.lock"), what=str(state), taken=taken):
        yield


# --- tokens


def print_scores(arguments: argparse.Namespace, loaded: "Loaded", stream: BinaryIO, *, name: str) -> int:
    from transformer_xl.data.text.display import readable

    source, totals, names = Source(stream), Totals(), dict[int, str]()
    least = arguments.above.bits if arguments.above else None
    say_device(arguments, loaded)
    try:
        adapt = chosen(arguments, loaded)
        for piece in loaded.score_stream(source, name=name, weights=arguments.weights, adapt=adapt):
            rows = zip(piece.tokens.tolist(), piece.offsets.tolist(), piece.nats.tolist(), strict=True)
            for token, offset, loss_nats in rows:
                if token not in names:
                    names[token] = readable(loaded.tokenizer, token)
                bits = totals.add(loss_nats, offset)
                if least is None or (bits is not None and bits >= least):
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


# --- lines and documents


def print_lines(arguments: argparse.Namespace, loaded: "Loaded", stream: BinaryIO, *, name: str) -> int:
    source = Source(stream)
    scorer = loaded.line_scorer(
        by=arguments.by,
        last=arguments.last,
        state=arguments.state,
        name=name,
        weights=arguments.weights,
        adapt=chosen(arguments, loaded),
    )
    say_device(arguments, loaded)
    above, before = arguments.above, scorer.progress
    if above is not None and above.fewest > before.last:
        raise InputError(
            f"--above {100 * above.share:.10g}% needs {above.fewest:,} {arguments.by}s to compare with, and these are compared with the last"
            f" {before.last:,}; give a lower share, --above BITS, or --last {above.fewest} (and another --state, where one was begun)"
        )
    begun = arguments.state is not None and arguments.state.exists()
    if begun and arguments.file != "-":
        say(f"{before.read:,} bytes were read before ({arguments.state}); all of {name} is taken for what follows them")
    if arguments.state is not None:
        scorer.save(arguments.state)  # a place where nothing can be written is better heard of now
    with source.stopped_by_signals():
        try:
            for line in _lines(scorer, source, arguments.state):
                if arguments.above is None or arguments.above.lets(line):
                    sys.stdout.write(json.dumps(_as_json(line, arguments.by), ensure_ascii=False) + "\n")
                    sys.stdout.flush()
            if not scorer.progress.read:
                if arguments.state is not None and not begun:
                    arguments.state.unlink(missing_ok=True)
                raise InputError(f"{name} is empty, so there is nothing to score; give it some text")
            if arguments.above is not None and scorer.progress.units < arguments.above.fewest:
                say(
                    f"--above {100 * arguments.above.share:.10g}% needs {arguments.above.fewest:,} {arguments.by}s to compare with, and there were"
                    f" {scorer.progress.units:,}: nothing could stand out; give more text, a lower share, or --above BITS"
                )
        finally:
            # Also for a stream that is stopped by hand.
            if arguments.state is not None and scorer.progress.read:
                scorer.save(arguments.state)
            if arguments.summary and scorer.progress.read:
                print(_summary(scorer), file=sys.stderr)
    return 0


def _lines(scorer: "LineScorer", source: Source, state: Path | None) -> Iterator["LineScore"]:
    saved_at = time.monotonic()
    # First what waited when the state was saved.
    for piece in chain([b""], source):
        for line in scorer.feed(piece):
            yield line
            if source.stopping:
                raise KeyboardInterrupt
        if state is not None and time.monotonic() > saved_at + SAVED_EVERY_SECONDS:
            scorer.save(state)
            saved_at = time.monotonic()
    yield from scorer.finish()


def _as_json(line: "LineScore", by: str) -> dict[str, object]:
    part = line.part and {"text": line.part.text, "offset": line.part.offset, "bits": round(line.part.bits, 4)}
    told: dict[str, object] = {
        by: line.number,
        "offset": line.offset,
        **({"lines": line.lines} if by == "document" else {}),
        "bytes": line.bytes,
        "bits": round(line.bits, 4),
        "bits_per_byte": round(line.bits_per_byte, 4),
        "rank": None if line.rank is None else round(line.rank, 6),
        "among": line.among,
        "part": part,
    }
    return told if line.text is None else {**told, "text": line.text}


def _summary(scorer: "LineScorer") -> str:
    now = scorer.progress
    told = f"{now.lines:,} lines" if now.by == "line" else f"{now.units:,} documents of {now.lines:,} lines"
    return (
        f"{told}, {now.read:,} bytes: {now.bits / now.read:.4f} bits per byte, {now.bits / now.lines:.2f} bits per line"
    )
