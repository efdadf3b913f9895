"""Makes a store of anybody's own text: files, folders or standard input, any tokenizer, three ways to split."""

import hashlib
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal, get_args

import numpy as np

from transformer_xl.console import progress, say
from transformer_xl.data.corpora import encoding, pieces
from transformer_xl.data.corpora.dealing import Engine
from transformer_xl.data.corpora.encoding import make_store
from transformer_xl.data.corpora.inputs import STANDARD_INPUT, Gathered, gather
from transformer_xl.data.corpora.selection import Inputs
from transformer_xl.data.corpora.sources import Source
from transformer_xl.data.corpora.vocabulary import by_falling_frequency
from transformer_xl.data.store import Manifest, Store, encoded_by
from transformer_xl.data.text import tokenizers
from transformer_xl.errors import DataError, shown, suggest
from transformer_xl.files import digest, write_text

Kind = Literal["byte", "char", "word", "bpe"]
Documents = Literal["file", "blank-line", "separator"]
SplitBy = Literal["share", "file"]
SPLITS = ("train", "valid", "test")
UNITS = {
    "byte": "bits_per_byte",
    "char": "bits_per_character",
    "word": "perplexity_per_word",
    "bpe": "bits_per_byte",
    "number": "perplexity_per_word",
}
DEFAULT_BYTE_PAIRS = 8192
SMALLEST_BYTE_PAIRS = 256
LARGEST_VOCABULARY = 1_000_000
"""Of tokens that are learned or counted here. Room for all of them is asked for at once, and no model has more."""
LINE_SEARCH_BYTES = 1 << 20
"""How far from its share a split may end so as to end with a record or a line."""
SKIPPED = "skipped.txt"
TOLD = 10
"""Lines that say what was skipped, before the rest is only counted."""


