"""The door to the kernels whose bits are the same on every machine (`portable.cpp`): weights as panels in, whole numbers out.

Everything that this file does to a weight is a copy: which numbers stand where, and zeros between them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_xl.errors import InputError
from transformer_xl.native import doors
from transformer_xl.native.structures import PortableLayer, PortableSizes, PortableWords

SIXTEEN = 16
"""Outputs of a panel, positions of a ring's panel: the width of every machine's vectors divides it."""
TOTAL_BITS = 24
"""The frequencies of a distribution add up to 2 to the power of this."""
MOST_WORDS = 1 << 16
"""So that a word which never comes costs the others little: each has a frequency of at least 1."""
MOST_AT_ONCE = 64
"""Tokens of a lane that are read together, for which a ring has room beside its memory."""
KNOWN_ANSWER = 0xEB29AD17A8D8ED97
"""Of a computation that uses every operation: a library that gives another answer would give other bits."""
OPTIONAL = {"neighbours", "norm", "norm_bias", "tables", "projection", "orders"}


def padded(count: int) -> int:
    return -(-count // SIXTEEN) * SIXTEEN


def with_zeros(tensor: Tensor, axis: int) -> Tensor:
    """As long as whole sixteens along this axis."""
    missing = padded(tensor.shape[axis]) - tensor.shape[axis]
    pads = [0, 0] * (tensor.dim() - 1 - axis % tensor.dim()) + [0, missing]
    return F.pad(tensor, pads).contiguous()


def panels(weight_OI: Tensor) -> Tensor:
    """[O/16, I, 16], zeros where there is no output."""
    padded_OI = with_zeros(weight_OI, 0)
    return padded_OI.view(-1, SIXTEEN, weight_OI.shape[1]).transpose(1, 2).contiguous()


def product(x_PI: Tensor, weight_OI: Tensor) -> Tensor:
    """[P, O]: each sum in the order of the inputs, each step rounded once."""
    (P, columns), rows = x_PI.shape, weight_OI.shape[0]
    panels_RIS = panels(weight_OI)
    out_PO = torch.empty(P, padded(rows))
    start_O = torch.zeros(padded(rows))
    doors._call(
        "portable_product",
        torch.float32,
        doors._place("vectors", x_PI, torch.float32, (P, columns)),
        doors._place("panels", panels_RIS, torch.float32, (padded(rows) // SIXTEEN, columns, SIXTEEN)),
        start_O.data_ptr(),
        out_PO.data_ptr(),
        P,
        columns,
        padded(rows) // SIXTEEN,
    )
    return out_PO[:, :rows].contiguous()


def check_known_answer() -> None:
    found = torch.zeros(1, dtype=torch.int64)
    doors._call("portable_known_answer", torch.float32, found.data_ptr())
    if (answer := int(found) % 2**64) != KNOWN_ANSWER:
        raise InputError(
            f"the kernels here do not compute the bits that all others do (their known answer is {answer:#x}, not {KNOWN_ANSWER:#x});"
            " build them with a compiler that is told nothing about floating-point numbers: look at the environment's CXX"
        )


class PortableLayers:
    """A model as `portable_read` reads it, with what its lanes remember. What is pointed at stays alive with it."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, Tensor | None]],
        words: Mapping[str, Tensor | None],
        *,
        eps: float,
        scale: float,
        **lengths: int,
    ) -> None:
        """Everything that a `PortableLayer` and `PortableWords` point at, by name, and the lengths of `PortableSizes`."""
        self.sizes = PortableSizes(layers=len(layers), eps=eps, scale=scale, **lengths)
        self._alive = [layers, words]
        shapes = self._shapes()
        self.layers, self.words = (PortableLayer * len(layers))(), PortableWords()
        for structure, given in [(self.words, words), *zip(self.layers, layers, strict=True)]:
            for name, _ in structure._fields_:
                whole = name in ("orders", "clock", "history")
                place = doors._optional if name in OPTIONAL else doors._place
                kind = torch.int64 if whole else torch.float32
                setattr(structure, name, place(name, given[name], kind, shapes[name]))  # type: ignore[arg-type]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        z, S = self.sizes, SIXTEEN
        B, H, K, Q = z.lanes, z.heads, z.width, padded(z.width)
        D, inner, V = (padded(size) // S for size in (z.model, z.inner, z.vocabulary))
        norms = ("attention_norm", "attention_norm_bias", "feed_norm", "feed_norm_bias", "norm", "norm_bias")
        return {
            "query_key_value": (3 * H * Q // S, z.model, S),
            "output": (D, H * Q, S),
            "inner": (inner, z.model, S),
            "outer": (D, z.inner, S),
            "inner_bias": (inner * S,),
            "outer_bias": (D * S,),
            **dict.fromkeys(norms, (D * S,)),
            **dict.fromkeys(("content_bias", "position_bias"), (H, Q)),
            "relative": (H, z.distances // S, K, S),
            "neighbours": (z.neighbours, H, Q),
            "keys": (B, H, z.ring // S, K, S),
            "values": (B, z.ring, H, Q),
            "embedding": (z.vocabulary, z.model),
            "head": (V, z.model, S),
            "bias": (V * S,),
            "tables": (z.orders, z.run_rows, z.run_width),
            "projection": (D, z.orders * z.run_width, S),
            "orders": (z.orders,),
            "clock": (B,),
            "history": (B, z.ring),
        }

    def read(self, tokens_BT: Tensor, *, threads: int) -> Tensor:
        """How often each word comes next in 2^TOTAL_BITS, after each token, [B, T, V]; all 0 where the model computes no numbers. The clocks stay."""
        z, T = self.sizes, doors._sizes("tokens", tokens_BT, 2)[1]
        frequencies_BTV = torch.empty(z.lanes, T, z.vocabulary, dtype=torch.int32)
        doors._call(
            "portable_read",
            torch.float32,
            z,
            self.layers,
            self.words,
            doors._place("tokens", tokens_BT, torch.int64, (z.lanes, T)),
            T,
            frequencies_BTV.data_ptr(),
            threads=threads,
        )
        return frequencies_BTV
