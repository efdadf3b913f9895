"""Everything that changes while a model is trained, in one place, so that a stopped run can go on bit by bit as if it had not been stopped."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from transformer_xl.checkpoint import Counters, TrainingState, Window
from transformer_xl.config import RunConfig
from transformer_xl.data.feeding.lanes import Lanes
from transformer_xl.data.feeding.sentences import SentenceLanes
from transformer_xl.data.store import Store
from transformer_xl.errors import CheckpointError, ConfigError, TransformerXLError
from transformer_xl.evaluation import Figures
from transformer_xl.model import AnyMemory, AnyModel, build_model, parameter_count
from transformer_xl.model.memory import check_fits
from transformer_xl.training.optimisation import Average, build_optimiser
from transformer_xl.training.ranks import ALONE, Ranks
from transformer_xl.training.saved_state import checked_state, of_rank
from transformer_xl.training.stuck import Frequencies


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A validation, and the step it was made at."""

    step: int
    figures: Figures


@dataclass(kw_only=True)
class Session:
    config: RunConfig
    device: torch.device
    ranks: Ranks
    model: AnyModel
    wrapped: nn.Module
    """What a step calls: the model, or that which exchanges its gradients with other ranks."""
    optimiser: Optimizer
    scaler: GradScaler
    lanes: Lanes | SentenceLanes
    average: Average
    frequencies: Frequencies
    data: str
    """Whose text it is trained on: the store's fingerprint."""
    memories: list[AnyMemory | None]
    """One for each micro-batch of this rank."""
    step: int = 0
    tokens: int = 0
    """Tokens scored so far."""
    seconds: float = 0.0
    """Time spent in steps so far."""
    skipped: int = 0
    """Updates left out because something was not finite."""
    rate_scale: float = 1.0
    """What plateau has made of the rate."""
    best_nats: float | None = None
    window: Window = field(default_factory=Window)

    @classmethod
    def fresh(cls, config: RunConfig, *, store: Store, device: torch.device, ranks: Ranks = ALONE) -> "Session":
        count = parameter_count(config.model)
        way_out = "make model.d_model, model.d_inner or model.n_layer smaller"
        check_fits(count, like=torch.empty(0), what=f"a model of {count:,} weights", way_out=way_out)
        torch.manual_seed(config.training.seed)
        model = build_model(config.model).train()
        if ranks.parallel != "fsdp":  # which moves a layer at a time, for the whole may not fit
            model = model.to(device)
        model.recompute = config.training.checkpoint_activations
        wrapped = ranks.wrap(model, device=device)
        if not ranks.first:
            torch.manual_seed(ranks.seed(config.training.seed, step=0))
        return cls(
            config=config,
            device=device,
            ranks=ranks,
            model=model,
            wrapped=wrapped,
            optimiser=build_optimiser(model, config.training),
            scaler=GradScaler(device.type, enabled=config.training.precision == "float16"),
            lanes=lanes_of(config, store),
            average=Average(config.training),
            frequencies=Frequencies(store.split("train"), vocabulary=config.model.vocabulary),
            data=store.fingerprint(),
            memories=[None] * config.training.accumulation,
        )

    def weights_to_use(self) -> dict[str, Tensor]:
        """Whole on rank 0, with the help of all."""
        weights = {**self.model.state_dict(), **self.average.weights}
        return {name: self.ranks.whole(value) for name, value in weights.items()}

    @contextmanager
    def model_to_use(self) -> Iterator[AnyModel]:
        """For rank 0, with the help of all: the model with `weights_to_use`, which under fsdp is a second one that is not sharded."""
        if self.ranks.parallel != "fsdp":
            with self.average.in_place(self.model):
                yield self.model
            return
        weights = self.weights_to_use()
        with torch.device("meta"):
            model = build_model(self.config.model)
        if self.ranks.first:
            model.load_state_dict({name: value.to(self.device) for name, value in weights.items()}, assign=True)
        yield model

    def state(self) -> TrainingState:
        """Whole on rank 0, with the help of all; the same files whatever the number of ranks."""
        whole = self.ranks.whole
        tensors: dict[str, Tensor] = {}
        for kind, own in self._random_states().items():
            for rank, state in enumerate(self.ranks.gather(own)):
                tensors[of_rank(kind, rank)] = state
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{key}.{name}"] = whole(value).contiguous()
            if self.average.weights:  # then model.safetensors holds the averages, and the weights themselves stand here
                tensors[f"weights.{name}"] = whole(parameter.detach()).contiguous()
        for part, memory in enumerate(self._memories_of_all_lanes()):
            tensors |= {f"memory.{part}.{name}": value for name, value in memory.tensors().items()}
        counters = Counters(
            step=self.step,
            tokens=self.tokens,
            seconds=self.seconds,
            skipped=self.skipped,
            rate_scale=self.rate_scale,
            best_nats=self.best_nats,
            average_count=self.average.count,
            window=self.window,
            lanes=self.lanes.state(),
            data=self.data,
            scaler=self.scaler.state_dict(),
            ranks=self.ranks.count,
        )
        return TrainingState(tensors=tensors, counters=counters)

    def restore(self, state: TrainingState, *, weights: dict[str, Tensor], folder: Path) -> None:
        """`weights` are those of model.safetensors: the averages, where there are any. `folder`: the checkpoint all this was read from."""
        counters = state.counters
        same_ranks = counters.ranks == self.ranks.count
        on_cuda = self.device.type == "cuda" and same_ranks
        saved = checked_state(state, model=self.model, config=self.config, folder=folder, on_cuda=on_cuda)
        try:
            if counters.lanes is not None:
                self.lanes.restore(counters.lanes)
        except TransformerXLError as error:
            raise CheckpointError(f"{folder / 'training.json'}: lanes: {error}") from None
        parameters, share = dict(self.model.named_parameters()), self.ranks.share
        own = saved.own_weights or weights
        self.model.load_state_dict({name: share(value, like=parameters.get(name)) for name, value in own.items()})
        averages = weights.items() if saved.own_weights else ()
        self.average.weights = {name: share(value, like=parameters[name]).to(self.device) for name, value in averages}
        self.average.count = counters.average_count
        for name, kept in saved.optimiser.items():
            parameter = parameters[name]
            self.optimiser.state[parameter] = {
                key: share(value, like=parameter).to(self.device) for key, value in kept.items()
            }
        self._take_memories(saved.memories)
        self.step, self.tokens, self.seconds = counters.step, counters.tokens, counters.seconds
        self.skipped, self.rate_scale, self.best_nats = counters.skipped, counters.rate_scale, counters.best_nats
        self.window = counters.window
        if self.scaler.is_enabled() and counters.scaler:
            self.scaler.load_state_dict(counters.scaler)
        if same_ranks:
            torch.set_rng_state(saved.random[of_rank("random.cpu", self.ranks.rank)])
            if on_cuda:
                torch.cuda.set_rng_state(saved.random[of_rank("random.cuda", self.ranks.rank)], self.device)
        else:
            torch.manual_seed(self.ranks.seed(self.config.training.seed, step=self.step))

    def _random_states(self) -> dict[str, Tensor]:
        states = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _memories_of_all_lanes(self) -> list[AnyMemory]:
        """In the micro-batches of one process: lanes stand in the files in their own order, whichever rank has them."""
        own = [memory for memory in self.memories if memory is not None]
        if self.ranks.count == 1 or not own:
            return own
        gathered = {
            name: torch.cat(self.ranks.gather(value)) if value.dim() else value
            for name, value in _joined(own).tensors().items()
        }
        memory = self.model.memory_kind.from_tensors(gathered)
        return [memory.select(rows.tolist()) for rows in np.array_split(np.arange(memory.lanes), len(own))]

    def _take_memories(self, saved: list[AnyMemory]) -> None:
        """This rank's lanes of the memory in the files."""
        if not saved:
            self.memories = [None] * len(self.memories)
            return
        if self.ranks.count > 1:
            memory = _joined(saved)
            deal = np.array_split(self.ranks.rows(memory.lanes), len(self.memories))
            saved = [memory.select(rows.tolist()) for rows in deal]
        self.memories = [self._placed(memory) for memory in saved]

    def _placed(self, memory: AnyMemory) -> AnyMemory:
        """A run that no longer computes in half precision takes over no memory in it."""
        whole = self.config.training.precision == "float32"
        return memory.to(self.device, dtype=self.model.vocabulary.bias_V.dtype if whole else None)


def _joined(memories: list[AnyMemory]) -> AnyMemory:
    """The lanes of several, one after the other."""
    parts = [memory.tensors() for memory in memories]
    named = {
        name: torch.cat([part[name] for part in parts]) if value.dim() else value for name, value in parts[0].items()
    }
    return type(memories[0]).from_tensors(named)


def lanes_of(config: RunConfig, store: Store) -> Lanes | SentenceLanes:
    """The text as this configuration reads it."""
    training, train = config.training, store.split("train")
    how: dict[str, Any] = {"lanes": training.lanes, "segment": training.segment, "context": training.context}
    how |= {"variable": training.variable_segments, "seed": training.seed}
    if store.manifest.sentence_mark is None:
        return Lanes(train, stretch=training.stretch, **how)
    if training.stretch:
        raise ConfigError(
            f"training.stretch: {training.stretch}, and {store.folder} is made of sentences, which are shuffled anyway; set it to 0"
        )
    return SentenceLanes(train, **how)
