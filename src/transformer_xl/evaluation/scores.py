"""How surprising each token of a text is: what the library, the command and the server alike make of a text that is scored."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from transformer_xl.data.text.tokenizers import Ids

BITS_PER_NAT = 1 / math.log(2)
OLD_NAMES = {"token_P": "tokens", "offset_P": "offsets", "loss_P": "nats"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores(NDArrayOperatorsMixin):
    """Tokens in order, each with its place and its surprise given all before it.

    Until the next version it also behaves as the array it was before, the nats of every token after the first, and warns where it is used so.
    """

    tokens: Ids
    offsets: Ids
    """Where in the text each token begins: its byte, or over HTTP its character."""
    nats: NDArray[np.float32]
    """NaN for a token that has nothing before it."""

    @property
    def bits(self) -> NDArray[np.float64]:
        return self.nats.astype(np.float64) * BITS_PER_NAT

    @property
    def total_bits(self) -> float:
        """Of all tokens that have something before them."""
        return float(np.nansum(self.bits))

    def __getitem__(self, some: Any) -> Any:
        return self._as_before()[some]

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> "Scores":
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]),
            offsets=np.concatenate([part.offsets for part in parts]),
            nats=np.concatenate([part.nats for part in parts]),
        )

    # --- as the array it was

    def _as_before(self) -> NDArray[np.float32]:
        warnings.warn(
            "scores are no array of nats any more; take scores.nats[1:], or scores.bits, scores.tokens, scores.offsets",
            DeprecationWarning,
            stacklevel=3,
        )
        return self.nats[1:] if len(self.nats) and math.isnan(self.nats[0]) else self.nats

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._as_before(), dtype=dtype)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [one._as_before() if isinstance(one, Scores) else one for one in inputs]
        return getattr(function, method)(*plain, **options)

    def __len__(self) -> int:
        return len(self._as_before())

    def __iter__(self) -> Iterator[np.float32]:
        return iter(self._as_before())

    def __getattr__(self, name: str) -> Any:
        if name in OLD_NAMES:
            warnings.warn(f"{name} is now called {OLD_NAMES[name]}", DeprecationWarning, stacklevel=2)
            return getattr(self, OLD_NAMES[name])
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"Scores has no {name}; it has tokens, offsets, nats, bits and total_bits")
        return getattr(self._as_before(), name)
