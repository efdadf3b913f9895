"""What a model is: every choice of the paper's Section 3 and of the models its tables compare, as one frozen value.

The lengths and widths keep the names that the released scripts gave them (n_layer, d_model, clamp_len, ...): whoever owns a
Transformer-XL checkpoint or configuration knows those.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from transformer_xl.config.fields import fraction, not_negative, one_of, positive
from transformer_xl.errors import ConfigError, suggest

Encoding = Literal["relative", "shaw", "shaw_biased", "absolute", "per_layer"]
ENCODINGS: tuple[str, ...] = get_args(Encoding)
LEARNED_ENCODINGS = ("shaw", "shaw_biased", "per_layer")
ENCODINGS_WITHOUT_MEMORY = ("absolute", "per_layer")
DROPOUT_SITES = ("embedding", "position", "attention", "attention_output", "inner", "feed_forward", "output")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocabulary: int
    """How many tokens there are."""
    n_layer: int = 12
    """Layers N."""
    d_model: int = 512
    """Width of the hidden states."""
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
    share_biases: bool = True
    """u and v once for all layers, or one pair per layer. shaw_biased always has its own per layer."""

    norm: Literal["post", "pre", "pre_keys"] = "post"
    """LayerNorm after each part, before it, or (the authors' absolute encodings) before the keys and values but not the query."""
    final_norm: bool = False
    """One more LayerNorm after the last layer; the published pre-norm has none."""
    norm_eps: float = 1e-5

    d_embed: int = 0
    """Width of the embedding of the most frequent words. 0: d_model."""
    cutoffs: tuple[int, ...] = ()
    """Where the vocabulary, sorted by frequency, is cut into a head and tails. Empty: a plain softmax."""
    div_val: int = 1
    """Each tail's embedding is this many times narrower than the one before."""
    projections: Literal["needed", "always", "never"] = "needed"
    """Which embedding clusters are projected to d_model: those of another width, all of them, or none."""
    tie_embeddings: bool = True
    """Input and output share their tables."""
    tie_projections: tuple[bool, ...] = ()
    """Per cluster: the output uses the input's projection, where there is one. Empty: none does."""

    dropout: float = 0.0
    """Rate of every dropout below that is not set apart."""
    attention_dropout: float = 0.0
    """On attention probabilities."""
    word_dropout: float = 0.0
    """On whole words: a row of the embedding vanishes from the segment in every place it occurs."""
    embedding_dropout: float | None = None
    position_dropout: float | None = None
    attention_output_dropout: float | None = None
    inner_dropout: float | None = None
    feed_forward_dropout: float | None = None
    output_dropout: float | None = None
    locked_dropout: tuple[str, ...] = ()
    """Sites whose dropout mask is drawn once per segment and held over time (variational dropout)."""

    auxiliary_layers: bool = False
    """Al-Rfou: each lower layer also predicts the next token, the l-th of n until l/2n of training."""
    auxiliary_targets: int = 0
    """Al-Rfou: predict this many further tokens ahead, each with its own classifier, at half weight."""

    init_std: float = 0.02
    """Standard deviation of weights, of u and v, and of LayerNorm weights around 1."""
    projection_init_std: float = 0.01
    """The same for the projections of embedding clusters."""

    @property
    def embedding_width(self) -> int:
        return self.d_embed or self.d_model

    @property
    def cluster_edges(self) -> tuple[int, ...]:
        """Token ids at which clusters begin, and the end: (0, *cutoffs, vocabulary)."""
        return (0, *self.cutoffs, self.vocabulary)

    @property
    def clusters(self) -> int:
        return len(self.cutoffs) + 1

    def cluster_width(self, cluster: int) -> int:
        return self.embedding_width // int(self.div_val**cluster)

    def has_projection(self, cluster: int) -> bool:
        return self.projections == "always" or self.cluster_width(cluster) != self.d_model

    def ties_projection(self, cluster: int) -> bool:
        return bool(self.tie_projections) and self.tie_projections[cluster] and self.has_projection(cluster)

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
        positive(self, "model", "vocabulary", "n_layer", "d_model", "n_head", "d_head", "d_inner", "div_val")
        not_negative(self, "model", "memory", "clamp_len", "learned_positions", "d_embed", "auxiliary_targets")
        not_negative(self, "model", "init_std", "projection_init_std", "norm_eps")
        fraction(self, "model", "dropout", "word_dropout", *(f"{site}_dropout" for site in DROPOUT_SITES))
        one_of(self, "model", "encoding", ENCODINGS)
        one_of(self, "model", "norm", ("post", "pre", "pre_keys"))
        one_of(self, "model", "initial_memory", ("empty", "zeros"))
        one_of(self, "model", "same_length_keys", ("memory", "memory+1"))
        one_of(self, "model", "projections", ("needed", "always", "never"))
        for site in self.locked_dropout:
            if site not in DROPOUT_SITES:
                raise ConfigError(f"model.locked_dropout: no dropout {site!r}{suggest(site, DROPOUT_SITES)}")
        self._check_encoding()
        self._check_clusters()

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

    def _check_clusters(self) -> None:
        for low, high in zip((0, *self.cutoffs), self.cutoffs, strict=False):
            if high <= low:
                raise ConfigError(f"model.cutoffs: {high} does not come after {low}; sort them, each above 0 and once")
        if self.cutoffs and self.cutoffs[-1] >= self.vocabulary:
            raise ConfigError(f"model.cutoffs: {self.cutoffs[-1]} is past the vocabulary ({self.vocabulary}); drop it")
        if self.div_val > 1 and not self.cutoffs:
            raise ConfigError(
                f"model.div_val: {self.div_val} without cutoffs divides nothing; set model.cutoffs, or div_val to 1"
            )
        if self.cluster_width(self.clusters - 1) < 1:
            raise ConfigError(
                f"model.div_val: {self.div_val} leaves no width for the last of {self.clusters} clusters of d_embed {self.embedding_width}; lower it"
            )
        if self.projections == "never" and any(self.cluster_width(i) != self.d_model for i in range(self.clusters)):
            raise ConfigError(
                f"model.d_embed: {self.embedding_width} (div_val {self.div_val}) differs from model.d_model {self.d_model} and model.projections is"
                f" 'never'; set projections to 'needed', or d_embed to {self.d_model} with div_val 1"
            )
        if self.auxiliary_targets and self.cutoffs:
            raise ConfigError(
                f"model.auxiliary_targets: {self.auxiliary_targets} with cutoffs; the extra classifiers exist for a plain softmax, drop one of the two"
            )
        if self.tie_projections and len(self.tie_projections) != self.clusters:
            raise ConfigError(
                f"model.tie_projections: {len(self.tie_projections)} values for {self.clusters} clusters; give one per cluster, or none"
            )
