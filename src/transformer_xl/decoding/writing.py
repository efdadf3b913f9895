"""Texts out: prompts are read once, and the lanes that go on from them write until their tokens or their stop strings come."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from transformer_xl.data.text.tokenizers import Tokenizer
from transformer_xl.decoding.distribution import Lane, Question
from transformer_xl.decoding.lanes import Lanes, Picked
from transformer_xl.decoding.sampling import Sampler, Sampling
from transformer_xl.decoding.text import TextStream
from transformer_xl.errors import InputError
from transformer_xl.inference import Reader, make_reader
from transformer_xl.inference.weights import WeightKind
from transformer_xl.model import AnyModel

READ_AT_ONCE = 4096
"""Longer prompts are read in pieces of this many tokens, so that what they need does not grow with them."""


class Author:
    """Writes in a lane, and wants nothing but tokens."""

    wants_tokens_only, forgets_after = True, None

    def __init__(self, number: int, sampling: Sampling, *, prompt: Sequence[int]) -> None:
        self.number, self.sampler = number, Sampler(sampling)
        self.sampler.saw(prompt)

    def pick(self, lane: Lane) -> Question[Picked]:
        return Picked((yield from self.sampler.pick(lane)))


def generate(
    model: AnyModel, prompt: Sequence[int], *, tokens: int, sampling: Sampling, weights: WeightKind = "exact"
) -> Iterator[int]:
    """`tokens` continuations of `prompt`, as they are drawn. The model's own memory length is what it remembers."""
    with evaluating(model):
        lanes = start_lanes(model, [prompt], samplings=[sampling], weights=weights)
        left = tokens
        while left:
            for (picked,) in lanes.next_few(left):
                yield picked.token
                left -= 1


@dataclass(frozen=True, kw_only=True)
class Written:
    """A finished continuation."""

    text: str
    tokens: int
    """How many were drawn, those of a stop string included."""
    score: float | None = None
    """Of beam search: log-probability per token, in nats."""


def write_texts(
    model: AnyModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    samplings: Sequence[Sampling],
    stop: Sequence[str] = (),
    weights: WeightKind = "exact",
) -> list[Written]:
    """A continuation of each prompt, side by side; each as if it were alone."""
    streams = [TextStream(tokenizer, before=prompt, stop=stop) for prompt in prompts]
    pieces: list[list[str]] = [[] for _ in prompts]
    drawn = [0] * len(prompts)
    with evaluating(model):
        lanes = start_lanes(model, prompts, samplings=samplings, weights=weights)
        left = tokens
        while left and lanes:
            steps = lanes.next_few(1 if stop else left)  # a lane that stops leaves before the next is drawn
            for author, *picked in zip(lanes.writers, *steps, strict=True):
                pieces[author.number].append(streams[author.number].push(*(one.token for one in picked)))
                drawn[author.number] += len(steps)
            left -= len(steps)
            lanes.leave([author for author in lanes.writers if streams[author.number].stopped])
    for stream, texts in zip(streams, pieces, strict=True):
        texts.append(stream.finish())
    return [Written(text="".join(texts), tokens=count) for texts, count in zip(pieces, drawn, strict=True)]


def start_lanes(
    model: AnyModel,
    prompts: Sequence[Sequence[int]],
    *,
    samplings: Sequence[Sampling],
    weights: WeightKind = "exact",
) -> Lanes[Author]:
    """A lane for each prompt, of whatever lengths, with its own settings and seed."""
    numbered = enumerate(zip(samplings, prompts, strict=True))
    authors = [Author(number, sampling, prompt=prompt) for number, (sampling, prompt) in numbered]
    return Lanes(read_prompts(model, prompts, weights=weights), authors)


def read_prompts(model: AnyModel, prompts: Sequence[Sequence[int]], *, weights: WeightKind = "exact") -> Reader:
    """A reader with a lane for each prompt. Every prompt is read for itself, and once, however many lanes share it."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise InputError("the prompt holds no tokens; give at least one")
    fresh = make_reader(model, weights=weights)
    place_of: dict[tuple[int, ...], int] = {}
    places = [place_of.setdefault(tuple(prompt), len(place_of)) for prompt in prompts]
    readers = [fresh, *(fresh.select([0]) for _ in range(len(place_of) - 1))]
    for reader, prompt in zip(readers, place_of, strict=True):
        for start in range(0, len(prompt), READ_AT_ONCE):
            reader.read(reader.tokens([prompt[start : start + READ_AT_ONCE]]))
    joined = readers[0] if len(readers) == 1 else type(fresh).joined(readers)
    return joined if len(prompts) == len(readers) else joined.select(places)


@contextmanager
def evaluating(model: AnyModel) -> Iterator[None]:
    """The model without dropout; as it was, afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
