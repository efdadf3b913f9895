"""What a model is: every choice of the paper's Section 3 and of the models its tables compare, as one frozen value.

The lengths and widths keep the names that the released scripts gave them (n_layer, d_model, clamp_len, ...): whoever owns a
Transformer-XL checkpoint or configuration knows those.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from transformer_xl.config.fields import MOST_PARTS, at_most, fraction, literal, not_negative, positive
from transformer_xl.config.vocabulary import InWords, VocabularyConfig
from transformer_xl.errors import ConfigError, shown, suggest

Encoding = Literal["relative", "shaw", "shaw_biased", "absolute", "per_layer"]
LEARNED_ENCODINGS = ("shaw", "shaw_biased", "per_layer")
ENCODINGS_WITHOUT_MEMORY = ("absolute", "per_layer")
LONGEST_NGRAM = 8
DROPOUT_SITES = ("embedding", "position", "attention", "attention_output", "inner", "feed_forward", "output")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(VocabularyConfig):
    recurrent: ClassVar[bool] = False
    kept_of_a_state: ClassVar[int] = 0

    n_layer: int = 12
    """Layers N."""
    n_head: int = 8
    """Attention heads."""
    d_head: int = 64
    """Width of a head; n_head * d_head need not be d_model."""
    d_inner: int = 2048
    """Inner width of the feed-forward part."""

    memory: int = 0
    """M, how many past positions each layer remembers. 0: no recurrence."""
    initial_memory: Literal["empty", "zeros"] = "empty"
    """What a stream starts with: nothing, or M zero vectors that are attended to (the authors' TensorFlow code, Hugging Face)."""
    same_length: bool = False
    """Every token sees the same number of keys, instead of more the later it stands in its segment."""
    same_length_keys: Literal["memory", "memory+1"] = "memory"
    """How many that is, itself included: M (the authors' PyTorch code) or M+1 (TensorFlow, NVIDIA)."""
    clamp_len: int = 0
    """Distances beyond this one all look the same. 0: never. For learned tables: how many of their rows are in use."""

    encoding: Encoding = "relative"
    """How order is known: the paper's terms (a) to (d); Shaw et al. as the paper describes it (a, b), or with the two biases of the
    authors' code; Vaswani's sinusoid; Al-Rfou's learned position per layer."""
    learned_positions: int = 0
    """Rows of the learned table of shaw, shaw_biased (distances) and per_layer (positions in a segment)."""
    frequencies: Literal["float32", "float16"] = "float32"
    """Of the sinusoid. float16: rounded to it, as a checkpoint saved in half precision has them."""
    share_biases: bool = True
    """u and v once for all layers, or one pair per layer. shaw_biased always has its own per layer."""

    neighbours: int = 0
    """Each layer adds the values of the token itself and of those just before it, so many in all, each channel by a learned weight, to what attention
    gathers: short contexts at once, where attention must first learn to look there. 0: none, as in the paper."""

    ngrams: tuple[int, ...] = ()
    """Orders of runs of tokens that are embedded together and added to each token's own embedding, such as 2,3,4; the reach grows by the longest less
    one. None: as in the paper."""
    ngram_rows: int = 0
    """Rows of each order's table, which runs share by a hash."""
    d_ngram: int = 0
    """Width of a row."""

    norm: Literal["post", "pre", "pre_keys"] = "post"
    """LayerNorm after each part, before it, or (the authors' absolute encodings) before the keys and values but not the query."""
    final_norm: bool = False
    """One more LayerNorm after the last layer; the published pre-norm has none."""
    norm_eps: float = 1e-5
    """Added to the variance in every layer norm, so that nothing is divided by zero."""

    dropout: float = 0.0
    """Rate of every dropout below that is not set apart."""
    attention_dropout: float = 0.0
    """On attention probabilities."""
    embedding_dropout: float | None = None
    """On what goes into the first layer."""
    position_dropout: float | None = None
    """On the encodings of distances."""
    attention_output_dropout: float | None = None
    """On what attention adds to a layer's input."""
    inner_dropout: float | None = None
    """On the inner layer of the feed-forward part."""
    feed_forward_dropout: float | None = None
    """On what the feed-forward part adds."""
    output_dropout: float | None = None
    """On what comes out of the last layer."""
    locked_dropout: tuple[str, ...] = ()
    """Sites whose dropout mask is drawn once per segment and held over time (variational dropout)."""

    auxiliary_layers: bool = False
    """Al-Rfou: each lower layer also predicts the next token, the l-th of n until l/2n of training."""
    auxiliary_targets: int = 0
    """Al-Rfou: predict this many further tokens ahead, each with its own classifier, at half weight."""

    @property
    def embedding_scale(self) -> float:
        """sqrt(d_model), as published."""
        return math.sqrt(self.d_model)

    def with_lengths(self, *, memory: int, clamp_len: int, same_length: bool) -> "ModelConfig":
        return replace(self, memory=memory, clamp_len=clamp_len, same_length=same_length)

    @property
    def kept_of_a_position(self) -> int:
        """Numbers that a reader keeps of each position it remembers: a key and a value in every layer."""
        return 2 * self.n_layer * self.n_head * self.d_head

    @property
    def numbers_of_a_layer(self) -> int:
        """At least so many weights, in its matrices."""
        return self.d_model * (4 * self.n_head * self.d_head + 2 * self.d_inner)

    @property
    def in_words(self) -> InWords:
        heads = f"{self.n_head} heads of {self.d_head}, inner {self.d_inner}"
        return InWords(
            kind="Transformer-XL",
            heads=f"{self.n_head}x{self.d_head}",
            inner=str(self.d_inner),
            shape=f"{self.n_layer} layers, {self.d_model} wide, {heads}",
            memory=str(self.memory),
        )

    @property
    def recent(self) -> int:
        """Tokens before a segment that its embeddings are made of."""
        return max(self.ngrams, default=1) - 1

    @property
    def remembers(self) -> bool:
        """Whether a token sees text before its segment."""
        return self.memory > 0

    @property
    def visible_distance(self) -> int | None:
        """The farthest a token looks back, or None where only the memory's end stops it."""
        if not self.same_length:
            return None
        return self.memory if self.same_length_keys == "memory+1" else self.memory - 1

    def dropout_rate(self, site: str) -> float:
        own: float | None = getattr(self, f"{site}_dropout")
        return self.dropout if own is None else own

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most(self, "model", MOST_PARTS, "n_layer", "auxiliary_targets", "neighbours")
        positive(self, "model", "n_layer", "n_head", "d_head", "d_inner")
        not_negative(self, "model", "ngram_rows", "d_ngram")
        not_negative(
            self, "model", "memory", "clamp_len", "learned_positions", "neighbours", "auxiliary_targets", "norm_eps"
        )
        fraction(self, "model", "dropout", *(f"{site}_dropout" for site in DROPOUT_SITES))
        literal(self, "model", "encoding", "frequencies", "norm", "initial_memory", "same_length_keys")
        for site in self.locked_dropout:
            if site not in DROPOUT_SITES:
                raise ConfigError(f"model.locked_dropout: no dropout {site!r}{suggest(site, DROPOUT_SITES)}")
        self._check_encoding()
        self._check_ngrams()
        if self.auxiliary_targets and self.cutoffs:
            raise ConfigError(
                f"model.auxiliary_targets: {self.auxiliary_targets} with cutoffs; the extra classifiers exist for a plain softmax, drop one of the two"
            )

    def _check_ngrams(self) -> None:
        if any(not 2 <= order <= LONGEST_NGRAM for order in self.ngrams) or list(self.ngrams) != sorted({*self.ngrams}):
            raise ConfigError(
                f"model.ngrams: {shown(list(self.ngrams))} are no orders; give whole numbers from 2 to {LONGEST_NGRAM}, each once, rising"
            )
        for name in ("ngram_rows", "d_ngram"):
            if (getattr(self, name) > 0) != bool(self.ngrams):
                raise ConfigError(
                    f"model.{name}: {getattr(self, name)} with model.ngrams {list(self.ngrams)}; "
                    + ("make it 1 or more" if self.ngrams else "set it to 0, or model.ngrams to orders such as 2,3,4")
                )

    def _check_encoding(self) -> None:
        if self.memory and self.encoding in ENCODINGS_WITHOUT_MEMORY:
            raise ConfigError(
                f"model.memory: {self.memory} with encoding {self.encoding}, whose positions start anew in every segment;"
                " set model.memory to 0, or take the encoding relative or shaw"
            )
        if self.encoding in LEARNED_ENCODINGS and not self.learned_positions:
            raise ConfigError(
                f"model.learned_positions: 0 with encoding {self.encoding}; set it to the longest distance to learn, usually memory + segment"
            )
        if self.encoding not in LEARNED_ENCODINGS and self.learned_positions:
            raise ConfigError(
                f"model.learned_positions: {self.learned_positions} with encoding {self.encoding}, which learns none; set it to 0"
            )
        if self.encoding in LEARNED_ENCODINGS and self.clamp_len > self.learned_positions:
            raise ConfigError(
                f"model.clamp_len: {self.clamp_len} is past the {self.learned_positions} learned positions; lower it or raise model.learned_positions"
            )
        if self.encoding == "per_layer" and self.clamp_len:
            raise ConfigError(
                f"model.clamp_len: {self.clamp_len} with encoding per_layer, which has no distances to clamp; set it to 0"
            )
        if self.encoding in ("relative", "absolute") and self.d_model % 2:
            raise ConfigError(
                f"model.d_model: {self.d_model} is odd, and the sinusoid has as many sines as cosines; make it even"
            )
        if self.same_length and (self.visible_distance is None or self.visible_distance < 0):
            raise ConfigError(
                f"model.same_length: with model.memory {self.memory} no token would see even itself; set a memory, or same_length to false"
            )
        if not self.share_biases and self.encoding != "relative":
            raise ConfigError(
                f"model.share_biases: false with encoding {self.encoding}; only relative has u and v to share or not"
            )
        if self.norm == "pre_keys" and self.encoding not in ENCODINGS_WITHOUT_MEMORY:
            raise ConfigError(
                f"model.norm: 'pre_keys' with encoding {self.encoding}; it exists for absolute and per_layer, take 'pre'"
            )
        if self.final_norm and self.norm == "post":
            raise ConfigError(
                "model.final_norm: true with norm 'post', whose last layer already ends in a norm; set it to false"
            )
