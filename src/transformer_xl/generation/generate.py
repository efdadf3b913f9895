"""Tokens out: prompts are read once, then every lane draws a token and is fed it, side by side through one reader."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from transformer_xl import native
from transformer_xl.data.text.tokenizers import Tokenizer
from transformer_xl.errors import InputError
from transformer_xl.generation.sampling import Sampler, Sampling
from transformer_xl.generation.text import TextStream
from transformer_xl.inference import Reader, make_reader
from transformer_xl.inference.distribution import Distribution
from transformer_xl.inference.weights import WeightKind
from transformer_xl.model import AnyModel

READ_AT_ONCE = 4096
"""Longer prompts are read in pieces of this many tokens, so that what they need does not grow with them."""


class Batch:
    """Lanes that write at the same time, each with its own sampler. A lane that is done leaves, and the others never notice."""

    def __init__(self, reader: Reader, samplers: Sequence[Sampler]) -> None:
        """`reader` has read every lane's prompt; `samplers` are the lanes' own, in order."""
        self.lanes = list(range(len(samplers)))
        """Those that still write."""
        self._reader, self._samplers = reader, samplers
        self._unread: list[int] = []
        self._choices: Any = None

    def step(self) -> dict[int, int]:
        """The next token of every lane. Reads the one before only now: nobody may want a next."""
        reader = self._reader
        if self._unread and reader.writes and all(s.plain for s in self._samplers):
            self._unread = self._write()
            return dict(zip(self.lanes, self._unread, strict=True))
        if self._unread:
            device = reader.model.vocabulary.bias_V.device
            reader.read(torch.tensor(self._unread, device=device)[:, None])
        assert reader.last_hidden_BD is not None
        edges = reader.model.config.cluster_edges
        next_token = Distribution(reader, reader.last_hidden_BD, edges=edges)
        self._unread = next_token.ask([self._samplers[lane].pick for lane in self.lanes])
        return dict(zip(self.lanes, self._unread, strict=True))

    def _write(self) -> list[int]:
        own = [self._samplers[lane] for lane in self.lanes]
        if self._choices is None:
            self._choices = (native.Choice * len(own))(*(sampler.choice() for sampler in own))
        for choice, sampler in zip(self._choices, own, strict=True):
            choice.share = sampler.share()
        return self._reader.write(self._unread, self._choices)

    def leave(self, lanes: Collection[int]) -> None:
        stay = [place for place, lane in enumerate(self.lanes) if lane not in lanes]
        if len(stay) == len(self.lanes):
            return
        self.lanes = [self.lanes[place] for place in stay]
        self._unread = [self._unread[place] for place in stay]
        self._choices = None
        if stay:
            self._reader = self._reader.select(stay)


def generate(
    model: AnyModel, prompt: Sequence[int], *, tokens: int, sampling: Sampling, weights: WeightKind = "exact"
) -> Iterator[int]:
    """`tokens` continuations of `prompt`, as they are drawn. The model's own memory length is what it remembers."""
    with evaluating(model):
        batch = start_batch(model, [prompt], samplings=[sampling], weights=weights)
        for _ in range(tokens):
            yield batch.step()[0]


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
        batch = start_batch(model, prompts, samplings=samplings, weights=weights)
        for _ in range(tokens):
            for lane, token in batch.step().items():
                pieces[lane].append(streams[lane].push(token))
                drawn[lane] += 1
            batch.leave({lane for lane in batch.lanes if streams[lane].stopped})
            if not batch.lanes:
                break
    for stream, texts in zip(streams, pieces, strict=True):
        texts.append(stream.finish())
    return [Written(text="".join(texts), tokens=count) for texts, count in zip(pieces, drawn, strict=True)]


def start_batch(
    model: AnyModel,
    prompts: Sequence[Sequence[int]],
    *,
    samplings: Sequence[Sampling],
    weights: WeightKind = "exact",
) -> Batch:
    """A lane for each prompt, of whatever lengths, with its own settings and seed."""
    samplers = [Sampler(sampling) for sampling in samplings]
    for sampler, prompt in zip(samplers, prompts, strict=True):
        sampler.saw(prompt)
    return Batch(read_prompts(model, prompts, weights=weights), samplers)


def read_prompts(model: AnyModel, prompts: Sequence[Sequence[int]], *, weights: WeightKind = "exact") -> Reader:
    """A reader with a lane for each prompt. Every prompt is read for itself, and once, however many lanes share it."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise InputError("the prompt holds no tokens; give at least one")
    fresh = make_reader(model, weights=weights)
    device = fresh.model.vocabulary.bias_V.device
    place_of: dict[tuple[int, ...], int] = {}
    places = [place_of.setdefault(tuple(prompt), len(place_of)) for prompt in prompts]
    readers = [fresh, *(fresh.select([0]) for _ in range(len(place_of) - 1))]
    for reader, prompt in zip(readers, place_of, strict=True):
        for start in range(0, len(prompt), READ_AT_ONCE):
            reader.read(torch.tensor([prompt[start : start + READ_AT_ONCE]], device=device))
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
