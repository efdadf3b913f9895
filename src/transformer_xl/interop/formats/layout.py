"""One table between our weights and those of the authors' PyTorch code and its descendants (Hugging Face, NVIDIA), read in both directions.

    theirs                                          ours
    dec_attn.qkv_net   rows q | k | v               query, key_value
    crit.out_layers.i.bias, one for each cluster    bias_V, one after another
    r_w_bias (u), one [H, K] or one for each layer  content_bias_PHK, [1 or N, H, K]
    crit.cluster_weight, the last tail first        tail_weight_CE, the first tail first     (not Hugging Face, which has our order)
    r_emb, the nearest distance last                distance_key_NRHK, row r is distance r

What they call differently is here; what they compute is the same, to the last bits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.interop.formats.foreign_model import check_shapes, compare_shapes, shapes_of, wanted_shapes
from transformer_xl.model.encodings import frequencies


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one of them names things."""

    prefix: str = ""
    softmax_weight: str = "crit.out_layers.{i}.weight"
    softmax_bias: str = "crit.out_layers.{i}.bias"
    last_tail_first: bool = True

    @property
    def frequencies(self) -> str:
        """Stored there, computed here."""
        return f"{self.prefix}pos_emb.inv_freq"


ORIGINAL = Layout()
HUGGINGFACE = Layout(prefix="transformer.", last_tail_first=False)
NVIDIA = Layout(softmax_weight="crit.out_layers_weights.{i}", softmax_bias="crit.out_layers_biases.{i}")

