"""A text is learned from, and then continued: by the weights as they have become, and by a cache that what is written goes into. Nothing is learned from what
the model itself wrote."""

from collections.abc import Iterator, Sequence

import torch

from transformer_xl.adaptation.reader import AdaptiveReader
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
    lanes, left = Lanes(reader.lane(0).writer(), [Author(0, sampling, prompt=prompt)]), tokens
    while left:
        for (picked,) in lanes.next_few(left):
            yield picked.token
            left -= 1
