"""Text out: one token at a time, each fed back to an engine that remembers all before it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.config.fields import not_negative
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import InputError
from transformer_xl.inference import Engine
from transformer_xl.model import TransformerXL

WINDOW = 256
"""How much text a model without memory is shown."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    temperature: float = 1.0
    """0: always the likeliest token."""
    top_k: int = 40
    """Only the k likeliest. 0: all."""
    top_p: float = 1.0
    """Only the likeliest that together have this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        not_negative(self, "sampling", "temperature", "top_k", "seed")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"sampling.top_p: {self.top_p} is no share; it must be above 0 and at most 1")


def generate(model: TransformerXL, prompt: Sequence[int], *, tokens: int, sampling: Sampling) -> Iterator[int]:
    """`tokens` continuations of `prompt`, as they are drawn. The model's own memory length is what it remembers."""
    if not len(prompt):
        raise InputError("the prompt holds no tokens; give at least one")
    generator = torch.Generator().manual_seed(sampling.seed)
    training = model.training
    model.eval()
    try:
        reader = _reader(model)
        log_probability_V = reader(list(prompt))
        for drawn in range(tokens):
            token = pick(log_probability_V.cpu(), sampling=sampling, generator=generator)
            yield token
            if drawn < tokens - 1:
                log_probability_V = reader([token])
    finally:
        model.train(training)


def _reader(model: TransformerXL) -> Callable[[list[int]], Tensor]:
    """Takes the next tokens of a text, gives the log-probabilities of the one after them."""
    device = model.vocabulary.bias_V.device
    if model.config.memory:
        engine = Engine(model)
        return lambda tokens: engine.feed(torch.tensor([tokens], device=device))[0]
    window = min(WINDOW, model.config.learned_positions or WINDOW)
    text: list[int] = []

    def read_again(tokens: list[int]) -> Tensor:
        """Without memory the whole window is read again for each token, as the vanilla model must."""
        text.extend(tokens)
        del text[:-window]
        with torch.inference_mode():
            return model.log_probabilities(model(torch.tensor([text], device=device)).hidden_BTD[0, -1])

    return read_again


def pick(log_probability_V: Tensor, *, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from a distribution, after temperature, top-k and top-p in this order."""
    if sampling.temperature == 0.0:
        return int(log_probability_V.argmax())
    scaled_V = log_probability_V.double() / sampling.temperature
    if 0 < sampling.top_k < len(scaled_V):
        best_K, index_K = scaled_V.topk(sampling.top_k)
    else:
        best_K, index_K = scaled_V.sort(descending=True)
    probability_K = best_K.softmax(-1)
    if sampling.top_p < 1.0:
        # A token stays while those before it have not yet reached top_p: the first that crosses it is kept.
        before_K = probability_K.cumsum(-1) - probability_K
        probability_K = probability_K * (before_K < sampling.top_p)
    return int(index_K[torch.multinomial(probability_K, 1, generator=generator)])


def text_pieces(tokenizer: Tokenizer, tokens: Iterator[int], *, before: Sequence[int] = ()) -> Iterator[str]:
    """Text as it becomes certain: never half of a character. `before` are tokens already shown."""
    ids = list(before)
    shown = len(tokenizer.decode(ids)) if ids else 0
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        certain = len(text.rstrip("\ufffd"))
        if certain > shown:
            yield text[shown:certain]
            shown = certain
    rest = tokenizer.decode(ids)[shown:] if ids else ""
    if rest:
        yield rest


def start_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt as tokens; an empty one starts after an end of line, as every text does somewhere."""
    ids = tokenizer.encode(prompt) if prompt else tokenizer.encode("\n")
    return [int(token) for token in ids] if len(ids) else [0]
