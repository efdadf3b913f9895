"""Reads text in the same bits on every machine, and tells what comes next in whole numbers: for a coder, which must find in another place and time what
it found here.

The same tokens of a lane give the same frequencies on AVX-512, AVX2, NEON and plain C++, by any number of threads, beside any neighbours, one at a time
or many. Everything between a weight and a frequency is our own arithmetic (`native/arithmetic.h`, `sines.py`), fixed in order and rounding; of torch only
copies are used. A token sees itself and the M before it, as in `Engine`.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transformer_xl import native
from transformer_xl.config import ModelConfig
from transformer_xl.errors import ConfigError, InputError, shown
from transformer_xl.inference.sines import MOST_TURNS, sinusoid
from transformer_xl.model import AnyModel, TransformerXL
from transformer_xl.model.encodings import RelativeEncoding
from transformer_xl.model.layer import Layer
from transformer_xl.model.memory import check_fits
from transformer_xl.model.protocol import NOT_FINITE, check_tokens
from transformer_xl.native import portable
from transformer_xl.native.portable import TOTAL_BITS, padded, panels, with_zeros

__all__ = ["TOTAL_BITS", "PortableReader"]

ARITHMETIC = "transformer_xl portable arithmetic 1"
"""Of another number: other bits from the same weights."""
MOST_THREADS = 1024

Frequencies = NDArray[np.uint32]


class PortableReader:
    fingerprint: bytes
    """SHA-256 of the weights and of all else that decides the bits."""

    def __init__(self, model: AnyModel, *, lanes: int, memory: int | None = None, threads: int | None = None) -> None:
        """`memory`: other than the model's own. `threads`: torch's number, unless told; the bits are the same by any."""
        read = _checked_model(model)
        memory = read.config.memory if memory is None else memory
        threads = torch.get_num_threads() if threads is None else threads
        _check_numbers(lanes=lanes, memory=memory, threads=threads)
        self.lanes, self.memory, self.threads = lanes, memory, threads
        self.config = replace(read.config, memory=memory)
        if native.library() is None:
            raise InputError(
                "the same bits everywhere are computed by compiled kernels alone, which cannot be had here; install g++, or a wheel that brings them"
            )
        portable.check_known_answer()
        reach = self.config.visible_distance
        self._reach = memory if reach is None else reach
        ring = padded(max(self._reach, self.config.recent) + 1 + portable.MOST_AT_ONCE)
        kept = (
            lanes * self.config.n_layer * ring * self.config.n_head * (self.config.d_head + padded(self.config.d_head))
        )
        check_fits(kept, like=torch.empty(0), what=f"a memory of {shown(memory)} positions for {shown(lanes)} lanes")
        self.fingerprint = _fingerprint(self.config, read)
        self._clock_B = torch.zeros(lanes, dtype=torch.int64)
        self._layers = self._laid_out(read, ring=ring)

    def read(self, tokens_B: NDArray[np.int64]) -> Frequencies:
        """Each lane reads its token, [lanes]; how often each word is the next, [lanes, vocabulary]: at least 1, and 2^TOTAL_BITS in all."""
        tokens_B = np.asarray(tokens_B)
        if tokens_B.ndim != 1:
            raise InputError(
                f"tokens of shape {list(tokens_B.shape)}, where one for each of {self.lanes} lanes is read"
            )
        return self.read_many(tokens_B[:, None])[:, 0]

    def read_many(self, tokens_BT: NDArray[np.int64]) -> Frequencies:
        """Each lane reads its tokens, [lanes, T]; the frequencies after each, [lanes, T, vocabulary]: what T calls of `read` give, in less time."""
        tokens = torch.from_numpy(np.array(tokens_BT, order="C"))
        check_tokens(tokens, vocabulary=self.config.vocabulary)
        if tokens.shape[0] != self.lanes:
            raise InputError(f"tokens for {tokens.shape[0]} lanes, where the reader has {self.lanes}")
        frequencies_BTV: Frequencies = self._layers.read(tokens.long(), threads=self.threads).numpy().view(np.uint32)
        if not frequencies_BTV[..., 0].all():
            raise InputError(NOT_FINITE)
        self._clock_B += tokens.shape[1]
        return frequencies_BTV

    def reset(self, lanes: Iterable[int] | NDArray[np.int64] | None = None) -> None:
        """These lanes have read nothing; all, where none are named."""
        chosen = range(self.lanes) if lanes is None else [int(lane) for lane in lanes]
        for lane in chosen:
            if not 0 <= lane < self.lanes:
                raise InputError(f"lane {lane} does not exist; this reader has lanes 0 to {self.lanes - 1}")
        self._clock_B[list(chosen)] = 0

    # --- inside

    def _laid_out(self, model: TransformerXL, *, ring: int) -> portable.PortableLayers:
        config, words = self.config, model.vocabulary
        B, H, K, Q = self.lanes, config.n_head, config.d_head, padded(config.d_head)
        encoding = cast(RelativeEncoding, model.encoding)
        distances = padded(self._reach + 1)
        positions_RD = self._positions(distances)
        layers: list[dict[str, Tensor | None]] = []
        for number, layer in enumerate(cast(list[Layer], list(model.layers))):
            relative_RX = portable.product(positions_RD, _plain(encoding.relative_key[number].weight))  # type: ignore[arg-type]
            relative_HRK = relative_RX.view(distances // 16, 16, H, K).permute(2, 0, 3, 1)
            pair = 0 if config.share_biases else number
            near = layer.neighbours_WX
            layers.append(
                {
                    **_matrices(layer, H=H, K=K),
                    "inner_bias": _row(layer.inner.bias),
                    "outer_bias": _row(layer.outer.bias),
                    **_norm(layer.attention_norm, "attention_norm"),
                    **_norm(layer.feed_forward_norm, "feed_norm"),
                    "content_bias": with_zeros(_plain(encoding.content_bias_PHK[pair]), 1),
                    "position_bias": with_zeros(_plain(encoding.position_bias_PHK[pair]), 1),
                    "relative": relative_HRK.contiguous(),
                    "neighbours": None if near is None else with_zeros(_plain(near).view(-1, H, K), 2),
                    "keys": torch.zeros(B, H, ring // 16, K, 16),
                    "values": torch.zeros(B, ring, H, Q),
                }
            )
        runs = model.ngrams
        given: dict[str, Tensor | None] = {
            "embedding": _plain(words.tables[0]),
            "head": panels(_plain((words.tables if config.tie_embeddings else words.output_tables)[0])),
            "bias": _row(words.bias_V),
            **({"norm": None, "norm_bias": None} if model.final_norm is None else _norm(model.final_norm, "norm")),
            "tables": None if runs is None else _plain(runs.tables_GRE),
            "projection": None if runs is None else panels(_plain(runs.projection.weight)),
            "orders": None if runs is None else torch.tensor(config.ngrams),
            "clock": self._clock_B,
            "history": torch.zeros(B, ring, dtype=torch.int64),
        }
        return portable.PortableLayers(
            layers,
            given,
            eps=config.norm_eps,
            scale=math.sqrt(config.d_model),
            lanes=B,
            heads=H,
            width=K,
            model=config.d_model,
            inner=config.d_inner,
            vocabulary=config.vocabulary,
            ring=ring,
            reach=self._reach,
            distances=distances,
            pre_norm=config.norm == "pre",
            neighbours=config.neighbours,
            orders=len(config.ngrams),
            run_rows=config.ngram_rows,
            run_width=config.d_ngram,
        )

    def _positions(self, distances: int) -> Tensor:
        """The sinusoid of each distance that is told apart, the farthest first."""
        clamp = self.config.clamp_len or self._reach
        distance_R = np.minimum(np.arange(distances - 1, -1, -1), min(clamp, self._reach))
        return torch.from_numpy(sinusoid(distance_R, width=self.config.d_model, rounded=self.config.frequencies))


def _check_numbers(**numbers: int) -> None:
    for name, value in numbers.items():
        if type(value) is not int:
            raise InputError(f"{name}: {shown(value)} must be a whole number")
    if numbers["lanes"] < 1 or not 1 <= numbers["threads"] <= MOST_THREADS or not 0 <= numbers["memory"] < MOST_TURNS:
        raise InputError(
            f"a portable reader of {shown(numbers['lanes'])} lanes, {shown(numbers['threads'])} threads and memory {shown(numbers['memory'])} cannot"
            f" be; give at least 1 lane, 1 to {MOST_THREADS} threads, and a memory from 0 to {MOST_TURNS - 1:,}"
        )


def _checked_model(model: AnyModel) -> TransformerXL:
    if not isinstance(model, TransformerXL):
        raise ConfigError(
            f"the same bits everywhere are for Transformer-XL, and this model is of the kind {type(model).__name__}; take another"
        )
    for name in native.unsupported("portable", model.config):
        raise ConfigError(
            f"model.{name}: {shown(getattr(model.config, name))} cannot be read in the same bits everywhere, which is for the relative encoding, a plain"
            " softmax and a memory that starts empty; take a model that has them"
        )
    if model.config.vocabulary > portable.MOST_WORDS:
        raise ConfigError(
            f"model.vocabulary: {model.config.vocabulary:,} words are more than the {portable.MOST_WORDS:,} that can be read in the same bits everywhere; take another model"
        )
    if model.attend is not None:
        raise InputError("the model's attention was replaced by another; set model.attend to None")
    return model


def _plain(tensor: Tensor) -> Tensor:
    """A copy: a model that goes on learning changes nothing here."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def _row(tensor: Tensor) -> Tensor:
    return with_zeros(_plain(tensor), 0)


