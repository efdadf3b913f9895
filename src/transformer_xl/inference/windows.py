"""Reading without memory: the last tokens of each lane are read again with every new one, as the vanilla model must."""

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError, shown
from transformer_xl.inference.reader import Reader
from transformer_xl.inference.weights import Linear
from transformer_xl.model import TransformerXL
from transformer_xl.model.memory import check_fits

WINDOW = 256
"""How much text a model without memory is shown."""


def window_of(config: ModelConfig) -> int:
    return min(WINDOW, config.learned_positions or WINDOW)


class Texts:
    """The last tokens of every lane."""

    def __init__(self, tokens: list[list[int]]) -> None:
        self.tokens = tokens

    def select(self, lanes: list[int]) -> "Texts":
        return Texts([self.tokens[lane] for lane in lanes])

    def grown(self, others: Sequence["Texts"]) -> "Texts":
        return Texts([tokens for texts in (self, *others) for tokens in texts.tokens])

    reordered = select

    def tensors(self) -> dict[str, Tensor]:
        raise InputError("a model without memory keeps nothing but its text; save that")


class WindowReader(Reader):
    model: TransformerXL
    kept: Texts

    def __init__(self, model: TransformerXL, *, lanes: int = 1, window: int | None = None) -> None:
        """`window`: how many tokens are shown at a time, where it is not the usual number."""
        self.window, like = window or window_of(model.config), model.vocabulary.bias_V
        check_fits(lanes * self.window, like=like, what=f"a window of {self.window} tokens for {shown(lanes)} lanes")
        super().__init__(model, lanes=lanes, kept=lambda: Texts([[] for _ in range(lanes)]))
        self.linear = Linear("exact", compiled=False)

    def _at_once(self, tokens: int) -> int:
        return tokens

    def _read(self, tokens_BT: Tensor) -> Tensor:
        """Of more tokens than the window shows, the states of those that it shows at the end."""
        T = min(tokens_BT.shape[1], self.window)
        # Whole segments are read together. A lane that goes on is read alone, so that its numbers do not depend on its neighbours by a bit.
        together = not any(self.kept.tokens)
        texts = zip(self.kept.tokens, tokens_BT.tolist(), strict=True)
        self.kept = Texts([[*before, *tokens][-self.window :] for before, tokens in texts])
        shown = [self.kept.tokens] if together else [[text] for text in self.kept.tokens]
        return torch.cat([self.model(self.tokens(some)).hidden_BTD[:, -T:] for some in shown])

    def score(self, tokens_BT: Tensor) -> Tensor:
        longest = max(map(len, self.kept.tokens)) + tokens_BT.shape[1]
        if longest > self.window:
            raise InputError(
                f"a text of {longest:,} tokens is longer than the window of {self.window} that a model without memory is shown; score it in"
                " pieces, resetting before each, or give the model a memory"
            )
        return super().score(tokens_BT)

    def _reset(self, lanes: list[int]) -> None:
        for lane in lanes:
            self.kept.tokens[lane] = []
