"""Transformer-XL as transformers wants a model: `forward` with a cache, losses with labels, `generate()`, and runs by their folder."""

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from transformer_xl.checkpoint import Checkpoint, is_ours, load_checkpoint
from transformer_xl.config import NOT_A_TARGET
from transformer_xl.config.sources import read_file
from transformer_xl.errors import CheckpointError, InputError, TransformerXLError
from transformer_xl.huggingface.configuration import TransformerXLConfig
from transformer_xl.huggingface.reading import distances_needed, read_segment
from transformer_xl.inference.windows import window_of
from transformer_xl.interop.formats.foreign_model import check_shapes
from transformer_xl.interop.formats.huggingface import SAVED_PREFIX
from transformer_xl.model import TransformerXL
from transformer_xl.model.encodings import Distances
from transformer_xl.model.ngrams import NO_TOKEN
from transformer_xl.model.protocol import check_tokens

NOT_A_LABEL = -100
"""Theirs for what we call NOT_A_TARGET."""
OF_THE_HUB = (
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"),
    *("trust_remote_code", "adapter_kwargs", "_from_auto", "_from_pipeline", "_commit_hash", "use_safetensors"),
)
"""Options of `from_pretrained` that say how to fetch a folder, which ours need not be."""


class TransformerXLForCausalLM(PreTrainedModel, GenerationMixin):
    """Logits are log-probabilities, with one column more than the vocabulary: padding, whose probability is 0."""

    config_class = TransformerXLConfig
    base_model_prefix = "transformer"
    accepts_loss_kwargs = True
    _no_split_modules = ["Layer"]  # noqa: RUF012 (theirs is a list)

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.transformer = TransformerXL(config.native)
        self._tables: WeakKeyDictionary[Cache, tuple[int, list[Distances]]] = WeakKeyDictionary()
        """Projected relative keys, made once for each cache: while one is in use the weights stand still."""
        self._read: WeakKeyDictionary[Cache, tuple[Tensor | None, Tensor]] = WeakKeyDictionary()
        """The last tokens that each cache has read, and its keys as they were then: for models that embed runs of tokens."""
        self.post_init()
        self.generation_config.pad_token_id = config.pad_token_id

    def _init_weights(self, module: nn.Module) -> None:
        """TransformerXL has drawn its own."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        previous_ids: Tensor | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """`labels` are the input itself: each position is scored on the next one's, -100 on none. In training no logits are made beside the loss.
        `previous_ids`: the tokens just before these, for models that embed runs of tokens and are given a past that was not made by the call before;
        `generate` gives them."""
        model, V = self.transformer, self.transformer.config.vocabulary
        check_tokens(input_ids, vocabulary=V + 1)
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not self.training
        cache = self._checked_cache(past_key_values, use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        recent_BP = self._recent(input_ids, previous_ids, cache=cache, past=past)
        hidden_BTD = read_segment(
            model,
            input_ids.clamp(max=V - 1),
            real_BP=_real(input_ids, attention_mask, past=past, padding=V),
            cache=cache,
            distances=self._distances(input_ids.shape[1], cache),
            recent_BP=recent_BP,
        )
        if recent_BP is not None and cache is not None:
            read_BS = torch.cat([recent_BP, input_ids.masked_fill(input_ids == V, NO_TOKEN)], dim=1)
            self._read[cache] = (cache.layers[0].keys, read_BS[:, -recent_BP.shape[1] :])
        loss = None if labels is None else self._loss(hidden_BTD, labels, num_items_in_batch)
        logits = None
        if loss is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = F.pad(model.log_probabilities(hidden_BTD[:, kept]), (0, 1), value=float("-inf"))
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if use_cache else None)
        return output if return_dict is not False else output.to_tuple()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """A model without memory reads its last window again for every token, as the native loop does. (`kwargs` is a name that generate looks for.)"""
        kwargs.pop("tokenizer", None)  # which generate passes on, having looked for stop_strings with it
        if self.transformer.config.remembers:
            prepared: dict[str, Any] = super().prepare_inputs_for_generation(
                input_ids, attention_mask=attention_mask, **kwargs
            )
            if self.transformer.config.recent:
                before = input_ids.shape[1] - prepared["input_ids"].shape[1]
                prepared["previous_ids"] = input_ids[:, max(0, before - self.transformer.config.recent) : before]
            return prepared
        shown = window_of(self.transformer.config)
        mask = None if attention_mask is None else attention_mask[:, -shown:]
        return {"input_ids": input_ids[:, -shown:], "attention_mask": mask, "use_cache": False, "logits_to_keep": 1}

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *model_args: Any, **options: Any
    ) -> "TransformerXLForCausalLM":
        """A run of ours (its best checkpoint), one of its checkpoints, or a folder that `save_pretrained` wrote."""
        if not is_ours(pretrained_model_name_or_path):
            folder = Path(pretrained_model_name_or_path) / options.get("subfolder", "")
            if folder.is_dir():
                check_saved(folder, options.get("config"))
            loaded: TransformerXLForCausalLM = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, **options
            )
            return loaded
        path = Path(pretrained_model_name_or_path)
        config, device = options.pop("config", None), options.pop("device_map", None)
        old_name = options.pop("torch_dtype", None)
        dtype = options.pop("dtype", None) or old_name
        unknown = [name for name in options if name not in OF_THE_HUB]
        if unknown or model_args:
            raise InputError(
                f"from_pretrained: {unknown[0] if unknown else model_args[0]} is nothing that the run {path} can be loaded with; drop it"
            )
        if device is not None and not isinstance(device, str | int | torch.device):
            raise InputError(f"device_map: {device!r} would cut the model of {path} up; name one device")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        checkpoint = load_checkpoint(path, device="cpu" if device is None else device)
        model = cls._around(checkpoint, config)
        model.config.name_or_path = str(path)
        if dtype not in (None, "auto"):
            model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return model

    @classmethod
    def _around(cls, checkpoint: Checkpoint, config: TransformerXLConfig | None) -> "TransformerXLForCausalLM":
        config = TransformerXLConfig.of(checkpoint.config) if config is None else config
        asked, inner = config.native, checkpoint.model
        inner.set_lengths(memory=asked.memory, clamp_len=asked.clamp_len, same_length=asked.same_length)
        if inner.config != asked:
            raise CheckpointError(
                f"{checkpoint.folder} holds another model than the configuration describes; only memory, clamp_len and same_length can be changed"
            )
        with torch.device("meta"):
            model = cls(config)
        model.transformer = inner
        model.eval()
        return model

    # --- inside

    def _checked_cache(self, cache: Cache | None, use_cache: bool) -> Cache | None:
        if not self.transformer.config.remembers:
            if cache is not None:
                raise InputError("past_key_values: a model with memory 0 keeps no past; give it the whole text")
            return None
        if cache is None:
            return DynamicCache(config=self.config) if use_cache else None
        for layer in cache.layers:
            if not isinstance(layer, DynamicLayer):
                raise InputError(
                    f"past_key_values: a cache of {type(layer).__name__} moves keys to other places than these distances are counted by; use DynamicCache"
                )
        return cache

    def _recent(
        self, input_ids: Tensor, previous_ids: Tensor | None, *, cache: Cache | None, past: int
    ) -> Tensor | None:
        """The tokens before these, [B, recent], as runs of tokens are made of: NO_TOKEN for padding and before the first."""
        config, V = self.transformer.config, self.transformer.config.vocabulary
        if not config.recent:
            return None
        if cache is not None and past and (previous_ids is None or previous_ids.shape[1] < min(config.recent, past)):
            keys, recent_BP = self._read.get(cache, (None, input_ids))
            if keys is not None and keys is cache.layers[0].keys:  # nobody has reordered or cut it since
                return recent_BP
            raise InputError(
                f"previous_ids: this model embeds runs of tokens, and needs the {min(config.recent, past)} before a call whose past_key_values somebody else"
                " has changed; give them"
            )
        found_BP = input_ids[:, :0] if previous_ids is None else previous_ids[:, -config.recent :]
        check_tokens(torch.cat([found_BP, input_ids], dim=1), vocabulary=V + 1, name="previous_ids")
        found_BP = found_BP.masked_fill(found_BP == V, NO_TOKEN)
        return F.pad(found_BP, (config.recent - found_BP.shape[1], 0), value=NO_TOKEN)

    def _distances(self, tokens: int, cache: Cache | None) -> list[Distances]:
        length = distances_needed(self.transformer, tokens, cache=cache)
        if cache is None or self.training or torch.is_grad_enabled():
            return self.transformer.encoding.distances(length)
        known = self._tables.get(cache)
        if known is None or known[0] < length:
            known = self._tables[cache] = (length, self.transformer.encoding.distances(length))
        return known[1]

    def _loss(self, hidden_BTD: Tensor, labels_BT: Tensor, scored: Tensor | int | None) -> Tensor:
        """The mean over scored labels, or over `scored` of them where a batch is one of several that make a step."""
        config = self.transformer.config
        if self.training and (config.auxiliary_layers or config.auxiliary_targets):
            raise InputError("auxiliary losses fade as training goes on, which is not told here; use txl train")
        targets_BT = labels_BT[:, 1:].masked_fill(labels_BT[:, 1:] == NOT_A_LABEL, NOT_A_TARGET)
        check_tokens(labels_BT, vocabulary=config.vocabulary, name="labels", lowest=NOT_A_LABEL)
        loss = self.transformer.vocabulary.loss(hidden_BTD[:, :-1], targets_BT).sum()
        count = (targets_BT != NOT_A_TARGET).sum().clamp(min=1) if scored is None else scored
        return loss / count


def check_saved(folder: Path, config: TransformerXLConfig | None) -> None:
    """Whether a folder's weights are those of its configuration. transformers would make room for each that the file lacks, as large as the
    configuration says, and leave in it what lies there."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: it is damaged, or no safetensors file ({error})") from None
    if not found:
        raise CheckpointError(f"{folder} holds no model.safetensors; name a run, or a folder of save_pretrained")
    config = config or TransformerXLConfig(model=read_file(folder / "config.json").get("model"))
    try:
        check_shapes({name.removeprefix(SAVED_PREFIX): shape for name, shape in found.items()}, config.native)
    except TransformerXLError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _real(input_ids: Tensor, attention_mask: Tensor | None, *, past: int, padding: int) -> Tensor | None:
    """[B, past + T], False at padding; None where there is none."""
    B, T = input_ids.shape
    if attention_mask is None:
        if past or not bool((input_ids == padding).any()):
            return None
        attention_mask = input_ids != padding
    if attention_mask.shape != (B, past + T):
        raise InputError(
            f"attention_mask: shape {list(attention_mask.shape)} does not cover {past} tokens of the past and {T} new ones in {B} lanes; give all of them"
        )
    real_BP = attention_mask.bool()
    if bool(real_BP.all()):
        return None
    begins_BP = real_BP & ~F.pad(real_BP[:, :-1], (1, 0))
    if bool((begins_BP.sum(dim=1) > 1).any()):
        raise InputError(
            "attention_mask: padding between tokens of one text would count as distance; pad prompts on the left (padding_side='left')"
        )
    return real_BP
