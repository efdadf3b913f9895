"""Tokens at rest: a folder of plain arrays with a manifest that says what they are. Knows no text and no model.

DIR/manifest.json            what it is, counts and checksums per split, written last
DIR/tokenizer.json ...       the tokenizer that made it
DIR/train.tokens.bin         every token, little-endian, smallest integer that fits, memory-mapped
DIR/train.documents.bin      where documents begin: int64 positions in the tokens
DIR/train.sentences.bin      where sentences begin, for corpora made of sentences

DIR may be an address, s3://bucket/data/enwik8: then a local copy is what is read (remote.py).
"""

import hashlib
import json
import re
from collections import Counter
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from transformer_xl.config.fields import no_giant, not_negative, one_of, positive, read
from transformer_xl.console import progress
from transformer_xl.data.remote import RemoteFolder, is_address, local_copy
from transformer_xl.data.text.tokenizers import (
    BYTE_PAIRS,
    DESCRIPTION,
    VOCABULARY,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
)
from transformer_xl.errors import ConfigError, DataError, InputError, shown, suggest
from transformer_xl.files import digest, put_back, strange_file

VERSION = 1
MANIFEST = "manifest.json"
DTYPES = ("uint8", "uint16", "uint32")
POSITION = np.dtype("<i8")
Positions = NDArray[np.int64]
OF_A_SPLIT = r"\w[\w.-]*\.(tokens|documents|sentences)\.bin"
FILES_OF_A_TOKENIZER = {"word": (VOCABULARY,), "bpe": (BYTE_PAIRS,)}
"""By kind, beside its description."""
MOST_MANIFEST_BYTES, MOST_TOKENIZER_BYTES = 16 << 20, 256 << 20
"""Of such files in somebody's bucket, which are read into memory."""
Unit = Literal["bits_per_character", "bits_per_byte", "perplexity_per_word"]


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SplitRecord:
    name: str
    tokens: int
    documents: int
    bytes: int
    """Bytes of the original text: the denominator of bits per byte."""
    characters: int
    """Bytes that begin a character, which for UTF-8 text is the number of characters."""
    words: int | None
    """Words of the original text, without end marks; None where tokens are not words."""
    files: tuple[FileRecord, ...]

    def __post_init__(self) -> None:
        positive(self, self.name, "tokens", "bytes")
        not_negative(self, self.name, "documents", "characters")
        if self.words is not None:
            not_negative(self, self.name, "words")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    version: int = VERSION
    name: str
    rule: str
    """How the text was read, in words: belongs under every figure made from this store."""
    unit: str
    """What figures are reported in: a `Unit`."""
    tokenizer_kind: str
    vocabulary_size: int
    dtype: str
    """Integers on disk, little-endian."""
    documents: str
    """What begins a document, in words."""
    sentence_mark: int | None = None
    """The token at both ends of every sentence, for corpora made of sentences; the pair of two is no target by default."""
    origin: dict[str, str] = field(default_factory=dict)
    """Where the text came from: file -> checksum, and what else is needed to find it again."""
    splits: tuple[SplitRecord, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Manifest":
        """Strictly: it may come from anybody, and all that is read is mapped and cut by its numbers."""
        return read(cls, value, name="")

    def __post_init__(self) -> None:
        no_giant(self, "manifest")
        positive(self, "manifest", "vocabulary_size")
        one_of(self, "manifest", "unit", get_args(Unit))
        one_of(self, "manifest", "dtype", DTYPES)
        if self.sentence_mark is not None and not 0 <= self.sentence_mark < self.vocabulary_size:
            raise ConfigError(f"sentence_mark: {self.sentence_mark} is no token of {self.vocabulary_size:,}")
        names = [split.name for split in self.splits]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"splits: {shown(names)}, where there is at least one, each with a name of its own")
        for split in self.splits:
            self._check_files(split)

    def _check_files(self, split: SplitRecord) -> None:
        """What a split is read from is there, and as large as its counts say."""
        sizes = {file.name: file.bytes for file in split.files}
        wanted = {
            "tokens": split.tokens * np.dtype(self.dtype).itemsize,
            "documents": split.documents * POSITION.itemsize,
        }
        for what, size in wanted.items():
            found = sizes.get(f"{split.name}.{what}.bin")
            if found != size:
                file = f"{split.name}.{what}.bin"
                raise ConfigError(f"{file} has {shown(found)} bytes where its {what} take {shown(size)}")
        sentences = sizes.get(f"{split.name}.sentences.bin")
        if self.sentence_mark is not None and (sentences is None or sentences % POSITION.itemsize):
            raise ConfigError(f"{split.name}.sentences.bin has {shown(sentences)} bytes, which are no positions")


