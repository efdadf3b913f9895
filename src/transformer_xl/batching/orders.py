"""A prompt and the texts that go on from it: read once, written side by side."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from transformer_xl.batching.events import EVENT_CHARACTERS, EVENT_FIGURES, Ended, Event, Figures, Wrote
from transformer_xl.batching.lanes import Lanes, Writing
from transformer_xl.batching.reading import Scored, read, scored
from transformer_xl.data.text.tokenizers import Tokenizer
from transformer_xl.decoding import TextStream
from transformer_xl.inference import Reader, make_reader
from transformer_xl.model import AnyModel

Piece = int | Lanes | list[tuple[Writing, Event]]
"""Tokens just read, lanes that are ready to join the others, or what there is to tell."""


@dataclass(frozen=True, kw_only=True)
class Order:
    model: AnyModel
    tokenizer: Tokenizer
    prompt: Sequence[int]
    text: TextStream
    """Stands after the prompt."""
    source: Reader | None = None
    """What has been read before the prompt, by a session; it stays as it is."""
    echo: str | None = None
    """The prompt's text, where it is to be told first."""
    segment: int | None = None
    """In which the prompt is scored, where memory is off or there is none."""

    def pieces(self, writings: list[Writing], *, alone: int | None = None) -> Generator[Piece, None, None]:
        """The work, in pieces. `alone`: begun anew, and so many more tokens are drawn before the lanes join others."""
        wish = writings[0].wish
        for writing in writings:
            writing.restart = self.pieces
        reader = make_reader(self.model) if self.source is None else self.source.fork()
        if self.echo is not None and alone is None:
            yield from self._echoed(writings[0], texts=len(writings))
        if not wish.tokens:
            yield [(writing, Ended(reason="length")) for writing in writings]
            return
        yield from read(reader, self.prompt, segment=wish.segment)
        for writing in writings:
            writing.begin(self.text, self.prompt)
        lanes = Lanes(reader if len(writings) == 1 else reader.select([0] * len(writings)), writings)
        yield lanes.step()
        for _ in range(alone or 0):
            if len(lanes):
                yield lanes.step()
        if len(lanes):
            yield lanes

    def _echoed(self, writing: Writing, *, texts: int) -> Generator[Piece, None, None]:
        """The prompt, told once for all the texts that go on from it, in parts."""
        assert self.echo is not None
        shown, likeliest = 0, writing.wish.likeliest
        if likeliest is not None:
            # A text among its own tokens: scored by one reader, written on by another that has read it in the same pieces as ever.
            scorer = make_reader(self.model, window=self.segment) if self.source is None else self.source.fork()
            stream, begin = TextStream(self.tokenizer), 0
            for part in scored(scorer, self.prompt, segment=self.segment, likeliest=likeliest):
                yield len(part.loss_P)
                events: list[tuple[Writing, Event]] = []
                for first, end in _spans(len(part.loss_P), most=max(1, EVENT_FIGURES // (1 + likeliest))):
                    figures = _told(self.prompt[begin + first : begin + end], part, stream, first=first)
                    text, shown = self.echo[shown : stream.characters], stream.characters
                    events.append((writing, Wrote(text=text, figures=figures, drawn=0, texts=texts)))
                begin += len(part.loss_P)
                yield events
        rest = self.echo[shown:]  # all of it, or what white space the tokens do not tell
        for first, end in _spans(len(rest), most=EVENT_CHARACTERS):
            yield [(writing, Wrote(text=rest[first:end], drawn=0, texts=texts))]


def _spans(length: int, *, most: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + most, length)) for start in range(0, length, most))


def _told(tokens: Sequence[int], part: Scored, stream: TextStream, *, first: int) -> Figures:
    """What was found about tokens of a part, from `first` on."""
    figures = Figures()
    for place, token in enumerate(tokens, first):
        likeliest = part.likeliest[place] if part.likeliest else None
        figures.add(token, start=stream.characters, log_probability=-float(part.loss_P[place]), likeliest=likeliest)
        stream.push(token)
    return figures
