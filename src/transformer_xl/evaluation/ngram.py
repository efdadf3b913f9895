"""An n-gram model with Witten-Bell smoothing: what counting alone can do with the same text. A yardstick."""

import math

import numpy as np
from numpy.typing import NDArray

from transformer_xl.errors import InputError

Symbols = NDArray[np.integer]


def witten_bell_bits(train: Symbols, test: Symbols, *, order: int, vocabulary: int) -> float:
    """Bits per symbol of `test[order - 1:]` under an interpolated model of n-grams up to `order`, counted on `train`.

        P(w | h) = (count(hw) + kinds(h) P(w | h without its oldest symbol)) / (count(h) + kinds(h))

    kinds(h) is how many different symbols followed h. Below unigrams stands the uniform distribution; a context never seen leaves
    everything to the shorter one.
    """
    width = max(1, (vocabulary - 1).bit_length())
    if order * width > 63:
        raise InputError(f"order {order} over {vocabulary} symbols does not fit 63 bits; lower one of them")
    if len(train) < order or len(test) < order:
        raise InputError(f"{min(len(train), len(test))} symbols are too few for n-grams of {order}; give more text")
    probability = np.full(len(test) - order + 1, 1.0 / vocabulary)
    for n in range(1, order + 1):
        grams, counts = np.unique(_keys(train, n, width), return_counts=True)
        contexts, first = np.unique(grams >> width, return_index=True)
        kinds = np.diff(np.append(first, len(grams)))
        context_counts = np.add.reduceat(counts, first)
        asked = _keys(test, n, width)[order - n :]
        gram_count = _look_up(grams, counts, asked)
        kind_count = _look_up(contexts, kinds, asked >> width)
        context_count = _look_up(contexts, context_counts, asked >> width)
        seen = context_count > 0
        smoothed = (gram_count + kind_count * probability) / np.maximum(context_count + kind_count, 1)
        probability = np.where(seen, smoothed, probability)
    return float(-np.log(probability).mean() / math.log(2))


def _keys(symbols: Symbols, n: int, width: int) -> NDArray[np.int64]:
    """Each n-gram as one number, its last symbol in the lowest `width` bits."""
    windows = len(symbols) - n + 1
    key = np.zeros(windows, dtype=np.int64)
    for offset in range(n):
        key = (key << width) | symbols[offset : offset + windows].astype(np.int64)
    return key


def _look_up(keys: NDArray[np.int64], values: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[place] == asked, values[place], 0)