class Split:
    """One split of a store. `tokens` and the positions are memory-mapped, read-only."""

    def __init__(self, *, folder: Path, record: SplitRecord, dtype: str, sentence_mark: int | None = None) -> None:
        self.name, self.sentence_mark = record.name, sentence_mark
        self.bytes, self.characters, self.words = record.bytes, record.characters, record.words
        self.tokens = _map(folder / f"{record.name}.tokens.bin", np.dtype(dtype).newbyteorder("<"))
        self.document_starts = _positions(folder / f"{record.name}.documents.bin", tokens=record.tokens)
        self.sentence_starts: Positions = np.zeros(0, dtype=np.int64)
        if sentence_mark is not None:
            self.sentence_starts = _positions(folder / f"{record.name}.sentences.bin", tokens=record.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, tokens: int) -> "Split":
        """The beginning of this split, as a split; its bytes and characters are the tokens' share of them."""
        if tokens < 2:
            raise InputError(f"{shown(tokens)} tokens of {self.name} have nothing to predict; take at least 2")
        if tokens >= len(self):
            return self
        beginning = copy(self)
        beginning.tokens = self.tokens[:tokens]
        beginning.document_starts = self.document_starts[: np.searchsorted(self.document_starts, tokens)]
        beginning.sentence_starts = self.sentence_starts[: np.searchsorted(self.sentence_starts, tokens)]
        share = tokens / len(self)
        beginning.bytes, beginning.characters = round(self.bytes * share), round(self.characters * share)
        beginning.words = None
        return beginning


class Store:
    """A text as tokens in a folder, cut into splits."""

    def __init__(self, *, folder: Path, manifest: Manifest, address: str | None = None) -> None:
        self.folder = folder
        self.manifest = manifest
        self.address = address
        """Where it lies in object storage, if `folder` is a copy of that."""

    @property
    def place(self) -> str:
        """Where to find it again."""
        return self.address or str(self.folder.resolve())

    def __repr__(self) -> str:
        manifest = self.manifest
        splits = ", ".join(f"{split.name} {split.tokens:,}" for split in manifest.splits)
        what = f"{manifest.name}, {manifest.vocabulary_size:,} {manifest.tokenizer_kind} tokens"
        return f"<store {self.address or self.folder}: {what}; {splits}>"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.folder)
        if tokenizer.size != self.manifest.vocabulary_size:
            raise DataError(
                f"{self.folder} has a tokenizer of {tokenizer.size:,} tokens where its manifest says {self.manifest.vocabulary_size:,};"
                " prepare the store again"
            )
        return tokenizer

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split.name for split in self.manifest.splits)

    def fingerprint(self) -> str:
        """Of the text that training reads, wherever it lies: two stores that have the same hold the same tokens in the same order."""
        read = [split for split in self.manifest.splits if split.name in ("train", "valid")]
        sums = sorted((split.name, file.name, file.sha256) for split in read for file in split.files)
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()

    def split(self, name: str) -> Split:
        for record in self.manifest.splits:
            if record.name == name:
                mark = self.manifest.sentence_mark
                return Split(folder=self.folder, record=record, dtype=self.manifest.dtype, sentence_mark=mark)
        raise DataError(f"{self.folder} has no split {name}{suggest(name, self.splits)}")