def _norm(norm: torch.nn.LayerNorm, name: str) -> dict[str, Tensor | None]:
    return {name: _row(norm.weight), f"{name}_bias": _row(norm.bias)}


def _matrices(layer: Layer, *, H: int, K: int) -> dict[str, Tensor | None]:
    """As panels; each head's outputs begin with a panel of their own."""
    asking_GHKD = torch.cat([_plain(layer.query.weight), _plain(layer.key_value.weight)]).view(3 * H, K, -1)
    gathered_DHK = _plain(layer.attention_output.weight).view(-1, H, K)
    return {
        "query_key_value": panels(with_zeros(asking_GHKD, 1).flatten(0, 1)),
        "output": panels(with_zeros(gathered_DHK, 2).flatten(1)),
        "inner": panels(_plain(layer.inner.weight)),
        "outer": panels(_plain(layer.outer.weight)),
    }


DECIDING = (
    *("n_head", "d_head", "memory", "same_length", "same_length_keys", "clamp_len", "frequencies"),
    *("ngrams", "norm", "norm_eps"),
)
"""What a configuration decides beyond the shapes of the weights."""


def _fingerprint(config: ModelConfig, model: TransformerXL) -> bytes:
    digest = hashlib.sha256(ARITHMETIC.encode())
    digest.update(json.dumps([TOTAL_BITS, {name: getattr(config, name) for name in DECIDING}], sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        if not name.startswith("auxiliary_classifiers."):  # nobody reads with them
            digest.update(json.dumps([name, list(value.shape)]).encode())
            digest.update(_plain(value).numpy().astype("<f4").tobytes())
    return digest.digest()
