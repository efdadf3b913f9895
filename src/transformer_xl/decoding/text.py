"""Tokens of one lane -> text as it becomes certain: whole characters only, nothing of a stop string, the same work for every token."""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy

from transformer_xl.data.text.tokenizers import Tokenizer, WordTokenizer, encode_utf8
from transformer_xl.errors import DataError, InputError


class TextStream:
    """`before` are tokens already shown: they decide about the space before the next word, or begin a character that is still open.

    A stop string counts from the first token pushed. The text ends as soon as one of them is complete, and before it; until then, whatever
    could be the beginning of one is held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, before: Iterable[int] = (), stop: str | Sequence[str] = ()) -> None:
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stop:
            raise InputError("stop: an empty text stops everything before it begins; leave it out")
        self.stopped = False
        self.characters = 0
        """Whole characters since the first token pushed, those held back among them."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = stop
        self._held = ""
        self._marks, self._line_begins = 0, True
        if isinstance(tokenizer, WordTokenizer):
            for token in before:
                self.bytes_of(token)
        else:
            self._decoder.decode(tokenizer.decode_bytes(list(before)))

    def push(self, *tokens: int) -> str:
        """What has become certain with these tokens. Where there are stop strings: one at a time, or what comes after one counts as drawn."""
        return self._released(self.read(tokens))

    def read(self, tokens: Sequence[int]) -> str:
        """Stands where pushing each of them would lead to, in one go; no stop string is looked for."""
        if isinstance(self._tokenizer, WordTokenizer):
            data = b"".join(map(self.bytes_of, tokens))
        else:
            data = self._tokenizer.decode_bytes(tokens)
        text = self._decoder.decode(data)
        self.characters += len(text)
        return text

    def finish(self) -> str:
        """What was held back, when no more tokens come; a character that was never completed is shown as U+FFFD."""
        if self.stopped:
            return ""
        text = self._released(self._decoder.decode(b"", final=True))
        return text if self.stopped else text + self._held

    def fork(self, *, stop: Sequence[str] | None = None) -> "TextStream":
        """The same place in the text; with other stop strings, where given, looked for from here on."""
        other = copy(self)
        if stop is not None:
            other._stop, other._held = TextStream(self._tokenizer, stop=stop)._stop, ""
            other.stopped, other.characters = False, 0
        other._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def place(self) -> dict[str, str | int]:
        """Where in a text it stands, for JSON; nothing of stop strings."""
        begun, _ = self._decoder.getstate()
        return {"begun": begun.hex(), "marks": self._marks, "line_begins": int(self._line_begins)}

    @classmethod
    def at(cls, tokenizer: Tokenizer, place: Mapping[str, str | int]) -> "TextStream":
        """At a place as `place` gives it; anything else is refused, because it may come from a file."""
        stream = cls(tokenizer)
        begun, marks, line_begins = bytes.fromhex(str(place["begun"])), int(place["marks"]), int(place["line_begins"])
        if (
            stream._decoder.decode(begun)
            or stream._decoder.getstate()[0] != begun
            or marks < 0
            or line_begins not in (0, 1)
        ):
            raise InputError(
                f"begun {begun.hex()}, marks {marks}, line_begins {line_begins} is no place in a text; save it again"
            )
        stream._marks, stream._line_begins = marks, bool(line_begins)
        return stream

    def bytes_of(self, token: int) -> bytes:
        """What the next token adds to the text."""
        if not isinstance(self._tokenizer, WordTokenizer):
            return self._tokenizer.decode_bytes([token])
        if token == self._tokenizer.mark:
            self._marks += 1
            if self._tokenizer.marks == "sentences" and self._marks % 2:
                return b""
            self._line_begins = True
            return b"\n"
        space = b"" if self._line_begins else b" "
        self._line_begins = False
        known = 0 <= token < self._tokenizer.size
        return space + (encode_utf8(self._tokenizer.words[token]) if known else self._tokenizer.decode_bytes([token]))

    def _released(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        complete = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if complete:
            self.stopped, self._held = True, ""
            return text[: min(complete)[1]]  # the one that was complete first, however the text was cut into tokens
        longest = max(map(len, self._stop)) - 1
        held = next(
            (
                size
                for size in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-size:]) for stop in self._stop)
            ),
            0,
        )
        certain, self._held = text[: len(text) - held], text[len(text) - held :]
        return certain


def text_pieces(
    tokenizer: Tokenizer, tokens: Iterable[int], *, before: Iterable[int] = (), stop: str | Sequence[str] = ()
) -> Iterator[str]:
    """The text of `tokens` as it becomes certain; takes no more of them once a stop string is complete."""
    stream = TextStream(tokenizer, before=before, stop=stop)
    for token in tokens:
        if piece := stream.push(token):
            yield piece
        if stream.stopped:
            return
    if rest := stream.finish():
        yield rest


def start_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt as tokens. An empty one starts at the beginning of a line, as every text does somewhere; where there are no lines, after a space."""
    try:
        ids = tokenizer.encode(prompt)
    except DataError as error:
        raise InputError(f"the prompt does not fit this model's vocabulary: {error}; leave it out") from None
    if len(ids):
        return [int(token) for token in ids]
    if isinstance(tokenizer, WordTokenizer):
        return [tokenizer.mark]
    for start in ("\n", " "):
        try:
            if len(ids := tokenizer.encode(start)):
                return [int(ids[0])]
        except DataError:
            continue
    return [0]