def open_store(path: Path | str, *, verify: bool = False) -> Store:
    """Checks that every file is there with its size; `verify` reads them all and checks their checksums too.

    `path` is a folder, or an address such as s3://bucket/data/enwik8, of which all checksums are verified when it is fetched."""
    if is_address(path) and not Path(path).exists():
        return _open_remote(str(path), verify=verify)
    folder = Path(path)
    put_back(folder)
    place = folder / MANIFEST
    # Large files are often links to where another tool keeps them.
    strange = strange_file(sorted(folder.glob("*")), links=True)
    if strange is not None:
        raise DataError(f"{strange} is a special file, where a store has plain files; prepare the store again")
    if not place.is_file():
        raise DataError(
            f"{folder} holds no data store (there is no {MANIFEST}); make one with: txl prepare NAME --out {folder}"
        )
    manifest = read_manifest(place.read_bytes(), place=place)
    files = [file for split in manifest.splits for file in split.files]
    for record in files:
        file = folder / record.name
        if not file.is_file():
            raise DataError(f"{file} is missing; prepare the store again")
        if (size := file.stat().st_size) != record.bytes:
            told = f"{size:,} bytes where the manifest says {record.bytes:,}"
            raise DataError(f"{file} has {told}; prepare the store again")
    if verify:
        with progress(f"verifying {folder.name}", total=sum(file.bytes for file in files), unit="bytes") as advance:
            for record in files:
                if (found := digest(folder / record.name)) != record.sha256:
                    told = f"sha256 {found} where the manifest says {record.sha256}"
                    raise DataError(f"{folder / record.name} has {told}; prepare the store again")
                advance(record.bytes)
    return Store(folder=folder, manifest=manifest)


def read_manifest(data: bytes, *, place: Path | str) -> Manifest:
    """Every name in it is that of a file beside it."""
    try:
        value = json.loads(data)
        version = value["version"]
        manifest = Manifest.from_json(value) if version == VERSION else None
    except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{place} is damaged ({what}); prepare the store again") from error
    if manifest is None:
        raise DataError(f"{place} has version {shown(version)}, this program reads {VERSION}; prepare the store again")
    files = [file for split in manifest.splits for file in split.files]
    for name in (*(split.name for split in manifest.splits), *(file.name for file in files)):
        if Path(name).name != name:
            raise DataError(f"{place} is damaged ({name!r} is no name of a file in it); prepare the store again")
    return manifest


