"""A prompt and the texts that go on from it: read once, written side by side."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.generation import TextStream
from transformer_xl.generation.generate import Reading
from transformer_xl.inference import Reader
from transformer_xl.model import AnyModel
from transformer_xl.serving.events import Ended, Event, Told, Wrote
from transformer_xl.serving.lanes import Lanes, Writing, told
from transformer_xl.serving.reading import Scored, fresh_reader, fresh_scorer, read, score

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
        reader: Reading = fresh_reader(self.model) if self.source is None else self.source.fork()
        if self.echo is not None and alone is None:
            tokens: tuple[Told, ...] = ()
            if wish.likeliest is not None:
                # A text among its own tokens: scored by one reader, written on by another that has read it in the same pieces as ever.
                scorer = fresh_scorer(self.model) if self.source is None else self.source.fork()
                scored = yield from score(scorer, self.prompt, segment=self.segment, likeliest=wish.likeliest)
                tokens = told_prompt(self.tokenizer, self.prompt, scored)
            yield [(writing, Wrote(text=self.echo, tokens=tokens, drawn=0)) for writing in writings]
        if not wish.tokens:
            yield [(writing, Ended(reason="length")) for writing in writings]
            return
        yield from read(reader, self.prompt, segment=wish.segment)
        for writing in writings:
            writing.begin(self.text, self.prompt)
        lanes = Lanes(reader if len(writings) == 1 else reader.select([0] * len(writings)), writings)
        yield lanes.draw()
        for _ in range(alone or 0):
            if len(lanes):
                yield lanes.step()
        if len(lanes):
            yield lanes


def told_prompt(tokenizer: Tokenizer, prompt: Sequence[int], scored: Scored) -> tuple[Told, ...]:
    unscored = len(prompt) - len(scored.likeliest)  # the first token of all, or all where none were asked for
    stream, found = TextStream(tokenizer), list[Told]()
    for place, (token, loss) in enumerate(zip(prompt, scored.loss_P.tolist(), strict=True)):
        likeliest = scored.likeliest[place - unscored] if place >= unscored else None
        found.append(told(tokenizer, token, None if loss != loss else -loss, likeliest, start=stream.characters))
        stream.push(token)
    return tuple(found)
