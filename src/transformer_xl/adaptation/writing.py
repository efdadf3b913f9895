"""A text is learned from, and then continued: by the weights as they have become, and by a cache that what is written goes into. Nothing is learned from what
the model itself wrote."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from transformer_xl.adaptation.lanes import Writer
from transformer_xl.adaptation.reader import AdaptiveReader
from transformer_xl.decoding.distribution import Distribution
from transformer_xl.decoding.lanes import Lanes
from transformer_xl.decoding.sampling import Sampling
from transformer_xl.decoding.writing import READ_AT_ONCE, Author
from transformer_xl.errors import InputError


def continued(reader: AdaptiveReader, prompt: Sequence[int], *, tokens: int, sampling: Sampling) -> Iterator[int]:
    """`tokens` continuations of `prompt`, as they are drawn. `reader` has one lane."""
    if not len(prompt):
        raise InputError("the prompt holds no tokens; give at least one")
    for start in range(0, len(prompt), READ_AT_ONCE):
        reader.score(torch.tensor([prompt[start : start + READ_AT_ONCE]], device=reader.model.vocabulary.bias_V.device))
    writer, author = reader.lane(0).writer(), Author(0, sampling, prompt=prompt)
    if writer.cache is not None:
        yield from _with_cache(writer, author, tokens=tokens)
        return
    lanes, left = Lanes(writer.reader, [author]), tokens
    while left:
        for (picked,) in lanes.next_few(left):
            yield picked.token
            left -= 1


def _with_cache(writer: Writer, author: Author, *, tokens: int) -> Iterator[int]:
    reader, cache = writer.reader, writer.cache
    assert cache is not None
    edges, mixture = (0, reader.model.config.vocabulary), Mixture(writer)
    for number in range(tokens):
        hidden_1D = reader.last_hidden_BD
        assert hidden_1D is not None
        (picked,) = Distribution(mixture, hidden_1D, edges=edges).ask([author.pick])
        yield picked.token
        if number + 1 < tokens:
            token_1 = torch.tensor([picked.token], device=hidden_1D.device)
            cache.extend(hidden_1D, torch.tensor([writer.last]), token_1)
            reader.read(token_1[None])
            writer.last = picked.token


class Mixture:
    """What a model and its cache say of the next token together, as one softmax."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @torch.inference_mode()
    def head_logits(self, hidden_1D: Tensor) -> Tensor:
        reader, cache, last = self._writer.reader, self._writer.cache, self._writer.last
        assert cache is not None
        vocabulary = reader.model.config.vocabulary
        log_1V = reader.model.vocabulary.log_probabilities(hidden_1D, linear=reader.linear)
        cached_V, share = cache.distribution(hidden_1D[0], last, vocabulary=vocabulary), cache.how.cache_lambda
        if cached_V is None:
            return log_1V
        return ((1 - share) * log_1V.exp() + share * cached_V).log()

    def cluster_logits(self, cluster: int, hidden_1D: Tensor) -> Tensor:
        raise AssertionError("there is one cluster")
