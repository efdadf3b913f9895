"""What a model's thread is asked for, as work in pieces that take turns with those of others, and how each request stands.

WAITING -> READING -> FINISHED                        a text that is only read
WAITING -> READING -> READY -> WRITING -> FINISHED    a prompt and the texts that go on from it: read once, written side by side
                                       -> RESTARTED   a step with its texts failed: each is begun anew in a request of its own
until it is finished: FAILED, or DROPPED
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from transformer_xl.batching.events import EVENT_CHARACTERS, EVENT_FIGURES, Ended, Figures, Mailbox, Wrote
from transformer_xl.batching.lanes import Lanes, TextEvents, TextOptions, Writing
from transformer_xl.batching.learning import LESSON_WEIGHT, Learned, Learner, learn
from transformer_xl.batching.reading import Scored, read, scored
from transformer_xl.data.text.tokenizers import Tokenizer
from transformer_xl.decoding import TextStream
from transformer_xl.inference import Reader, make_reader
from transformer_xl.model import AnyModel

MOST_SUSPECTED = 3
"""A text that was in more failed steps than this, though each time it passed alone, joins the others no more."""


class Status(Enum):
    WAITING = "waiting"
    READING = "reading"
    READY = "ready"
    """Its first tokens are drawn, and it waits for room in the lanes."""
    WRITING = "writing"
    """Its texts are in the lanes."""
    FINISHED = "finished"
    RESTARTED = "restarted"
    FAILED = "failed"
    DROPPED = "dropped"
    """Nobody waits for it, or it is too late."""


@dataclass(frozen=True)
class TokensRead:
    count: int
    weight: int = 1
    """Each took about as long as so many that are only read."""


@dataclass(frozen=True)
class Output:
    events: TextEvents


@dataclass(frozen=True)
class LanesReady:
    lanes: Lanes
    """They may join the others."""


@dataclass(frozen=True)
class Finished:
    result: object


Piece = TokensRead | Output | LanesReady | Finished
"""What one piece of work came to."""


class Request:
    """What changes of it changes with the scheduler's lock only."""

    def __init__(self, pieces: Iterator[Piece], *, mailbox: Mailbox) -> None:
        self.pieces, self.mailbox = pieces, mailbox
        self.status = Status.WAITING
        self.lanes = Lanes()
        """Of its texts, while it is ready."""

    def leave(self, status: Status) -> None:
        """There are no more pieces. What they hold is let go at once: a text in the lanes knows its request, and an engine is large."""
        self.pieces, self.lanes, self.status = iter(()), Lanes(), status


class ReadRequest(Request):
    def __init__(self, reading: Generator[int, None, object], *, mailbox: Mailbox, weight: int = 1) -> None:
        """`reading` yields how many tokens it has just read, each as long as `weight` of them; what it returns is the result."""
        super().__init__(_read_through(reading, weight), mailbox=mailbox)


def _read_through(reading: Generator[int, None, object], weight: int) -> Iterator[Piece]:
    while True:
        try:
            piece: Piece = TokensRead(next(reading), weight)
        except StopIteration as finished:
            piece = Finished(finished.value)
        yield piece


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What texts go on from."""

    model: AnyModel
    tokenizer: Tokenizer
    tokens: Sequence[int]
    text: TextStream
    """Stands after the prompt."""
    source: Reader | Learner | None = None
    """What has been read before the prompt, by a session; it stays as it is."""
    echo: str | None = None
    """The prompt's text, where it is to be told first."""
    segment: int | None = None
    """In which the prompt is scored, where memory is off or there is none."""


class WriteRequest(Request):
    """A prompt, read once, and texts that go on from it."""

    def __init__(
        self, prompt: Prompt, options: Sequence[TextOptions], *, mailbox: Mailbox, index: int = 0, suspected: int = 0
    ) -> None:
        """A text for each of the `options`; `index` is the first one's among those of the mailbox. `suspected`: so often it was in a step that failed,
        and it is begun anew: alone until it is past what was told, or to its end."""
        alone = options[0].tokens if suspected > MOST_SUSPECTED else mailbox.drawn[index] if suspected else None
        texts = [Writing(one, request=self, mailbox=mailbox, index=number) for number, one in enumerate(options, index)]
        super().__init__(_write(prompt, texts, alone=alone), mailbox=mailbox)
        self.prompt, self.suspected, self._unfinished = prompt, suspected, len(texts)

    def again(self, text: Writing) -> "WriteRequest":
        """One of its texts from the beginning, after a failure."""
        self.status, suspected = Status.RESTARTED, self.suspected + 1
        return WriteRequest(self.prompt, [text.options], mailbox=self.mailbox, index=text.index, suspected=suspected)

    def text_ended(self) -> None:
        """It was told that one of its texts has ended."""
        self._unfinished -= 1
        if not self._unfinished:
            self.status = Status.FINISHED