LAYER_NAMES = {
    "layers.{n}.dec_attn.o_net.weight": "layers.{n}.attention_output.weight",
    "layers.{n}.dec_attn.layer_norm.weight": "layers.{n}.attention_norm.weight",
    "layers.{n}.dec_attn.layer_norm.bias": "layers.{n}.attention_norm.bias",
    "layers.{n}.pos_ff.CoreNet.0.weight": "layers.{n}.inner.weight",
    "layers.{n}.pos_ff.CoreNet.0.bias": "layers.{n}.inner.bias",
    "layers.{n}.pos_ff.CoreNet.3.weight": "layers.{n}.outer.weight",
    "layers.{n}.pos_ff.CoreNet.3.bias": "layers.{n}.outer.bias",
    "layers.{n}.pos_ff.layer_norm.weight": "layers.{n}.feed_forward_norm.weight",
    "layers.{n}.pos_ff.layer_norm.bias": "layers.{n}.feed_forward_norm.bias",
}
SETTINGS = {
    **{name: name for name in ("n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "div_val")},
    **{"same_length": "same_length", "dropout": "dropout", "dropatt": "attention_dropout", "mem_len": "memory"},
}
"""What the authors' code and Hugging Face's call the same, theirs to ours."""
BIAS_NAMES = {"r_w_bias": "encoding.content_bias_PHK", "r_r_bias": "encoding.position_bias_PHK"}
TAIL_NAMES = {"crit.cluster_weight": "vocabulary.tail_weight_CE", "crit.cluster_bias": "vocabulary.tail_bias_C"}


def weights_from(theirs: Mapping[str, Tensor], config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """A state for `TransformerXL(config)`. Copies that they keep of one tensor under several names must agree."""
    for piece in _pieces(config, layout):
        if piece.theirs not in theirs:
            raise CheckpointError(
                f"the checkpoint has no {piece.theirs}; it is cut short, or its configuration is another model's"
            )
    wanted = wanted_shapes(config, tensors=len(theirs))
    parts: dict[str, list[Tensor]] = {}
    for name, pieces in groupby(_pieces(config, layout), key=lambda piece: piece.ours):
        parts[name] = [piece.of_theirs(theirs[piece.theirs]) for piece in pieces]
        _check_parts(parts[name], name=name, wanted=wanted.get(name))
    _check_amount(theirs, wanted)
    ours = {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in parts.items()}
    left = dict(theirs)
    for copy, source in copies(config, layout):
        if copy in left and not torch.equal(left.pop(copy), theirs[source]):
            raise CheckpointError(f"{copy} differs from {source}, whose copy it must be; the checkpoint is damaged")
    for name in {piece.theirs for piece in _pieces(config, layout)}:
        left.pop(name)
    compare_shapes(shapes_of(ours), wanted)
    stored, computed = left.pop(layout.frequencies, None), frequencies(config.d_model, rounded=config.frequencies)
    if stored is not None and (stored.shape != computed.shape or not torch.allclose(stored.float(), computed)):
        raise CheckpointError(f"{layout.frequencies} holds other numbers than the paper's; the checkpoint is damaged")
    if left:
        raise CheckpointError(
            f"{min(left)} belongs to no Transformer-XL of this configuration; is it the right one for these weights?"
        )
    return ours


def weights_to(ours: Mapping[str, Tensor], config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """Their state, each tensor once and in memory of its own."""
    check_shapes(shapes_of(ours), config)
    theirs = {}
    if config.encoding in ("relative", "absolute"):
        theirs[layout.frequencies] = frequencies(config.d_model, rounded=config.frequencies)
    by_name = sorted(_pieces(config, layout), key=lambda piece: piece.theirs)
    for name, pieces in groupby(by_name, key=lambda piece: piece.theirs):
        theirs[name] = torch.cat([piece.of_ours(ours[piece.ours]) for piece in pieces]).contiguous()
    return theirs


# --- the table


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """`ours[rows]` is one of their tensors, or `theirs[rows]` one of ours; a whole tensor has no rows. Listed in the order of the rows."""

    theirs: str
    ours: str
    their_rows: tuple[int, int | None] = (0, None)
    our_rows: tuple[int, int | None] = (0, None)
    stacked: bool = False
    """Ours has an axis in front that theirs has not."""
    turned: int | None = None
    """The axis along which theirs runs the other way."""
    heads: tuple[int, int] | None = None
    """Theirs has heads apart, ours side by side on the last axis."""

    def of_theirs(self, value: Tensor) -> Tensor:
        if self.turned is not None and self.turned < value.ndim:
            value = value.flip(self.turned)
        if self.heads is not None and value.ndim > 1:
            value = value.flatten(-2)
        if not value.ndim:
            raise CheckpointError(f"{self.theirs} is a single number; the checkpoint is damaged")
        return value[None] if self.stacked else value[slice(*self.their_rows)]

    def of_ours(self, value: Tensor) -> Tensor:
        if self.heads is not None:
            value = value.reshape(*value.shape[:-1], *self.heads)
        if self.turned is not None:
            value = value.flip(self.turned)
        rows = value[slice(*self.our_rows)]
        return rows[0] if self.stacked else rows


def _pieces(config: ModelConfig, layout: Layout) -> Iterator[_Piece]:
    width, edges, at = config.n_head * config.d_head, config.cluster_edges, layout.prefix
    absolute = config.encoding in ("absolute", "per_layer")
    for n in range(config.n_layer):
        attention = f"{at}layers.{n}.dec_attn"
        query, key_value = f"layers.{n}.query.weight", f"layers.{n}.key_value.weight"
        if absolute:
            yield _Piece(theirs=f"{attention}.q_net.weight", ours=query)
            yield _Piece(theirs=f"{attention}.kv_net.weight", ours=key_value)
        else:
            yield _Piece(theirs=f"{attention}.qkv_net.weight", ours=query, their_rows=(0, width))
            yield _Piece(theirs=f"{attention}.qkv_net.weight", ours=key_value, their_rows=(width, 3 * width))
        if config.encoding == "relative":
            yield _Piece(theirs=f"{attention}.r_net.weight", ours=f"encoding.relative_key.{n}.weight")
        for theirs, ours in LAYER_NAMES.items():
            yield _Piece(theirs=at + theirs.format(n=n), ours=ours.format(n=n))
    yield from _encoding_pieces(config, layout)
    for theirs, ours in TAIL_NAMES.items() if config.cutoffs else ():
        yield _Piece(theirs=theirs, ours=ours, turned=0 if layout.last_tail_first else None)
    tables = 1 if config.div_val == 1 else config.clusters
    for i in range(tables):
        rows = (0, None) if tables == 1 else (edges[i], edges[i + 1])
        yield _Piece(theirs=layout.softmax_bias.format(i=i), ours="vocabulary.bias_V", our_rows=rows)
    for i in range(tables):
        yield _Piece(theirs=f"{at}word_emb.emb_layers.{i}.weight", ours=f"vocabulary.tables.{i}")
        if not config.tie_embeddings:
            yield _Piece(theirs=layout.softmax_weight.format(i=i), ours=f"vocabulary.output_tables.{i}")
        if config.has_projection(i):
            yield _Piece(theirs=f"{at}word_emb.emb_projs.{i}", ours=f"vocabulary.input_projections.{i}")
    for i in range(config.clusters):
        if config.has_projection(i) and not config.ties_projection(i):
            yield _Piece(theirs=f"crit.out_projs.{i}", ours=f"vocabulary.output_projections.{i}")


def _encoding_pieces(config: ModelConfig, layout: Layout) -> Iterator[_Piece]:
    at, heads = layout.prefix, (config.n_head, config.d_head)
    match config.encoding:
        case "relative":
            for theirs, ours in BIAS_NAMES.items():
                for n in range(1 if config.share_biases else config.n_layer):
                    place = at if config.share_biases else f"{at}layers.{n}.dec_attn."
                    yield _Piece(theirs=f"{place}{theirs}", ours=ours, our_rows=(n, n + 1), stacked=True)
        case "shaw_biased":
            yield _Piece(theirs=f"{at}r_emb", ours="encoding.distance_key_NRHK", turned=1)
            yield _Piece(theirs=f"{at}r_w_bias", ours="encoding.content_bias_NHK")
            yield _Piece(theirs=f"{at}r_bias", ours="encoding.distance_bias_NRH", turned=1)
        case "per_layer":
            yield _Piece(theirs=f"{at}r_emb", ours="encoding.position_NRD", turned=1, heads=heads)


def settings_to(config: ModelConfig) -> dict[str, object]:
    """What both are told of a model, as far as they are told the same."""
    return {
        **{theirs: getattr(config, ours) for theirs, ours in SETTINGS.items()},
        "d_embed": config.embedding_width,
        "cutoffs": list(config.cutoffs),
        "tie_projs": list(config.tie_projections) or [False] * config.clusters,
        "pre_lnorm": config.norm != "post",
        "clamp_len": config.clamp_len or -1,
        "sample_softmax": -1,
    }


def refuse(config: ModelConfig, *, whose: str, wrong: Mapping[str, bool]) -> None:
    """A model that somebody's code cannot compute, by the first field that is in the way."""
    projected = config.div_val > 1 or config.embedding_width != config.d_model
    of_both = {
        "final_norm": config.final_norm,
        "neighbours": config.neighbours > 0,
        "ngrams": bool(config.ngrams),
        "same_length_keys": config.same_length and config.same_length_keys != "memory",
        "projections": any(config.has_projection(i) != projected for i in range(config.clusters)),
        "auxiliary_targets": config.auxiliary_targets > 0,
    }
    for field, is_wrong in {**wrong, **of_both}.items():
        if is_wrong:
            raise ConfigError(
                f"model.{field}: {whose} has no {getattr(config, field)!r} in such a model; change it, or keep the model in our own format"
            )


def copies(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    """Names under which they may repeat a tensor, with the tensor's own name."""
    at = layout.prefix
    for name in BIAS_NAMES if config.share_biases and config.encoding == "relative" else ():
        for n in range(config.n_layer):
            yield f"{at}layers.{n}.dec_attn.{name}", f"{at}{name}"
    for i in range(1 if config.div_val == 1 else config.clusters):
        if config.tie_embeddings:
            yield layout.softmax_weight.format(i=i), f"{at}word_emb.emb_layers.{i}.weight"
        if config.has_projection(i):
            yield f"crit.shared_out_projs.{i}", f"{at}word_emb.emb_projs.{i}"
    for i in range(config.clusters):
        if config.ties_projection(i):
            yield f"crit.out_projs.{i}", f"{at}word_emb.emb_projs.{0 if config.div_val == 1 else i}"


# --- refusing


def _check_amount(theirs: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """One tensor under many names would become as many of ours: nothing here is shared but what the configuration shares."""
    there = sum(value.numel() for value in {id(value): value for value in theirs.values()}.values())
    asked = sum(prod(shape) for shape in wanted.values())
    if asked > there:
        raise CheckpointError(
            f"the configuration makes {asked:,} numbers and the checkpoint has {there:,}; it is cut short, or its configuration is another model's"
        )


def _check_parts(parts: list[Tensor], *, name: str, wanted: tuple[int, ...] | None) -> None:
    if len({part.shape[1:] for part in parts}) > 1:
        raise CheckpointError(f"the parts of {name} have shapes that do not fit together")
    if wanted is not None:
        compare_shapes({name: (sum(part.shape[0] for part in parts), *parts[0].shape[1:])}, {name: wanted})
