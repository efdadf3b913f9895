"""Text <-> token numbers. Five kinds behind one interface, saved as JSON and plain text, never as pickle.

byte, char and bpe give back exactly the text they were given; word gives back its words, one space between them. byte and bpe take any bytes.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from transformer_xl.errors import DataError, suggest
from transformer_xl.files import write_json, write_text

Ids = NDArray[np.int64]
Marks = Literal["lines", "sentences"]
Several = TypeVar("Several", bound=Sequence[Any])
END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"
SENTENCE = "<S>"
SENTENCE_UNKNOWN = "<UNK>"
DESCRIPTION = "tokenizer.json"
VOCABULARY = "vocabulary.txt"
BYTE_PAIRS = "bpe.json"
NAMED = {" ": "space", "\n": "newline", "\t": "tab"}
PARTS_OF_BYTE_PAIRS: dict[str, dict[str, object]] = {
    **{part: {} for part in ("truncation", "padding", "added_tokens", "normalizer", "post_processor")},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "decoder": {"type": "ByteLevel"},
    "model": {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"), None),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
    },
}
"""What the file of byte pairs is made of, with what decides whether the bytes come back; nothing where there is no such part."""
MOST_NUMBERS = 1 << 22
"""Names of tokens are held in memory one by one, and a size is all that a file says of such a vocabulary."""
BETWEEN_SPACES = ("word", "number")
"""Kinds whose tokens white space keeps apart: their text may be cut at any."""
ANY_BYTES = ("byte", "bpe")
"""Kinds that take bytes which are no UTF-8."""
STRAY = re.compile("([\udc80-\udcff]+)")
"""Bytes that are no UTF-8, as `escaped` shows them."""


class Tokenizer(ABC):
    kind: ClassVar[str]
    size: int
    lower: bool = False
    """Text is lower-cased before it is encoded."""

    @abstractmethod
    def encode(self, text: str | bytes) -> Ids: ...

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes: ...

    @abstractmethod
    def token(self, id: int) -> str:
        """A readable name for one token: what a plot or a table shows."""

    @abstractmethod
    def save(self, folder: Path | str) -> None: ...

    def _describe(self, folder: Path | str, **description: object) -> None:
        write_json(Path(folder) / DESCRIPTION, {"kind": self.kind, **description})

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text; where the tokens end inside a character, the broken character is shown as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def _text(self, text: str | bytes) -> str:
        decoded = decode_utf8(text, name="the text") if isinstance(text, bytes) else text
        return decoded.lower() if self.lower else decoded

    def _checked(self, ids: Sequence[int] | Ids) -> Ids:
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (array.min() < 0 or array.max() >= self.size):
            wrong = int(array[(array < 0) | (array >= self.size)][0])
            raise DataError(f"token {wrong} is outside the vocabulary of {self.size:,}")
        return array


class ByteTokenizer(Tokenizer):
    """A token is a byte. `values` are the byte values that exist; `dropped` bytes vanish from the text."""

    kind = "byte"

    def __init__(self, values: bytes = bytes(range(256)), *, dropped: bytes = b"") -> None:
        self.values = np.frombuffer(values, dtype=np.uint8)
        self.dropped = dropped
        self.size = len(values)
        self._id_of = np.full(256, -1, dtype=np.int64)
        self._id_of[self.values] = np.arange(self.size)

    def encode(self, text: str | bytes) -> Ids:
        data = np.frombuffer(text if isinstance(text, bytes) else encode_utf8(text), dtype=np.uint8)
        if self.dropped:
            data = data[~np.isin(data, np.frombuffer(self.dropped, dtype=np.uint8))]
        ids = self._id_of[data]
        if ids.size and ids.min() < 0:
            offset = int(np.argmax(ids < 0))
            raise DataError(f"byte {data[offset]:#04x} at offset {offset:,} is not among the {self.size} known values")
        return ids

    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes:
        return self.values[self._checked(ids)].tobytes()

    def token(self, id: int) -> str:
        value = int(self.values[id])
        return NAMED.get(chr(value), chr(value) if 32 < value < 127 else f"{value:#04x}")

    def save(self, folder: Path | str) -> None:
        self._describe(folder, values=self.values.tolist(), dropped=list(self.dropped))

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> "ByteTokenizer":
        return cls(_bytes_in(description, "values"), dropped=_bytes_in(description, "dropped"))


class CharTokenizer(Tokenizer):
    """A token is a Unicode character."""

    kind = "char"

    def __init__(self, characters: str, *, lower: bool = False) -> None:
        self.characters = characters
        self.lower = lower
        self.size = len(characters)
        codes = code_points(characters)
        self._id_of = np.full(int(codes.max(initial=0)) + 1, -1, dtype=np.int64)
        self._id_of[codes] = np.arange(self.size)

    def encode(self, text: str | bytes) -> Ids:
        text = self._text(text)
        codes = code_points(text)
        ids = self._id_of[np.minimum(codes, len(self._id_of) - 1)]
        ids[codes >= len(self._id_of)] = -1
        if ids.size and ids.min() < 0:
            offset = int(np.argmax(ids < 0))
            what = f"character {text[offset]!r} at offset {offset:,}"
            raise DataError(
                f"{what} is not among the {self.size:,} known characters; leave it out, or take a model of bytes or byte pairs"
            )
        return ids

    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes:
        return encode_utf8("".join(map(self.characters.__getitem__, self._checked(ids).tolist())))

    def token(self, id: int) -> str:
        character = self.characters[id]
        return NAMED.get(character, character if character.isprintable() else f"U+{ord(character):04X}")

    def save(self, folder: Path | str) -> None:
        self._describe(folder, code_points=list(map(ord, self.characters)), lower=self.lower)

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> "CharTokenizer":
        points = description["code_points"]
        if not isinstance(points, list) or not all(type(point) is int for point in points):
            raise ValueError("its code_points are no list of numbers")
        return cls(_unlike("".join(map(chr, points))), lower=_flag(description))


class WordTokenizer(Tokenizer):
    """A token is a word between white space.

    `marks` "lines": `<eos>` for every newline. "sentences": each line is `<S> words <S>`; an unfinished last line, such as
    a prompt, has only its first `<S>`. A word outside the vocabulary is `unknown`, and an error where there is no such word.
    """

    kind = "word"

    def __init__(self, words: Iterable[str], *, marks: Marks = "lines", lower: bool = False) -> None:
        self.words = list(words)
        self.marks: Marks = marks
        self.lower = lower
        self.size = len(self.words)
        self._id_of = {word: id for id, word in enumerate(self.words)}
        self.unknown = self._id_of.get(UNKNOWN if marks == "lines" else SENTENCE_UNKNOWN)
        mark = END_OF_LINE if marks == "lines" else SENTENCE
        if mark not in self._id_of:
            raise DataError(f"the vocabulary of {self.size:,} words has no {mark}; add it as its first line")
        self.mark = self._id_of[mark]

    def encode(self, text: str | bytes) -> Ids:
        marked = self._text(text)
        if self.marks == "lines":
            marked = marked.replace("\n", f" {END_OF_LINE} ")
        else:
            *finished, last = marked.split("\n")
            marked = "".join(f"{SENTENCE} {line} {SENTENCE} " for line in finished if line.strip())
            marked += f"{SENTENCE} {last}" if last.strip() else ""
        words = marked.split()
        if self.unknown is None:
            try:
                return np.fromiter(map(self._id_of.__getitem__, words), dtype=np.int64, count=len(words))
            except KeyError as error:
                word = error.args[0]
                raise DataError(f"the word {word!r} is not in the vocabulary, which has no {UNKNOWN}") from None
        known, unknown = self._id_of.get, self.unknown
        return np.fromiter((known(word, unknown) for word in words), dtype=np.int64, count=len(words))

    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes:
        marks_until_newline = 1 if self.marks == "lines" else 2
        lines: list[list[str]] = [[]]
        marks = 0
        for id in self._checked(ids).tolist():
            if id != self.mark:
                lines[-1].append(self.words[id])
                continue
            marks += 1
            if marks % marks_until_newline == 0:
                lines.append([])
        return encode_utf8("\n".join(map(" ".join, lines)))

    def token(self, id: int) -> str:
        return self.words[id]

    def save(self, folder: Path | str) -> None:
        write_text(Path(folder) / VOCABULARY, "".join(f"{word}\n" for word in self.words))
        self._describe(folder, marks=self.marks, lower=self.lower, words=VOCABULARY)

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> "WordTokenizer":
        text = (folder / VOCABULARY).read_bytes().decode("utf-8")
        if description["marks"] not in ("lines", "sentences"):
            raise ValueError("its marks are neither lines nor sentences")
        return cls(_unlike(text.split("\n")[:-1]), marks=description["marks"], lower=_flag(description))


class BytePairTokenizer(Tokenizer):
    """A token is a frequent run of bytes, learned from text. Every text has an encoding, and so have bytes that are no text: single bytes are tokens too."""

    kind = "bpe"

    def __init__(self, pairs: Any, *, lower: bool = False) -> None:
        self._pairs = pairs  # tokenizers.Tokenizer
        self.lower = lower
        self.size = int(pairs.get_vocab_size())
        self._bytes_of = [bytes(map(_BYTE_OF.__getitem__, pairs.id_to_token(id))) for id in range(self.size)]
        self._id_of_byte = {token: id for id, token in enumerate(self._bytes_of) if len(token) == 1}

    @classmethod
    def learn(cls, texts: Iterator[str], *, size: int, lower: bool, show: bool) -> "BytePairTokenizer":
        from tokenizers import Tokenizer as Pairs
        from tokenizers import decoders, models, pre_tokenizers, trainers

        pairs = Pairs(models.BPE())
        pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        pairs.decoder = decoders.ByteLevel()
        alphabet = sorted(_BYTE_OF)
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=show, special_tokens=[])
        pairs.train_from_iterator((text.lower() if lower else text for text in texts), trainer=trainer)
        return cls(pairs, lower=lower)

    def encode(self, text: str | bytes) -> Ids:
        """Of bytes, those that are no UTF-8 are tokens by themselves, and what lies between them is text."""
        shown = escaped(encode_utf8(text) if isinstance(text, str) else text)
        parts = STRAY.split(shown.lower() if self.lower else shown)
        # A batch, because that alone lets other threads run meanwhile.
        encodings = self._pairs.encode_batch_fast(parts[::2], add_special_tokens=False)
        if len(parts) == 1:
            return np.asarray(encodings[0].ids, dtype=np.int64)
        runs = [encoding.ids for encoding in encodings]
        for place, stray in enumerate(parts[1::2]):
            runs[place] += self._single(unescaped(stray))
        return np.fromiter((id for run in runs for id in run), dtype=np.int64)

    def _single(self, data: bytes) -> list[int]:
        try:
            return [self._id_of_byte[data[place : place + 1]] for place in range(len(data))]
        except KeyError as error:
            raise DataError(f"byte {error.args[0][0]:#04x} is no UTF-8, and none of the {self.size:,} tokens") from None

    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes:
        return b"".join(map(self._bytes_of.__getitem__, self._checked(ids).tolist()))

    def token(self, id: int) -> str:
        return repr(self._bytes_of[id].decode("utf-8", errors="replace"))[1:-1]

    def save(self, folder: Path | str) -> None:
        write_text(Path(folder) / BYTE_PAIRS, self._pairs.to_str(pretty=False))
        self._describe(folder, lower=self.lower, pairs=BYTE_PAIRS)

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> "BytePairTokenizer":
        from tokenizers import Tokenizer as Pairs

        text = (folder / BYTE_PAIRS).read_bytes().decode("utf-8")
        _check_byte_pairs(json.loads(text))
        try:
            return cls(Pairs.from_str(text), lower=_flag(description))
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # Rust's, which is no Exception
                raise ValueError("it is damaged") from None
            raise


class NumberTokenizer(Tokenizer):
    """Tokens whose text nobody knows, such as those of a model without its vocabulary: text is their numbers, a space after each."""

    kind = "number"

    def __init__(self, size: int) -> None:
        if type(size) is not int or not 1 <= size <= MOST_NUMBERS:
            raise DataError(f"a vocabulary of {str(size)[:20]} numbers cannot be; there are 1 to {MOST_NUMBERS:,}")
        self.size = size

    def encode(self, text: str | bytes) -> Ids:
        words = self._text(text).split()
        wrong = next((word for word in words if not (word.isascii() and word.isdigit() and len(word) < 19)), None)
        if wrong is not None:
            raise DataError(f"{wrong[:40]!r} is no token number, and this model came without its vocabulary")
        return self._checked([int(word) for word in words])

    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes:
        return b"".join(b"%d " % id for id in self._checked(ids).tolist())

    def token(self, id: int) -> str:
        return str(id)

    def save(self, folder: Path | str) -> None:
        self._describe(folder, size=self.size)

    @classmethod
    def load(cls, folder: Path, description: dict[str, Any]) -> "NumberTokenizer":
        return cls(description["size"])


Kinds = type[ByteTokenizer | CharTokenizer | WordTokenizer | BytePairTokenizer | NumberTokenizer]
KINDS: dict[str, Kinds] = {
    kind.kind: kind for kind in (ByteTokenizer, CharTokenizer, WordTokenizer, BytePairTokenizer, NumberTokenizer)
}


def load_tokenizer(folder: Path | str) -> Tokenizer:
    path = Path(folder) / DESCRIPTION
    try:
        description = json.loads(path.read_bytes())
        kind = description["kind"]
        if kind not in KINDS:
            raise DataError(f"{path}: no tokenizer {kind!r}{suggest(str(kind), KINDS)}")
        return KINDS[kind].load(Path(folder), description)
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} does not exist: {folder} holds no tokenizer") from error
    except DataError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise DataError(f"{path} is no tokenizer of ours ({what}); take that of the run or store again") from error


def _check_byte_pairs(found: Any) -> None:
    """What `learn` leaves out, a file could have: padding to a billion tokens, a suffix that no text has, a prefix that ends the process."""
    if not isinstance(found, dict):
        raise ValueError("it is no table of parts")
    for part, fields in PARTS_OF_BYTE_PAIRS.items():
        there = found.get(part) or {}
        if not isinstance(there, dict) or bool(there) != bool(fields):
            raise ValueError(f"its {part} is none that byte pairs have here")
        for name, wanted in fields.items():
            # Some writers have "" for none.
            if (there.get(name, wanted) or None) != (wanted or None):
                raise ValueError(f"its {part} has {name} {str(there[name])[:40]!r}, which byte pairs do not have here")
    vocabulary, merges = found["model"].get("vocab"), found["model"].get("merges")
    if not isinstance(vocabulary, dict) or not isinstance(merges, list):
        raise ValueError("its model has no vocabulary or no merges")
    if sorted(number for number in vocabulary.values() if type(number) is int) != list(range(len(vocabulary))):
        raise ValueError("its tokens are not numbered from 0 on")
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ValueError(f"its merge {str(merge)[:40]!r} is no pair")
        if not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ValueError(f"its merge {str(merge)[:40]!r} is of tokens that it does not have")


def _bytes_in(description: dict[str, Any], name: str) -> bytes:
    values = description[name]
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"its {name} are no list of bytes")
    return bytes(_unlike(values))


def _flag(description: dict[str, Any]) -> bool:
    if type(description["lower"]) is not bool:
        raise ValueError("its lower is neither true nor false")
    return bool(description["lower"])


def _unlike(tokens: Several) -> Several:
    """Refuses a vocabulary in which two tokens are the same."""
    if len(set(tokens)) != len(tokens):
        raise ValueError("a token stands in it twice")
    return tokens


def decode_utf8(data: bytes, *, name: str, offset: int = 0) -> str:
    """Text, or an error naming the place where it stops being UTF-8; `offset` is where `data` begins in `name`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 at byte {offset + error.start:,} ({data[error.start]:#04x}); "
            f"convert it, or use `tokenizer=byte` or `tokenizer=bpe`"
        ) from None


def escaped(data: bytes) -> str:
    """Any bytes as text, in which one that is no UTF-8 is the lone surrogate of its value; `unescaped` gives the bytes back."""
    return data.decode("utf-8", "surrogateescape")


def unescaped(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def encode_utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start:,}, "
            f"which no UTF-8 can hold"
        ) from None


def code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)


def _byte_characters() -> dict[str, int]:
    """The character that stands for each byte inside `tokenizers`: itself where printable, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


_BYTE_OF = _byte_characters()
