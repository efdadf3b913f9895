"""Hugging Face's TransfoXL (transformers up to 4.35.2) <-> our model: configurations and weights, both ways, by one table. Knows no files.

    theirs                                          ours
    dec_attn.qkv_net   rows q | k | v               query, key_value
    crit.out_layers.i.bias, one for each cluster    bias_V, one after another
    r_w_bias (u), one [H, K] or one for each layer  content_bias_PHK, [1 or N, H, K]

What the two call differently is here; what they compute is the same, to the last bits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.model import TransformerXL

FIELDS = {
    "vocab_size": "vocabulary",
    "n_layer": "n_layer",
    "d_model": "d_model",
    "n_head": "n_head",
    "d_head": "d_head",
    "d_inner": "d_inner",
    "d_embed": "d_embed",
    "div_val": "div_val",
    "mem_len": "memory",
    "same_length": "same_length",
    "layer_norm_epsilon": "norm_eps",
    "dropout": "dropout",
    "dropatt": "attention_dropout",
    "init_std": "init_std",
    "proj_init_std": "projection_init_std",
    "tie_word_embeddings": "tie_embeddings",
}
"""Names of the same thing, theirs to ours. What is told in another way is in the two functions below."""
DEFAULTS = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "dropatt": 0.0, "pre_lnorm": False}
"""What they leave unsaid."""

LAYER_NAMES = {
    "transformer.layers.{n}.dec_attn.r_net.weight": "encoding.relative_key.{n}.weight",
    "transformer.layers.{n}.dec_attn.o_net.weight": "layers.{n}.attention_output.weight",
    "transformer.layers.{n}.dec_attn.layer_norm.weight": "layers.{n}.attention_norm.weight",
    "transformer.layers.{n}.dec_attn.layer_norm.bias": "layers.{n}.attention_norm.bias",
    "transformer.layers.{n}.pos_ff.CoreNet.0.weight": "layers.{n}.inner.weight",
    "transformer.layers.{n}.pos_ff.CoreNet.0.bias": "layers.{n}.inner.bias",
    "transformer.layers.{n}.pos_ff.CoreNet.3.weight": "layers.{n}.outer.weight",
    "transformer.layers.{n}.pos_ff.CoreNet.3.bias": "layers.{n}.outer.bias",
    "transformer.layers.{n}.pos_ff.layer_norm.weight": "layers.{n}.feed_forward_norm.weight",
    "transformer.layers.{n}.pos_ff.layer_norm.bias": "layers.{n}.feed_forward_norm.bias",
}
BIAS_NAMES = {"r_w_bias": "encoding.content_bias_PHK", "r_r_bias": "encoding.position_bias_PHK"}
TAIL_NAMES = {
    "crit.cluster_weight": "vocabulary.tail_weight_CE",
    "crit.cluster_bias": "vocabulary.tail_bias_C",
}
FREQUENCIES = "transformer.pos_emb.inv_freq"
"""Stored there, computed here."""


def config_from_huggingface(theirs: Mapping[str, object]) -> ModelConfig:
    """The content of a `config.json`."""
    told = {**DEFAULTS, **theirs}
    needed = [*FIELDS, "cutoffs", "clamp_len", "untie_r", "tie_projs"]
    if missing := [name for name in needed if name not in told]:
        raise CheckpointError(f"the configuration has no {missing[0]}; it is not one of Hugging Face's TransfoXL")
    if told.get("attn_type", 0) != 0:
        raise CheckpointError(f"attn_type: {told['attn_type']} exists in no release of TransfoXL; only 0 does")
    fields = {ours: told[name] for name, ours in FIELDS.items()}
    return ModelConfig(
        **fields,  # type: ignore[arg-type]
        cutoffs=tuple(told["cutoffs"]),  # type: ignore[arg-type]
        clamp_len=max(0, int(told["clamp_len"])),  # type: ignore[call-overload]
        share_biases=not told["untie_r"],
        norm="pre" if told["pre_lnorm"] else "post",
        initial_memory="zeros",
        projections="needed" if told["div_val"] == 1 else "always",
        tie_projections=tuple(told["tie_projs"]),  # type: ignore[arg-type]
    )


def config_to_huggingface(config: ModelConfig) -> dict[str, object]:
    """What their `config.json` says of this model. A model that TransfoXL cannot compute is refused; dropout of single sites, which only training
    has, is not carried over."""
    _check_expressible(config)
    return {
        "model_type": "transfo-xl",
        "architectures": ["TransfoXLLMHeadModel"],
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        "d_embed": config.embedding_width,
        "cutoffs": list(config.cutoffs),
        "clamp_len": config.clamp_len or -1,
        "untie_r": not config.share_biases,
        "pre_lnorm": config.norm == "pre",
        "tie_projs": list(config.tie_projections) or [False] * config.clusters,
        "attn_type": 0,
        "adaptive": True,
        "sample_softmax": -1,
    }


def weights_from_huggingface(theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A state for `TransformerXL(config)`. Copies that they keep of one tensor under several names must agree."""
    left = dict(theirs)
    ours = {}
    for name, pieces in groupby(_pieces(config), key=lambda piece: piece.ours):
        parts = [piece.of_theirs(_take(left, piece.theirs)) for piece in pieces]
        ours[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    for copy, source in _copies(config):
        if copy in left and not torch.equal(left.pop(copy), theirs[source]):
            raise CheckpointError(f"{copy} differs from {source}, whose copy it must be; the checkpoint is damaged")
    for name in {piece.theirs for piece in _pieces(config)}:
        left.pop(name)
    stored, computed = left.pop(FREQUENCIES, None), _frequencies(config)
    if stored is not None and (stored.shape != computed.shape or not torch.allclose(stored.float(), computed)):
        raise CheckpointError(f"{FREQUENCIES} holds other frequencies than the paper's; the checkpoint is damaged")
    if left:
        raise CheckpointError(
            f"{min(left)} belongs to no TransfoXL of this configuration; is its config.json the right one?"
        )
    _check_shapes(ours, config)
    return ours


def weights_to_huggingface(ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Their state, each tensor once and in memory of its own, as their `model.safetensors` holds it."""
    _check_expressible(config)
    _check_shapes(ours, config)
    theirs = {FREQUENCIES: _frequencies(config)}
    for name, pieces in groupby(
        sorted(_pieces(config), key=lambda piece: piece.theirs), key=lambda piece: piece.theirs
    ):
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

    def of_theirs(self, value: Tensor) -> Tensor:
        return value[None] if self.stacked else value[slice(*self.their_rows)]

    def of_ours(self, value: Tensor) -> Tensor:
        rows = value[slice(*self.our_rows)]
        return rows[0] if self.stacked else rows


def _pieces(config: ModelConfig) -> Iterator[_Piece]:
    width, edges = config.n_head * config.d_head, config.cluster_edges
    for n in range(config.n_layer):
        fused = f"transformer.layers.{n}.dec_attn.qkv_net.weight"
        yield _Piece(theirs=fused, ours=f"layers.{n}.query.weight", their_rows=(0, width))
        yield _Piece(theirs=fused, ours=f"layers.{n}.key_value.weight", their_rows=(width, 3 * width))
        for theirs, ours in LAYER_NAMES.items():
            yield _Piece(theirs=theirs.format(n=n), ours=ours.format(n=n))
    for theirs, ours in BIAS_NAMES.items():
        for n in range(1 if config.share_biases else config.n_layer):
            place = "transformer" if config.share_biases else f"transformer.layers.{n}.dec_attn"
            yield _Piece(theirs=f"{place}.{theirs}", ours=ours, our_rows=(n, n + 1), stacked=True)
    for theirs, ours in TAIL_NAMES.items() if config.cutoffs else ():
        yield _Piece(theirs=theirs, ours=ours)
    tables = 1 if config.div_val == 1 else config.clusters
    for i in range(tables):
        rows = (0, None) if tables == 1 else (edges[i], edges[i + 1])
        yield _Piece(theirs=f"crit.out_layers.{i}.bias", ours="vocabulary.bias_V", our_rows=rows)
    for i in range(tables):
        yield _Piece(theirs=f"transformer.word_emb.emb_layers.{i}.weight", ours=f"vocabulary.tables.{i}")
        if not config.tie_embeddings:
            yield _Piece(theirs=f"crit.out_layers.{i}.weight", ours=f"vocabulary.output_tables.{i}")
        if config.has_projection(i):
            yield _Piece(theirs=f"transformer.word_emb.emb_projs.{i}", ours=f"vocabulary.input_projections.{i}")
    for i in range(config.clusters):
        if config.has_projection(i) and not config.ties_projection(i):
            yield _Piece(theirs=f"crit.out_projs.{i}", ours=f"vocabulary.output_projections.{i}")


def _copies(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Names under which their `pytorch_model.bin` repeats a tensor, with the tensor's own name."""
    for name in BIAS_NAMES if config.share_biases else ():
        for n in range(config.n_layer):
            yield f"transformer.layers.{n}.dec_attn.{name}", f"transformer.{name}"
    for i in range(1 if config.div_val == 1 else config.clusters):
        if config.tie_embeddings:
            yield f"crit.out_layers.{i}.weight", f"transformer.word_emb.emb_layers.{i}.weight"
    for i in range(config.clusters):
        if config.ties_projection(i):
            yield f"crit.out_projs.{i}", f"transformer.word_emb.emb_projs.{0 if config.div_val == 1 else i}"


def _frequencies(config: ModelConfig) -> Tensor:
    return 1.0 / 10000.0 ** (torch.arange(0.0, config.d_model, 2.0) / config.d_model)


# --- refusing


def _take(theirs: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in theirs:
        raise CheckpointError(f"the checkpoint has no {name}; it is cut short, or its config.json is another model's")
    return theirs[name]


def _check_shapes(ours: Mapping[str, Tensor], config: ModelConfig) -> None:
    with torch.device("meta"):
        wanted = TransformerXL(config).state_dict()
    for name in sorted(wanted.keys() ^ ours.keys()):
        raise CheckpointError(f"{name} exists on one side only: the model's configuration is not that of its weights")
    for name, value in wanted.items():
        if value.shape != ours[name].shape:
            raise CheckpointError(
                f"{name} has shape {list(ours[name].shape)} where the configuration makes it {list(value.shape)}"
            )


def _check_expressible(config: ModelConfig) -> None:
    """Refuses what TransfoXL cannot compute."""
    widths_differ = config.embedding_width != config.d_model
    projected = config.div_val > 1 or widths_differ
    refused = {
        "encoding": config.encoding != "relative",
        "final_norm": config.final_norm,
        "initial_memory": config.memory > 0 and config.initial_memory != "zeros",
        "same_length_keys": config.same_length and config.same_length_keys != "memory",
        "projections": any(config.has_projection(i) != projected for i in range(config.clusters)),
        "auxiliary_targets": config.auxiliary_targets > 0,
    }
    for field, wrong in refused.items():
        if wrong:
            raise ConfigError(
                f"model.{field}: Hugging Face's TransfoXL has no {getattr(config, field)!r}; change it, or keep the model in our own format"
            )
