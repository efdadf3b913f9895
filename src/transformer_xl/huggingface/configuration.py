"""A run's config.json as transformers holds it, and what transformers asks of every configuration. Knows no weights."""

from dataclasses import asdict
from typing import Any

from transformers import PreTrainedConfig

from transformer_xl.config import ModelConfig, RecurrentConfig, RunConfig
from transformer_xl.config.fields import convert
from transformer_xl.errors import ConfigError


def reach_of(config: ModelConfig) -> int | None:
    """How far back a token looks, however its text is cut into calls. None: as far as it is shown, for there is no memory."""
    if not config.remembers:
        return None
    return config.memory if config.visible_distance is None else config.visible_distance


class TransformerXLConfig(PreTrainedConfig):
    """`model`, `training` and `evaluation` are the tables of a run's config.json, by its names; only the first says what is computed."""

    model_type = "transformer-xl"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (theirs is a list)

    model: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    use_cache: bool = True

    @classmethod
    def of(cls, run: RunConfig) -> "TransformerXLConfig":
        return cls(model=asdict(run.model), training=asdict(run.training), evaluation=asdict(run.evaluation))

    @property
    def native(self) -> ModelConfig:
        if self.model is None:
            raise ConfigError("model: this configuration describes none; give the table `model` of a run's config.json")
        config: ModelConfig | RecurrentConfig = convert(ModelConfig | RecurrentConfig, self.model, name="model")
        if isinstance(config, RecurrentConfig):
            raise ConfigError(
                f"model.cell: the {config.cell} has no keys and values to cache, so transformers cannot run it; use transformer_xl.load"
            )
        return config

    # What transformers asks for, by its own names. A configuration without a model, which it makes for comparison, has none of it.

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary, and padding after it: a token that is read by nobody and never likely."""
        return None if self.model is None else self.native.vocabulary + 1

    @property
    def pad_token_id(self) -> int | None:
        return None if self.model is None else self.native.vocabulary

    hidden_size = property(lambda self: None if self.model is None else self.native.d_model)
    num_hidden_layers = property(lambda self: None if self.model is None else self.native.n_layer)
    num_attention_heads = property(lambda self: None if self.model is None else self.native.n_head)

    @property
    def sliding_window(self) -> int | None:
        """Keys that a token sees, itself included: what their cache has to keep is one less."""
        reach = None if self.model is None else reach_of(self.native)
        return None if reach is None else reach + 1

    @property
    def layer_types(self) -> list[str] | None:
        if self.model is None:
            return None
        return ["full_attention" if self.sliding_window is None else "sliding_attention"] * self.native.n_layer
