"""How a model is trained and how it is evaluated, as frozen values; a whole run is the three parts together."""

import math
from dataclasses import dataclass, field
from typing import Literal

from transformer_xl.config.fields import LARGEST_SEED, at_most, fraction, literal, no_giant, not_negative, positive
from transformer_xl.config.model import ModelConfig
from transformer_xl.config.recurrent import RecurrentConfig
from transformer_xl.errors import ConfigError

LONGEST_WARM_UP, LONGEST_AVERAGE = 0.2, 0.1
"""Of the steps that fit into `training.minutes`: a warm-up and an average that are counted in steps were made for more of them."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    segment: int = 128
    """T, tokens a lane is fed and scored on in one step."""
    context: int = 0
    """Tokens before each segment that are fed again without being scored. Equal to `segment`: the paper's half loss."""
    variable_segments: bool = False
    """Segment lengths drawn around `segment`: 95 % N(T, 5), 5 % N(T/2, 5)."""
    stretch: int = 0
    """Segments that a lane reads on before it goes to another place of the text, where memory starts anew; in one epoch no token is read twice. For
    training that ends before it has read everything. 0: straight on, as in the paper."""
    lanes: int = 16
    """B, parallel streams in one step, over all micro-batches and devices."""
    accumulation: int = 1
    """Micro-batches a step is split into, each with its own lanes and memory."""
    reset_memory_at_documents: bool = False
    """A lane forgets when a new document starts in its segment."""

    steps: int = 10_000
    """Updates of the weights; with `minutes`, what the schedule expects, measured as training starts."""
    minutes: float = 0.0
    """How long training takes by the clock, validating and saving included: it decides when to end, and `steps` does not. 0: `steps` decides."""
    optimiser: Literal["adam", "adamw", "sgd", "muon"] = "adam"
    """adam: the paper's. muon: matrices of the layers move by their gradient's directions alone, everything else by adamw."""
    learning_rate: float = 2.5e-4
    """The highest rate, after warm-up."""
    embedding_rate_factor: float = 1.0
    """The embeddings' rate over everybody else's."""
    weight_decay: float = 0.0
    """adam and sgd add so much of a weight to its gradient; adamw and muon shrink weights by so much of the rate."""
    momentum: float = 0.0
    """For sgd."""
    schedule: Literal["cosine", "inverse_square_root", "constant", "plateau"] = "cosine"
    """How the rate falls after warm-up. plateau: whenever validation gets no better."""
    warm_up: int = 0
    """Steps in which the rate rises to its highest; with `minutes`, at most a fifth of all."""
    warm_up_share: float = 0.0
    """The same as a share of all steps, in place of `warm_up`. 0: `warm_up` says."""
    schedule_rule: Literal["pytorch", "tensorflow"] = "pytorch"
    """Two published rules. pytorch: the rate of step s is set after it, so the first update uses the full rate, and the cosine runs over all steps.
    tensorflow: the first update has rate 0, and the cosine runs over the steps after warm-up."""
    floor: float = 0.0
    """The lowest rate of the cosine, and of plateau, as a share of the highest."""
    rate_by_segment_length: bool = False
    """A step on a shorter segment takes a proportionally smaller rate."""
    clip: float = 0.25
    """The largest norm of all gradients together. 0: never clipped."""
    activation_regularisation: float = 0.0
    """Weight of the mean square of the last hidden states, after dropout."""
    temporal_regularisation: float = 0.0
    """Weight of the mean square of their change from one position to the next."""

    average: Literal["none", "ema", "uniform"] = "none"
    """Which average of the weights is evaluated and kept beside them: exponential, or the plain mean since `average_from`."""
    average_decay: float = 0.999
    """Of the exponential average; with `minutes`, at most what averages over a tenth of all steps."""
    average_from: int = 0
    """The step from which weights are averaged."""

    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Half precision where it is safe; weights stay float32. bfloat16 on a processor: the factors of products alone are rounded, where it multiplies
    those faster. auto: bfloat16 on a GPU that computes in it, float32 elsewhere."""
    checkpoint_activations: bool = False
    """Keep only the layers' inputs and compute the rest again in the backward pass: less memory, a third more work."""
    non_finite: Literal["stop", "skip"] = "stop"
    """On a loss or gradient that is not finite: stop, or skip the update and count it. Never update."""
    seed: int = 1111
    """Of the first weights, of dropout, and of the places that are read where not straight on."""

    validate_every: int = 1000
    """Steps between validations, with a text sample each. 0: only at the end."""
    validation_tokens: int = 0
    """How many tokens of the valid split they read. 0: all."""
    save_every: int = 1000
    """Steps between checkpoints. 0: by `save_minutes` alone, and at the end."""
    save_minutes: float = 5.0
    """And so many minutes after the last one. 0: by `save_every` alone, and at the end."""
    shards: bool = False
    """With fsdp on a file system that all ranks share: each writes its own rows of the checkpoint, so that no host need hold it whole. false: one file."""
    log_every: int = 50
    """Steps that one line of metrics.jsonl stands for."""

    def __post_init__(self) -> None:
        no_giant(self, "training", but=("seed",))
        at_most(self, "training", LARGEST_SEED, "seed")
        positive(self, "training", "segment", "lanes", "accumulation", "steps", "log_every")
        not_negative(
            self,
            "training",
            "context",
            "stretch",
            "warm_up",
            "average_from",
            "validate_every",
            "validation_tokens",
            "save_every",
            "seed",
        )
        not_negative(self, "training", "learning_rate", "embedding_rate_factor", "weight_decay", "clip")
        not_negative(self, "training", "minutes", "save_minutes")
        not_negative(self, "training", "activation_regularisation", "temporal_regularisation")
        fraction(self, "training", "momentum", "average_decay", "floor", "warm_up_share")
        literal(self, "training", "optimiser", "schedule", "schedule_rule", "average", "precision", "non_finite")
        if self.lanes % self.accumulation:
            raise ConfigError(
                f"training.accumulation: {self.accumulation} does not divide training.lanes {self.lanes}; choose a divisor"
            )
        if self.momentum and self.optimiser != "sgd":
            raise ConfigError(
                f"training.momentum: {self.momentum} with optimiser {self.optimiser}, which has its own; set it to 0"
            )
        if self.warm_up and self.warm_up_share:
            raise ConfigError(
                f"training.warm_up: {self.warm_up} beside training.warm_up_share {self.warm_up_share}; set one of them to 0"
            )
        if self.schedule == "inverse_square_root" and not self.warm_up_steps:
            raise ConfigError(
                "training.warm_up: 0 with schedule inverse_square_root, which falls from the end of warm-up; set it to 1 or more"
            )

    @property
    def warm_up_steps(self) -> int:
        if self.warm_up_share:
            return math.ceil(self.warm_up_share * self.steps)
        return min(self.warm_up, math.ceil(LONGEST_WARM_UP * self.steps)) if self.minutes else self.warm_up

    @property
    def average_share(self) -> float:
        """Of the newest weights in the exponential average."""
        share = 1 - self.average_decay
        return min(1.0, max(share, 1 / (LONGEST_AVERAGE * self.steps))) if self.minutes else share


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    segment: int = 128
    """Tokens that are read at a time."""
    memory: int = 0
    """Tokens before those that are remembered; longer than trained with is allowed."""
    clamp_len: int = 0
    """Distances beyond this one all look the same. 0: never."""
    same_length: bool = False
    """Every token sees the same number of keys, instead of more the later it stands in its segment."""

    def __post_init__(self) -> None:
        no_giant(self, "evaluation")
        positive(self, "evaluation", "segment")
        not_negative(self, "evaluation", "memory", "clamp_len")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    model_type: Literal["transformer-xl"] = "transformer-xl"
    """The name by which transformers' Auto classes know what lies in a run's folder (`huggingface`); runs from before it have none."""
    model: ModelConfig | RecurrentConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        if isinstance(self.model, RecurrentConfig):
            self._check_recurrent(self.model)
        else:
            self._check_encoding(self.model)

    def _check_recurrent(self, model: RecurrentConfig) -> None:
        """A state is all that a recurrent model carries: it has no length, and is not known in the middle of a segment."""
        asked = {
            "training.context": self.training.context,
            "training.reset_memory_at_documents": self.training.reset_memory_at_documents,
            "training.checkpoint_activations": self.training.checkpoint_activations,
            "evaluation.memory": self.evaluation.memory,
            "evaluation.clamp_len": self.evaluation.clamp_len,
            "evaluation.same_length": self.evaluation.same_length,
        }
        for name, value in asked.items():
            if value:
                raise ConfigError(f"{name}: {value} is for attention, and the {model.cell} has none; leave it out")

    def _check_encoding(self, model: ModelConfig) -> None:
        encoding = model.encoding
        longest = self.training.context + self.training.segment
        if encoding == "per_layer" and longest > model.learned_positions:
            raise ConfigError(
                f"training.segment: {longest} tokens are fed at once, past the {model.learned_positions} positions that"
                " model.learned_positions gives encoding per_layer; raise it"
            )
        if encoding in ("absolute", "per_layer") and self.evaluation.memory:
            raise ConfigError(
                f"evaluation.memory: {self.evaluation.memory} with encoding {encoding}, which can have none; set it to 0"
            )