@dataclass(frozen=True, kw_only=True)
class OwnText:
    """What to make of a text."""

    tokenizer: Kind = "byte"
    existing: tokenizers.Tokenizer | None = None
    """A model's own, so that the text can be read by it; nothing new is learned of the text then."""
    vocabulary_size: int | None = None
    """Largest vocabulary, marks included; for word and bpe."""
    lower: bool = False
    min_count: int | None = None
    """Words seen fewer times in train are <unk>; for word."""
    shares: tuple[float, ...] = (0.9, 0.05, 0.05)
    split_by: SplitBy = "share"
    documents: Documents = "file"
    separator: str | None = None
    inputs: Inputs = field(default_factory=Inputs)
    """Which files and which fields of records."""

    def __post_init__(self) -> None:
        self._check_words()
        size, count = self.vocabulary_size, self.min_count
        if size is not None and self.tokenizer not in ("word", "bpe"):
            raise DataError(
                f"`vocabulary_size=` limits word and bpe; the {self.tokenizer} vocabulary is what the text holds"
            )
        if size is not None and not (_is_whole(size) and size <= LARGEST_VOCABULARY):
            raise DataError(
                f"`vocabulary_size=` {shown(size)} must be a whole number, and at most {LARGEST_VOCABULARY:,}"
            )
        if self.tokenizer == "bpe" and size is not None and size < SMALLEST_BYTE_PAIRS:
            raise DataError(f"`vocabulary_size={size}` is too small for bpe, whose single bytes take 256")
        if self.tokenizer == "word" and size is not None and size < 3:
            raise DataError(
                f"`vocabulary_size={size}` leaves no word beside {tokenizers.END_OF_LINE} and {tokenizers.UNKNOWN}"
            )
        if count is not None and (self.tokenizer != "word" or not _is_whole(count) or count < 1):
            raise DataError(f"`min_count={shown(count)}` is for `tokenizer=word`, a whole number, and at least 1")
        if self.lower and self.tokenizer == "byte":
            raise DataError("`lower=` needs characters; the byte tokenizer knows none, use char, word or bpe")
        shares = self.shares
        if not isinstance(shares, tuple | list) or not all(isinstance(share, Real) for share in shares):
            raise DataError(f"`shares=` {shown(shares)} must be numbers, such as 0.9,0.05,0.05")
        if not 1 <= len(shares) <= 3 or any(not 0 < share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
            raise DataError(f"`shares={','.join(map(str, shares))}` must be one to three positive shares that make 1")
        if (self.documents == "separator") != (self.separator is not None):
            raise DataError("`documents=separator` and `separator=LINE` go together")
        line = self.separator
        if line is not None and (not isinstance(line, str) or not line.strip() or "\n" in line):
            raise DataError(f"`separator=` {shown(line)} must be one line that is not blank")

    def _check_words(self) -> None:
        """A choice is one of some words, each."""
        for name, words in {"tokenizer": Kind, "split_by": SplitBy, "documents": Documents}.items():
            if (word := getattr(self, name)) not in get_args(words):
                raise DataError(f"there is no `{name}={word}`{suggest(str(word), get_args(words))}")
        if not isinstance(self.lower, bool):
            raise DataError(f"`lower=` {shown(self.lower)} must be True or False")

    @property
    def rule(self) -> pieces.DocumentRule:
        if self.separator is not None:
            return pieces.by_separator(self.separator)
        return pieces.BY_FILE if self.documents == "file" else pieces.BY_BLANK_LINE

    @property
    def fallback(self) -> pieces.Fallback:
        kind = self.tokenizer if self.existing is None else self.existing.kind
        return "word" if kind in tokenizers.BETWEEN_SPACES else "character"


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def prepare_own_text(
    paths: Sequence[Path | str],
    *,
    out: Path | str,
    settings: OwnText,
    engine: Engine = "processes",
    standard_input: BinaryIO | None = None,
) -> Store:
    """One text, split by `settings`. The path `-` is standard input."""

    def fill(folder: Path, scratch: Path) -> tuple[Manifest, tokenizers.Tokenizer]:
        gathered = gather(paths, scratch=scratch, inputs=settings.inputs, standard_input=standard_input)
        split = _by_file if settings.split_by == "file" else _by_share
        parts = split(gathered.sources, settings)
        return _fill(parts, folder, settings, name=_name(paths), gathered=[gathered], engine=engine)

    return make_store(out, fill)


def prepare_given_splits(
    splits: dict[str, Sequence[Path | str]],
    *,
    out: Path | str,
    settings: OwnText,
    engine: Engine = "processes",
    standard_input: BinaryIO | None = None,
) -> Store:
    """Splits the user already has: split -> paths."""
    if "train" not in splits:
        raise DataError("`valid=` and `test=` need a `train=` beside them")

    def fill(folder: Path, scratch: Path) -> tuple[Manifest, tokenizers.Tokenizer]:
        gathered = {}
        for name in SPLITS:
            if name in splits:
                place = scratch / name
                place.mkdir()
                gathered[name] = gather(
                    splits[name],
                    scratch=place,
                    inputs=settings.inputs,
                    standard_input=standard_input,
                )
        _tell_of_repeats(gathered)
        parts = {name: [pieces.Part(source=source) for source in found.sources] for name, found in gathered.items()}
        return _fill(parts, folder, settings, name=_name(splits["train"]), gathered=gathered.values(), engine=engine)

    return make_store(out, fill)


def _tell_of_repeats(gathered: dict[str, Gathered]) -> None:
    """Files of valid and test that are train's, too. It may be meant so, and a figure made on them tells nothing of new text."""
    sizes = {source.disk_bytes for source in gathered["train"].sources}
    others = [(name, source) for name, found in gathered.items() if name != "train" for source in found.sources]
    likely = [(name, source) for name, source in others if source.disk_bytes in sizes]
    sizes = {source.disk_bytes for _, source in likely}
    digests = {digest(source.path) for source in gathered["train"].sources if source.disk_bytes in sizes}
    repeats = [f"{source.name} ({name})" for name, source in likely if digest(source.path) in digests]
    if repeats:
        more = f" and {len(repeats) - TOLD:,} more" * (len(repeats) > TOLD)
        say(f"also in train: {', '.join(repeats[:TOLD])}{more}; figures made on it say nothing of new text")


def _name(paths: Sequence[Path | str]) -> str:
    return "standard input" if paths[0] == STANDARD_INPUT else Path(paths[0]).resolve().name


def _by_file(sources: list[Source], settings: OwnText) -> dict[str, list[pieces.Part]]:
    """Whole files. Which go where depends on their names, in an order that has nothing to do with their contents; one that is larger than a share is held
    out only where there is no other."""
    names = SPLITS[: len(settings.shares)]
    if len(sources) < len(names):
        raise DataError(f"{len(sources)} files cannot be split into {len(names)} by file; use `split_by=share`")
    sizes = [source.disk_bytes for source in sources]
    waiting = sorted(range(len(sources)), key=lambda which: _name_digest(sources[which]))
    chosen: dict[str, set[int]] = {}
    for index, (name, share) in reversed(list(enumerate(zip(names, settings.shares, strict=True)))):
        most, bytes_so_far, taken = share * sum(sizes), 0, list[int]()
        for which in waiting if index == 0 else sorted(waiting, key=lambda which: sizes[which] > most):
            # Every split gets a file, and leaves one for each split still to come.
            if len(waiting) - len(taken) <= index or (index and taken and bytes_so_far >= most):
                break
            taken.append(which)
            bytes_so_far += sizes[which]
        chosen[name] = set(taken)
        waiting = [which for which in waiting if which not in chosen[name]]
    return {name: [pieces.Part(source=sources[which]) for which in sorted(chosen[name])] for name in names}


def _name_digest(source: Source) -> str:
    name = PurePosixPath(source.name.rpartition(":")[2]).name
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def _by_share(sources: list[Source], settings: OwnText) -> dict[str, list[pieces.Part]]:
    """One split of the text after the other, each ending with a record or a line wherever one ends nearby."""
    sizes = [_text_bytes(source) for source in sources]
    total = sum(sizes)
    bounds, so_far = [0], 0.0
    for share, following in pairwise(settings.shares):
        so_far += share
        position = round(so_far * total)
        # Each split keeps half its share, wherever lines end.
        reach = (min(position, bounds[-1] + math.ceil(share * total / 2)), position + int(following * total / 2))
        bounds.append(_good_end(sources, sizes, position, settings.fallback, reach=reach))
    bounds.append(total)
    names = SPLITS[: len(settings.shares)]
    ends = zip(names, pairwise(bounds), strict=True)
    return {name: _between(sources, sizes, begin, end) for name, (begin, end) in ends}


def _text_bytes(source: Source) -> int:
    if source.plain:
        return source.disk_bytes
    with progress(f"measuring {source.path.name}", total=source.disk_bytes, unit="bytes") as advance:
        return sum(map(len, source.blocks(advance=advance)))


def _good_end(
    sources: list[Source], sizes: list[int], position: int, fallback: pieces.Fallback, *, reach: tuple[int, int]
) -> int:
    """Near `position`, in the file that it lies in and within `reach`: where the last record before it ends, or the next; else where a line does so; else
    where a word or a character ends."""
    begin = 0
    for source, size in zip(sources, sizes, strict=True):
        if begin <= position < begin + size:
            here = position - begin
            low = max(reach[0] - begin, here - LINE_SEARCH_BYTES, 0)
            high = min(reach[1] - begin, here + LINE_SEARCH_BYTES, size)
            if (starts := source.record_starts()) is not None:
                at = int(np.searchsorted(starts, here, side="right"))
                before = int(starts[at - 1])
                behind = int(starts[at]) if at < len(starts) else size
                if begin + before >= max(begin + low, reach[0], 1):
                    return begin + before
                if behind <= high:
                    return begin + behind
            return begin + _end_of_line(source, low, here, high, fallback)
        begin += size
    return position


def _end_of_line(source: Source, low: int, here: int, high: int, fallback: pieces.Fallback) -> int:
    with source.open() as stream:
        stream.seek(low)
        # One byte more: whether a character ends here shows only in the byte after it.
        window = stream.read(max(high, here + 1) - low)
    limit = here - low
    if before := window.rfind(b"\n", 0, limit) + 1:
        return low + before
    if behind := window.find(b"\n", limit, high - low) + 1:
        return low + behind
    return low + (pieces.cut_point(window, limit, fallback) or limit)


def _between(sources: list[Source], sizes: list[int], begin: int, end: int) -> list[pieces.Part]:
    parts = []
    here = 0
    for source, size in zip(sources, sizes, strict=True):
        start, stop = max(begin - here, 0), min(end - here, size)
        if start < stop:
            parts.append(pieces.Part(source=source, start=start, stop=stop if stop < size or start else None))
        here += size
    return parts


def _fill(
    parts: dict[str, list[pieces.Part]],
    folder: Path,
    settings: OwnText,
    *,
    name: str,
    gathered: Iterable[Gathered],
    engine: Engine,
) -> tuple[Manifest, tokenizers.Tokenizer]:
    looked = list(gathered)
    _tell(looked, folder)
    tokenizer = _tokenizer(parts, settings, engine=engine)
    records = encoding.write_splits(folder, parts=parts, tokenizer=tokenizer, rule=settings.rule, engine=engine)
    manifest = Manifest(
        name=name,
        rule=_rule(settings),
        unit=UNITS[tokenizer.kind],
        documents=("a record's or " if any(one.records for one in looked) else "") + settings.rule.description,
        origin=_origin(looked),
        splits=records,
        **encoded_by(tokenizer),
    )
    return manifest, tokenizer


def _tell(looked: list[Gathered], folder: Path) -> None:
    """How it was read, and what was skipped: the first few on stderr, all that was skipped in the store."""
    _say_some([line for one in looked for line in one.told], rest="")
    lines = [
        f"{why}\t{what!r}" if not what.isprintable() else f"{why}\t{what}"
        for one in looked
        for why, what in one.skipped
    ]
    if lines:
        write_text(folder / SKIPPED, "".join(f"{line}\n" for line in lines))
    _say_some(["skipped " + line.replace("\t", ": ") for line in lines], rest=f"; all stand in the store's {SKIPPED}")


def _say_some(lines: list[str], *, rest: str) -> None:
    for line in lines[:TOLD]:
        say(line)
    if len(lines) > TOLD:
        say(f"... and {len(lines) - TOLD:,} more{rest}")


def _origin(looked: list[Gathered]) -> dict[str, str]:
    told = {
        "records": f"{sum(one.records for one in looked):,}" if any(one.records for one in looked) else "",
        "fields": ", ".join(dict.fromkeys(name for one in looked for name in one.field)),
        "skipped": ", ".join(
            f"{count:,} {why}" for why, count in sorted(sum((o.counts for o in looked), Counter()).items())
        ),
    }
    return {what: value for what, value in told.items() if value}


def _tokenizer(parts: dict[str, list[pieces.Part]], settings: OwnText, *, engine: Engine) -> tokenizers.Tokenizer:
    if settings.existing is not None:
        return settings.existing
    train, rule, lower = parts["train"], settings.rule, settings.lower
    if settings.tokenizer == "byte":
        return tokenizers.ByteTokenizer()
    if settings.tokenizer == "char":
        # Of all splits: a character unknown to the tokenizer could not be written down at all.
        everything = [part for split in parts.values() for part in split]
        characters = encoding.collect_characters(everything, rule=rule, lower=lower, engine=engine)
        return tokenizers.CharTokenizer(characters, lower=lower)
    if settings.tokenizer == "word":
        counts = encoding.count_words(train, rule=rule, lower=lower, line_marks=True, engine=engine)
        least, size = settings.min_count or 1, settings.vocabulary_size
        words = by_falling_frequency(
            counts, first=(tokenizers.END_OF_LINE, tokenizers.UNKNOWN), min_count=least, size=size
        )
        return tokenizers.WordTokenizer(words, lower=lower)
    return tokenizers.BytePairTokenizer.learn(
        encoding.texts(train, rule=rule),
        size=settings.vocabulary_size or DEFAULT_BYTE_PAIRS,
        lower=lower,
        show=sys.stderr.isatty(),
    )


def _rule(settings: OwnText) -> str:
    if settings.existing is not None:
        return f"{settings.existing.kind} tokens of a vocabulary of {settings.existing.size:,} that existed before"
    rules = {
        "byte": "bytes as they are",
        "char": "characters as they are",
        "word": f"words between white space, {tokenizers.END_OF_LINE} after every line; vocabulary of train by falling frequency",
        "bpe": "byte pairs learned on train",
    }
    lower = ", lower-cased" if settings.lower else ""
    return rules[settings.tokenizer] + lower
