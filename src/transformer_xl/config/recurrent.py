"""The recurrent models that the paper compares with: an LSTM regularised as AWD-LSTM, and a QRNN."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from transformer_xl.config.fields import MOST_PARTS, at_most, fraction, literal, positive
from transformer_xl.config.vocabulary import InWords, VocabularyConfig
from transformer_xl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(VocabularyConfig):
    recurrent: ClassVar[bool] = True
    remembers: ClassVar[bool] = True
    memory: ClassVar[int] = 0
    clamp_len: ClassVar[int] = 0
    same_length: ClassVar[bool] = False
    initial_memory: ClassVar[str] = "empty"
    n_head: ClassVar[int] = 0
    encoding: ClassVar[None] = None
    kept_of_a_position: ClassVar[int] = 0
    numbers_of_a_layer: ClassVar[int] = 1

    cell: Literal["lstm", "qrnn"]
    """A recurrent model of this kind, instead of a Transformer-XL."""
    n_layer: int = 3
    """Layers."""
    d_hidden: int = 1150
    """Width of all layers but the last, which is as wide as d_model, so that embeddings can be tied."""
    window: Literal[1, 2] = 2
    """qrnn: whether the first layer's gates see the token before, too. The other layers see their own position."""

    dropout: float = 0.0
    """Rate of every dropout below that is not set apart. All masks are held over time (variational)."""
    embedding_dropout: float | None = None
    """On what goes into the first layer."""
    hidden_dropout: float | None = None
    """Between layers."""
    output_dropout: float | None = None
    """On what comes out of the last layer."""
    weight_dropout: float = 0.0
    """On the weights themselves, drawn once per segment: lstm from hidden to hidden, qrnn from input to gates."""

    def with_lengths(self, *, memory: int, clamp_len: int, same_length: bool) -> "RecurrentConfig":
        """A state has none; who asks for some is refused where a model is given them."""
        return self

    @property
    def kept_of_a_state(self) -> int:
        """Numbers that a reader keeps of a text, however long it is, at most."""
        return sum(4 * width for _, width in self.widths())

    @property
    def in_words(self) -> InWords:
        widths = f"{self.n_layer} layers of {self.cell}, {self.d_hidden} wide, in and out {self.d_model}"
        kind = f"recurrent ({self.cell})"
        return InWords(kind=kind, heads=self.cell, inner=str(self.d_hidden), shape=widths, memory="a state")

    def dropout_rate(self, site: str) -> float:
        own: float | None = getattr(self, f"{site}_dropout")
        return self.dropout if own is None else own

    def widths(self) -> list[tuple[int, int]]:
        """What each layer takes and gives."""
        inner = [self.d_hidden] * (self.n_layer - 1)
        return list(zip([self.d_model, *inner], [*inner, self.d_model], strict=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(self, "model", MOST_PARTS, "n_layer")
        positive(self, "model", "n_layer", "d_hidden")
        literal(self, "model", "cell")
        fraction(self, "model", "dropout", "embedding_dropout", "hidden_dropout", "output_dropout", "weight_dropout")
        if self.window not in (1, 2):
            raise ConfigError(
                f"model.window: {self.window} is neither 1 nor 2; a gate sees its own position, or one more"
            )
