"""What a model looks at in one text, for people in a notebook: asked for when it is looked at. Layers, heads and tokens count from 1."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from transformer_xl.analysis.attention import Averages, Map, Tokens, attention_maps, average_attention, check_position
from transformer_xl.analysis.attention_pictures import draw_averages, draw_heads
from transformer_xl.config import EvaluationConfig
from transformer_xl.console import progress
from transformer_xl.errors import InputError
from transformer_xl.model import AnyModel, Recurrent, TransformerXL
from transformer_xl.rows import Rows

ROWS = 8
"""Consecutive positions shown for the one asked for, which is the last of them."""


def check_attends(model: AnyModel, *, name: object) -> TransformerXL:
    if isinstance(model, Recurrent):
        raise InputError(f"{name} is a recurrent model, which has no attention to look at; give another")
    return model


class Attention:
    def __init__(
        self, model: TransformerXL, tokens: Tokens, *, lengths: EvaluationConfig, name_of: Callable[[int], str]
    ) -> None:
        """`model` is nobody else's: looking changes how it attends. `name_of` shows a token by its number."""
        self._model, self._lengths, self._name_of = model, lengths, name_of
        self.tokens = tokens

    def __repr__(self) -> str:
        layers, heads = self._model.config.n_layer, self._model.config.n_head
        what = f"attention of {layers} layers with {heads} heads each, over {len(self.tokens):,} tokens"
        return f"<{what}; .plot(layer=1, head=1), .plot(), .heads>"

    @cached_property
    def averages(self) -> Averages:
        """Where each head looks on average over the text, which must be longer than memory."""
        with progress("reading", total=len(self.tokens), unit="tokens") as advance:
            return average_attention(self._model, self.tokens, lengths=self._lengths, advance=advance)

    @property
    def heads(self) -> Rows:
        """How far each looks on average, the widest first."""
        averages = self.averages
        rows = ({"layer": n + 1, "head": h + 1, **vars(averages.width((n, h)))} for n, h in averages.widest())
        return Rows(rows, name="heads")

    def map(self, *, layer: int, head: int, position: int | None = None, rows: int = 1) -> Map:
        """What one head looks at from `rows` consecutive tokens, the last at `position` (the text's last, unless told)."""
        place = (len(self.tokens) if position is None else position) - 1
        check_position(place, tokens=len(self.tokens))
        where: dict[str, Any] = {"heads": [(layer - 1, head - 1)], "positions": [place], "rows": rows}
        return attention_maps(self._model, self.tokens, lengths=self._lengths, **where)[0]

    def plot(
        self,
        *,
        layer: int | None = None,
        head: int | None = None,
        position: int | None = None,
        path: Path | str | None = None,
    ) -> Any:
        """A matplotlib Figure, which a notebook shows: one head over the tokens themselves or, without layer and head, every head on average.
        Written to `path` (.png, .svg, .pdf) where one is given."""
        place = None if path is None else Path(path)
        if layer is None and head is None and position is None:
            return draw_averages(self.averages, place, title="Where each head looks on average")
        if layer is None or head is None:
            raise InputError(
                "a head is one of a layer; give layer and head, both counted from 1, or neither for all of them"
            )
        one = self.map(layer=layer, head=head, position=position, rows=ROWS)
        first = min(row.first_key for row in one.rows)
        names = {place: self._name_of(int(self.tokens[place])) for place in range(first, one.position + 1)}
        return draw_heads([one], names, place, title="What one head looks at")