def _open_remote(address: str, *, verify: bool) -> Store:
    remote = RemoteFolder(address)
    data = remote.read(MANIFEST, at_most=MOST_MANIFEST_BYTES)
    if data is None:
        raise DataError(
            f"{remote.address} holds no data store (there is no {MANIFEST}); make one with txl prepare, and copy its folder there"
        )
    manifest = read_manifest(data, place=f"{remote.address}/{MANIFEST}")
    files = [file for split in manifest.splits for file in split.files]
    names = [file.name for file in files]
    # These are written here, so they are held to more than those of a folder that is only read.
    wrong = next((name for name in names if not re.fullmatch(OF_A_SPLIT, name, re.ASCII)), None)
    if wrong is None and len(set(names)) < len(names):
        wrong = next(name for name, count in Counter(names).items() if count > 1)
    if wrong is not None:
        raise DataError(
            f"{remote.address}/{MANIFEST} is damaged ({wrong!r} is no name of one file of a split); prepare the store again"
        )
    small = {MANIFEST: data}
    for name in (DESCRIPTION, *FILES_OF_A_TOKENIZER.get(manifest.tokenizer_kind, ())):
        content = remote.read(name, at_most=MOST_TOKENIZER_BYTES)
        if content is None:
            raise DataError(f"{remote.address}/{name} is missing; copy the store there again")
        small[name] = content
    folder = local_copy(remote, small=small, large=files, check=lambda copy: open_store(copy, verify=verify))
    return Store(folder=folder, manifest=manifest, address=remote.address)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A piece of one split, ready to be written. Positions count from its first token; a document may begin after its last, and go on in the next."""

    tokens: NDArray[Any]
    document_starts: Positions
    sentence_starts: Positions
    bytes: int
    characters: int
    words: int | None


class SplitWriter:
    """Writes one split as it comes, keeping counts and checksums, so that no split need fit in memory."""

    def __init__(self, *, folder: Path, name: str, vocabulary: int, sentences: bool = False) -> None:
        self.name = name
        self.dtype = smallest_dtype(vocabulary)
        kinds = ("tokens", "documents", "sentences")[: 3 if sentences else 2]
        self._files = {kind: _File(folder / f"{name}.{kind}.bin") for kind in kinds}
        self._count = self._document_count = self._bytes = self._characters = 0
        self._words: int | None = 0
        self._begun = False
        """Whether a document begins with the next token."""

    def append(self, encoded: Encoded) -> None:
        self._files["tokens"].write(encoded.tokens.astype(self.dtype, copy=False))
        starts, size = encoded.document_starts, len(encoded.tokens)
        if self._begun:
            starts = np.union1d(starts, np.zeros(1, dtype=np.int64))
        self._begun = bool(len(starts)) and int(starts[-1]) == size
        starts = starts[starts < size]
        self._files["documents"].write((starts + self._count).astype("<i8", copy=False))
        if "sentences" in self._files:
            self._files["sentences"].write((encoded.sentence_starts + self._count).astype("<i8", copy=False))
        self._count += len(encoded.tokens)
        self._document_count += len(starts)
        self._bytes += encoded.bytes
        self._characters += encoded.characters
        self._words = None if self._words is None or encoded.words is None else self._words + encoded.words

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def finish(self) -> SplitRecord:
        if self._count == 0:
            raise DataError(f"the {self.name} split holds no tokens; give it more text or a larger share")
        return SplitRecord(
            name=self.name,
            tokens=self._count,
            documents=self._document_count,
            bytes=self._bytes,
            characters=self._characters,
            words=self._words,
            files=tuple(file.finish() for file in self._files.values()),
        )


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] = path.open("wb")
        self._sha256 = hashlib.sha256()
        self._size = 0

    def write(self, array: NDArray[Any]) -> None:
        data = array.tobytes()
        self._file.write(data)
        self._sha256.update(data)
        self._size += len(data)

    def close(self) -> None:
        self._file.close()

    def finish(self) -> FileRecord:
        self.close()
        return FileRecord(name=self._path.name, bytes=self._size, sha256=self._sha256.hexdigest())


def encoded_by(tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a manifest that the tokenizer decides."""
    return {
        "tokenizer_kind": tokenizer.kind,
        "vocabulary_size": tokenizer.size,
        "dtype": smallest_dtype(tokenizer.size).name,
        "sentence_mark": sentence_mark(tokenizer),
    }


def sentence_mark(tokenizer: Tokenizer) -> int | None:
    return tokenizer.mark if isinstance(tokenizer, WordTokenizer) and tokenizer.marks == "sentences" else None


def smallest_dtype(vocabulary: int) -> np.dtype[Any]:
    return next(np.dtype(name).newbyteorder("<") for name in DTYPES if vocabulary <= np.iinfo(name).max + 1)


def _positions(path: Path, *, tokens: int) -> Positions:
    """Never falling, none beyond the tokens."""
    starts: Positions = _map(path, POSITION)
    if len(starts) and not (starts[0] >= 0 and starts[-1] <= tokens and bool((starts[1:] >= starts[:-1]).all())):
        raise DataError(f"{path} holds positions that fall, or lie outside {tokens:,} tokens; prepare the store again")
    return starts


def _map(path: Path, dtype: np.dtype[Any]) -> Any:
    # An empty file cannot be memory-mapped.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
