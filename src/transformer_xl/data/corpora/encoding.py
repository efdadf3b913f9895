"""From pieces of text to a store: counts what a vocabulary needs, then encodes every split, in one stream each.

Nothing here holds more than a few pieces at a time, however long the text is.
"""

import errno
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.console import progress
from transformer_xl.data import store
from transformer_xl.data.corpora.dealing import Engine
from transformer_xl.data.corpora.pieces import DocumentRule, Fallback, Part, Piece, cut, each_piece, total_bytes
from transformer_xl.data.remote import is_address
from transformer_xl.data.text import tokenizers
from transformer_xl.errors import DataError
from transformer_xl.files import atomic_folder, put_back, write_json

Parts = Mapping[str, Sequence[Part]]
"""Split -> its parts, in order."""


def count_words(
    parts: Sequence[Part], *, rule: DocumentRule, lower: bool, line_marks: bool, engine: Engine
) -> Counter[str]:
    """How often each word occurs, in order of first appearance; with `line_marks` every line's end counts as `<eos>`."""
    total: Counter[str] = Counter()
    fallback: Fallback = "word" if line_marks else "none"
    shared = (rule, lower, line_marks)
    counts = each_piece(parts, _count_piece, shared, fallback=fallback, title="counting words", engine=engine)
    with closing(counts):
        for piece_counts in counts:
            total.update(piece_counts)
    return total


def _count_piece(shared: tuple[DocumentRule, bool, bool], piece: Piece) -> Counter[str]:
    rule, lower, line_marks = shared
    counts: Counter[str] = Counter()
    for _, data, offset in by_document(piece, rule, ends_lines=line_marks):
        text = tokenizers.decode_utf8(data, name=piece.name, offset=offset)
        text = text.lower() if lower else text
        counts.update((text.replace("\n", f" {tokenizers.END_OF_LINE} ") if line_marks else text).split())
    return counts


def collect_characters(parts: Sequence[Part], *, rule: DocumentRule, lower: bool, engine: Engine) -> str:
    """Every character that occurs, in code point order."""
    found: NDArray[Any] = np.zeros(0, dtype=np.uint32)
    shared, title = (rule, lower), "collecting characters"
    sets = each_piece(parts, _piece_characters, shared, fallback="character", title=title, engine=engine)
    with closing(sets):
        for characters in sets:
            found = np.union1d(found, characters)
    return "".join(map(chr, found.tolist()))


def _piece_characters(shared: tuple[DocumentRule, bool], piece: Piece) -> NDArray[Any]:
    rule, lower = shared
    text = "".join(
        tokenizers.decode_utf8(data, name=piece.name, offset=offset) for _, data, offset in by_document(piece, rule)
    )
    return np.unique(tokenizers.code_points(text.lower() if lower else text))


def texts(parts: Sequence[Part], *, rule: DocumentRule) -> Iterator[str]:
    """The text itself, piece by piece, for whoever learns from it; bytes that are no UTF-8 are no part of it."""
    with progress("reading", total=total_bytes(parts), unit="bytes") as advance:
        for piece in cut(parts, fallback="character", advance=advance):
            for _, data, _offset in by_document(piece, rule):
                yield from filter(None, tokenizers.STRAY.split(tokenizers.escaped(data))[::2])


def write_splits(
    folder: Path, *, parts: Parts, tokenizer: tokenizers.Tokenizer, rule: DocumentRule, engine: Engine
) -> tuple[store.SplitRecord, ...]:
    """Encodes every split into its files. A split that shares its parts with an earlier one is encoded again: it is small."""
    sentences, records = store.sentence_mark(tokenizer) is not None, []
    fallback: Fallback = "none" if sentences else "word" if tokenizer.kind in tokenizers.BETWEEN_SPACES else "character"
    for name, split in parts.items():
        shared, title = (tokenizer, rule), f"encoding {name}"
        encoded = each_piece(split, encode_piece, shared, fallback=fallback, title=title, engine=engine)
        writer = store.SplitWriter(folder=folder, name=name, vocabulary=tokenizer.size, sentences=sentences)
        with writer, closing(encoded):
            for piece in encoded:
                writer.append(piece)
            records.append(writer.finish())
    return tuple(records)


