"""How wide a model is that has so many parameters. Counts are formulas for the peers, and for our own models what they really have."""

import math
from collections.abc import Callable
from dataclasses import replace

from transformer_xl.benchmarks.children import BenchmarkError
from transformer_xl.config import ModelConfig, RecurrentConfig
from transformer_xl.model import parameter_count

TOLERANCE = 0.03
"""How far from the count asked for an entrant may be."""
HEAD = 32
INNER_STEP = 8
SMALLEST_NETWORK = 100_000
WIDEST_INNER = 64
"""Times the width."""

Count = Callable[[int, int], int]
"""Parameters of a model so wide, with so wide an inner part."""


def fitted(count: Count, *, parameters: int, widths: range, ratio: float) -> tuple[int, int]:
    """The width whose count is nearest where the inner part is `ratio` times as wide; then the inner part is moved until the count is right."""
    width = min(widths, key=lambda width: abs(math.log(count(width, round(ratio * width)) / parameters)))
    low, high = 1, WIDEST_INNER * width // INNER_STEP
    while low < high:
        middle = (low + high) // 2
        if count(width, middle * INNER_STEP) < parameters:
            low = middle + 1
        else:
            high = middle
    nearest = min(
        {max(1, low - 1) * INNER_STEP, low * INNER_STEP}, key=lambda inner: abs(count(width, inner) - parameters)
    )
    found = count(width, nearest)
    if not is_near(found, parameters):
        raise BenchmarkError(f"`parameters={parameters}`: the nearest model has {found:,}; ask for more")
    return width, nearest


def is_near(found: int, parameters: int) -> bool:
    return abs(found / parameters - 1) <= TOLERANCE


def layers_for(parameters: int) -> int:
    """Of a transformer: what is trained for minutes is shallow."""
    return 2 if parameters < 1_500_000 else 4 if parameters < 3_000_000 else 6


def transformer(count: Callable[[int, int, int], int], *, parameters: int, vocabulary: int) -> dict[str, int]:
    """Tokens, layers, width, heads and inner width; `count` takes layers, width and inner width."""
    layers = layers_for(parameters)

    def of(width: int, inner: int) -> int:
        return count(layers, width, inner)

    width, inner = fitted(of, parameters=parameters, widths=range(HEAD, 1024 + 1, HEAD), ratio=4)
    heads = max(2, width // HEAD)
    return {"vocabulary": vocabulary, "layers": layers, "width": width, "heads": heads, "inner": inner}


def gpt2_count(layers: int, width: int, inner: int, *, rows: int) -> int:
    """`rows`: tokens and positions, which are vectors of their own; the output is the tokens'."""
    attention = 4 * width * width + 4 * width
    feed_forward = 2 * width * inner + inner + width
    return rows * width + layers * (attention + feed_forward + 4 * width) + 2 * width


def x_transformers_count(layers: int, width: int, inner: int, *, rows: int) -> int:
    """No biases but the output's; a gain for each norm. `rows`: of the tokens, in and out."""
    return rows * width + layers * (4 * width * width + 2 * width * inner + 2 * width) + width


def _table_rows(model: ModelConfig, parameters: int) -> tuple[int, int]:
    """Rows for runs of tokens, which take at most half of the parameters; and what is left for the network."""
    if not model.ngrams:
        return 0, parameters
    of_a_row = len(model.ngrams) * model.d_ngram
    rows = max(1, min(model.ngram_rows, 1 << int(math.log2(max(1, parameters // (2 * of_a_row))))))
    return rows, parameters - rows * of_a_row


def resized(model: ModelConfig | RecurrentConfig, *, parameters: int) -> ModelConfig | RecurrentConfig:
    """Our model with so many parameters: as it is where it has them, else narrower or wider, and a Transformer-XL with other layers."""
    if is_near(parameter_count(model), parameters):
        return model
    if isinstance(model, RecurrentConfig):

        def with_hidden(width: int, inner: int) -> RecurrentConfig:
            return replace(model, d_model=width, d_hidden=inner)

        width, inner = fitted(
            lambda width, inner: parameter_count(with_hidden(width, inner)),
            parameters=parameters,
            widths=range(HEAD, 1024 + 1, HEAD),
            ratio=model.d_hidden / model.d_model,
        )
        return with_hidden(width, inner)

    rows, network = _table_rows(model, parameters)
    if rows > 1 and network < SMALLEST_NETWORK:  # a toy: hardly any rows
        rows, network = 1, parameters

    def with_widths(width: int, inner: int) -> ModelConfig:
        sizes = {"d_model": width, "n_head": max(1, width // model.d_head), "d_inner": inner}
        return replace(model, n_layer=layers_for(network), ngram_rows=rows, **sizes)  # type: ignore[arg-type]

    width, inner = fitted(
        lambda width, inner: parameter_count(with_widths(width, inner)),
        parameters=parameters,
        widths=range(model.d_head, 1024 + 1, model.d_head),
        ratio=model.d_inner / model.d_model,
    )
    return with_widths(width, inner)
