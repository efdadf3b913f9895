"""Tokens in and out, for every kind of model: adaptive embeddings and softmax, and how they start."""

from dataclasses import dataclass
from typing import Literal

from transformer_xl.config.fields import MOST_PARTS, fraction, literal, no_giant, not_negative, positive
from transformer_xl.errors import ConfigError, shown

NOT_A_TARGET = -1
"""A target that is not scored; its loss is exactly 0."""


@dataclass(frozen=True, kw_only=True)
class InWords:
    """A model's shape, for people."""

    kind: str
    heads: str
    inner: str
    """How wide it is inside."""
    shape: str
    memory: str


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig:
    vocabulary: int
    """How many tokens there are."""
    d_model: int = 512
    """Width of the hidden states; of a recurrent model, what its first layer takes and its last gives."""
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
    word_dropout: float = 0.0
    """On whole words: a row of the embedding vanishes from the segment in every place it occurs."""

    init_std: float = 0.02
    """Standard deviation of weights, of u and v, and of LayerNorm weights around 1."""
    projection_init_std: float = 0.01
    """The same for the projections of embedding clusters."""

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by on their way in."""
        return 1.0

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

    def __post_init__(self) -> None:
        no_giant(self, "model")
        if len(self.cutoffs) >= MOST_PARTS:
            raise ConfigError(f"model.cutoffs: {len(self.cutoffs):,} are too many; give at most {MOST_PARTS - 1:,}")
        positive(self, "model", "vocabulary", "d_model", "div_val")
        not_negative(self, "model", "d_embed", "init_std", "projection_init_std")
        fraction(self, "model", "word_dropout")
        literal(self, "model", "projections")
        self._check_clusters()

    def _check_clusters(self) -> None:
        for low, high in zip((0, *self.cutoffs), self.cutoffs, strict=False):
            if high <= low:
                raise ConfigError(
                    f"model.cutoffs: {shown(high)} does not come after {shown(low)}; sort them, each above 0 and once"
                )
        if self.cutoffs and self.cutoffs[-1] >= self.vocabulary:
            raise ConfigError(
                f"model.cutoffs: {shown(self.cutoffs[-1])} is past the vocabulary ({self.vocabulary}); drop it"
            )
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
        if self.tie_projections and len(self.tie_projections) != self.clusters:
            raise ConfigError(
                f"model.tie_projections: {len(self.tie_projections)} values for {self.clusters} clusters; give one per cluster, or none"
            )