def encode_piece(shared: tuple[tokenizers.Tokenizer, DocumentRule], piece: Piece) -> store.Encoded:
    tokenizer, rule = shared
    runs: list[NDArray[Any]] = []
    starts = []
    count = 0
    by_byte = tokenizer.kind in tokenizers.ANY_BYTES
    for begins, data, offset in by_document(piece, rule, ends_lines=tokenizer.kind == "word"):
        if begins:
            starts.append(count)
        text = data if by_byte else tokenizers.decode_utf8(data, name=piece.name, offset=offset)
        runs.append(tokenizer.encode(text))
        count += len(runs[-1])
    tokens = np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)
    sentence_starts, words = _sentences_and_words(tokenizer, tokens, piece)
    return store.Encoded(
        tokens=tokens.astype(store.smallest_dtype(tokenizer.size)),
        document_starts=np.unique(np.asarray(starts, dtype=np.int64)),
        sentence_starts=sentence_starts,
        bytes=len(piece.data),
        characters=count_characters(piece.data),
        words=words,
    )


def _sentences_and_words(
    tokenizer: tokenizers.Tokenizer, tokens: NDArray[Any], piece: Piece
) -> tuple[NDArray[np.int64], int | None]:
    if not isinstance(tokenizer, tokenizers.WordTokenizer):
        return np.zeros(0, dtype=np.int64), None
    marks = np.flatnonzero(tokens == tokenizer.mark)
    if tokenizer.marks == "lines":
        return np.zeros(0, dtype=np.int64), len(tokens) - len(marks)
    begins, ends = marks[::2], marks[1::2]
    # Sentences follow each other without a gap, unless the text itself holds the mark.
    if len(marks) % 2 or (begins[1:] != ends[:-1] + 1).any():
        mark = tokenizer.token(tokenizer.mark)
        raise DataError(f"{piece.name} holds the word {mark} near byte {piece.offset:,}, which marks a sentence's ends")
    return begins, len(tokens) - len(marks)


def by_document(piece: Piece, rule: DocumentRule, *, ends_lines: bool = False) -> Iterator[tuple[bool, bytes, int]]:
    """(begins a document, its bytes, their offset in the source) for what each document has in a piece, marks left out.

    With `ends_lines` the last line of a file is ended if nobody did.
    """
    here, begins = 0, False
    for stop, start in rule.spans(piece):
        if here < stop or begins:
            yield begins, piece.data[here:stop], piece.offset + here
        here, begins = start, True
    if rest := piece.data[here:]:
        unfinished = ends_lines and piece.last and not rest.endswith(b"\n")
        yield begins, rest + b"\n" if unfinished else rest, piece.offset + here


def count_characters(data: bytes) -> int:
    """Bytes that begin a character: in UTF-8, all but the continuation bytes."""
    array = np.frombuffer(data, dtype=np.uint8)
    return len(array) - int(np.count_nonzero((array & 0xC0) == 0x80))


# --- a store, whole or not at all


@contextmanager
def store_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that becomes `out`. What goes wrong in writing it is said in one sentence.

    Everything that reads text raises DataError by itself, so an OSError that arrives here is about the target.
    """
    if is_address(out):
        raise DataError(f"`out=` {out} is an address, and a store is written into a folder; copy it there afterwards")
    out = out.resolve()  # a link to a larger disk is followed, not replaced
    put_back(out)
    if out.exists() and not (out / store.MANIFEST).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is no data store; choose another `out=`, or remove it first")
    try:
        with atomic_folder(out) as folder:
            yield folder
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError(f"no space left for {out}; free some, or choose another `out=`") from error
        raise DataError(f"{out} cannot be written: {error.strerror or error}; choose another `out=`") from error


Fill = Callable[[Path, Path], tuple[store.Manifest, tokenizers.Tokenizer]]
"""(folder of the store, scratch folder) -> what was written there."""


def make_store(out: Path | str, fill: Fill) -> store.Store:
    out = Path(out)
    with store_folder(out) as folder:
        # A place for unpacked files inside the folder being made: it goes away with it, also when things go wrong.
        with tempfile.TemporaryDirectory(prefix="scratch-", dir=folder) as scratch:
            manifest, tokenizer = fill(folder, Path(scratch))
        tokenizer.save(folder)
        write_json(folder / store.MANIFEST, manifest.to_json())  # last: a folder without a manifest is no store
    return store.open_store(out)