def _write(prompt: Prompt, texts: list[Writing], *, alone: int | None) -> Iterator[Piece]:
    """`alone`: what was there before is not told again, and so many more tokens are drawn before its lanes join others."""
    options = texts[0].options
    if isinstance(prompt.source, Learner):
        yield from _write_alone(prompt, prompt.source, texts[0])
        return
    reader = make_reader(prompt.model) if prompt.source is None else prompt.source.fork()
    if prompt.echo is not None and alone is None:
        yield from _echo(prompt, prompt.echo, texts)
    if not options.tokens:
        yield Output([(text, Ended(reason="length")) for text in texts])
        return
    for count in read(reader, prompt.tokens, segment=options.segment):
        yield TokensRead(count)
    for text in texts:
        text.begin(prompt.text, prompt.tokens)
    lanes = Lanes(reader if len(texts) == 1 else reader.select([0] * len(texts)), texts)
    yield Output(lanes.step())
    # Once it was told that all texts have ended, the request is finished, and nobody asks for another piece.
    for _ in range(alone or 0):
        yield Output(lanes.step())
    yield LanesReady(lanes)


def _write_alone(prompt: Prompt, learner: Learner, text: Writing) -> Iterator[Piece]:
    """With weights and a cache that nobody else has. What it wrote is then read as the model's own, which is a session's new state."""
    if prompt.tokens:
        learner = (yield from _learned(learner, prompt.tokens)).learner
    lanes, drawn = Lanes(learner.adaptive.lane(0).writer(), [text]), list[int]()
    text.begin(prompt.text, prompt.tokens)
    while True:
        (picked,) = lanes.next()
        drawn.append(picked.token)
        assert lanes.reader is not None
        *told, last = text.accept(picked, lanes.reader, 0)
        if isinstance(last, Ended):
            break
        yield Output([(text, event) for event in (*told, last)])
    lanes = Lanes()  # as large as a model, and needed no more
    yield Output([(text, event) for event in told])
    learned = yield from _learned(learner, drawn)
    yield Output([(text, replace(last, state=(learned.learner, text.written())))])


def _learned(learner: Learner, own: Sequence[int]) -> Generator[Piece, None, Learned]:
    reading = learn(learner, own, own=True)
    while True:
        try:
            count = next(reading)
        except StopIteration as finished:
            learned: Learned = finished.value
            return learned
        yield TokensRead(count, LESSON_WEIGHT)


def _echo(prompt: Prompt, echo: str, texts: list[Writing]) -> Iterator[Piece]:
    """The prompt, told once for all the texts that go on from it, in parts."""
    first_text, shown, likeliest = texts[0], 0, texts[0].options.likeliest
    if likeliest is not None:
        # A text among its own tokens: scored by one reader, written on by another that has read it in the same pieces as ever.
        source = prompt.source
        scorer = source.fork() if isinstance(source, Reader) else make_reader(prompt.model, window=prompt.segment)
        stream, begin = TextStream(prompt.tokenizer), 0
        for part in scored(scorer, prompt.tokens, segment=prompt.segment, likeliest=likeliest):
            yield TokensRead(len(part.loss_P))
            events: TextEvents = []
            for first, end in _spans(len(part.loss_P), most=max(1, EVENT_FIGURES // (1 + likeliest))):
                figures = _figures(prompt.tokens[begin + first : begin + end], part, stream, first=first)
                text, shown = echo[shown : stream.characters], stream.characters
                events.append((first_text, Wrote(text=text, figures=figures, drawn=0, texts=len(texts))))
            begin += len(part.loss_P)
            yield Output(events)
    rest = echo[shown:]  # all of it, or what white space the tokens do not tell
    for first, end in _spans(len(rest), most=EVENT_CHARACTERS):
        yield Output([(first_text, Wrote(text=rest[first:end], drawn=0, texts=len(texts)))])


def _spans(length: int, *, most: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + most, length)) for start in range(0, length, most))


def _figures(tokens: Sequence[int], part: Scored, stream: TextStream, *, first: int) -> Figures:
    """What was found about tokens of a part, from `first` on."""
    figures = Figures()
    for place, token in enumerate(tokens, first):
        likeliest = part.likeliest[place] if part.likeliest else None
        figures.add(token, start=stream.characters, log_probability=-float(part.loss_P[place]), likeliest=likeliest)
        stream.push(token)
    return figures
