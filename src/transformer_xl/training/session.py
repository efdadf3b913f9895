"""Everything that changes while a model is trained, in one place, so that a stopped run can go on bit by bit as if it had not been stopped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from transformer_xl.checkpoint import Counters, Timetable, TrainingState, Window
from transformer_xl.checkpoint.shards import AnyTensor
from transformer_xl.config import RunConfig
from transformer_xl.data.feeding.lanes import Lanes
from transformer_xl.data.feeding.sentences import SentenceLanes
from transformer_xl.data.store import Store
from transformer_xl.devices import half_of
from transformer_xl.errors import CheckpointError, ConfigError, TransformerXLError
from transformer_xl.evaluation import Figures
from transformer_xl.model import AnyMemory, AnyModel, TransformerXL, build_model, parameter_count, reading_in
from transformer_xl.model.adapters import attach, merged, merged_in_place
from transformer_xl.model.memory import check_fits
from transformer_xl.training.chance import Chance
from transformer_xl.training.optimisation import Average, build_optimiser, kept_on
from transformer_xl.training.origin import Origin
from transformer_xl.training.ranks import ALONE, ASKED, Ranks, full
from transformer_xl.training.saved_state import checked_state, of_rank
from transformer_xl.training.stuck import Frequencies

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
END_TOLERANCE = 1e-6
"""Of a step, which the sum of many paces may miss the end by."""


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
    chance: Chance
    average: Average
    frequencies: Frequencies
    data: str
    """Whose text it is trained on: the store's fingerprint."""
    memories: list[AnyMemory | None]
    """One for each micro-batch of this rank."""
    origin: str | None = None
    """The fingerprint of the weights it began with, where they are another run's."""
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
    timetable: Timetable | None = None
    """Where `training.minutes` decides; kept by `clock`."""
    asks: Callable[[], Sequence[bool]] = field(default=lambda: [False] * len(ASKED))
    """What this rank asks all for (ranks.ASKED); asked at every step."""
    late: bool = False
    """What a step found is read when the next is queued: where a device computes, which would have to be waited for."""

    @property
    def position(self) -> float:
        """Where on the schedule the next update stands."""
        table = self.timetable
        return self.step if table is None else table.position + table.pace * (self.step - table.step)

    @property
    def over(self) -> bool:
        """Whether all steps are taken, or the time is over."""
        return self.position > self.config.training.steps - END_TOLERANCE

    @classmethod
    def fresh(
        cls,
        config: RunConfig,
        *,
        store: Store,
        device: torch.device,
        ranks: Ranks = ALONE,
        origin: Origin | None = None,
    ) -> "Session":
        count = parameter_count(config.model)
        way_out = "make model.d_model, model.d_inner or model.n_layer smaller"
        check_fits(count, like=torch.empty(0), what=f"a model of {count:,} weights", way_out=way_out)
        chance = Chance(config.training.seed, device=device)
        with chance:
            model = build_model(config.model).train()
            if origin is not None:
                model.load_state_dict(origin.weights)
            if origin is not None and origin.rank is not None:
                attach(model, rank=origin.rank)
        if ranks.parallel != "fsdp":  # which moves a layer at a time, for the whole may not fit
            model = model.to(device)
        model.recompute = config.training.checkpoint_activations
        if isinstance(model, TransformerXL) and model.ngrams is not None:
            # Exchanged gradients are dense, and of the optimisers one takes rows.
            model.ngrams.sparse_gradient = ranks.count == 1 and config.training.optimiser == "muon"
            # How many rows there are, a device would have to be asked.
            model.ngrams.sparse_gradient &= device.type == "cpu"
        # On a processor the kernels want float32.
        half = None if device.type == "cpu" else half_of(config.training.precision, device)
        numbers = config.training.accumulation + len(ASKED)
        wrapped = ranks.wrap(model, device=device, numbers=numbers, half=half)
        if not ranks.first:
            chance = Chance(ranks.seed(config.training.seed, step=0), device=device)
        return cls(
            config=config,
            device=device,
            ranks=ranks,
            model=model,
            wrapped=wrapped,
            optimiser=build_optimiser(model, config.training),
            scaler=GradScaler(device.type, enabled=config.training.precision == "float16"),
            lanes=lanes_of(config, store),
            chance=chance,
            average=Average(config.training),
            frequencies=Frequencies(store.split("train"), vocabulary=config.model.vocabulary),
            data=store.fingerprint(),
            memories=[None] * config.training.accumulation,
            origin=None if origin is None else origin.fingerprint,
            late=device.type != "cpu",
        )

    def weights_to_use(self, *, whole: bool = True) -> dict[str, Tensor]:
        """Whole on rank 0, with the help of all, or as each rank has them; an adapter's factors stand beside what they will be added to."""
        weights = {**self.model.state_dict(), **self.average.weights}
        return {name: self.ranks.whole(value) if whole else value for name, value in weights.items()}

    @contextmanager
    def model_to_use(self) -> Iterator[AnyModel]:
        """The model with the weights to use, on every rank; under fsdp a second one that is not sharded. An adapter is merged, because those who only
        read know none."""
        # As it is trained. A processor reads no float16, and rounds bfloat16 where it multiplies it.
        precision = self.config.training.precision
        half = None if (self.device.type, precision) == ("cpu", "float16") else half_of(precision, self.device)
        if self.ranks.parallel != "fsdp":
            with self.average.in_place(self.model), merged_in_place(self.model), reading_in(self.model, half):
                yield self.model
            return
        weights = {**self.model.state_dict(), **self.average.weights}
        with torch.device("meta"):
            model = build_model(self.config.model)
        model.load_state_dict(merged({name: full(value) for name, value in weights.items()}), assign=True)
        with reading_in(model, half):
            yield model

    def state(self, *, whole: bool = True) -> TrainingState:
        """Whole on rank 0, with the help of all, the same files whatever the number of ranks; or, of what the ranks share, as each has it."""

        def own_or_whole(value: Tensor) -> Tensor:
            return self.ranks.whole(value).contiguous() if whole else value

        tensors: dict[str, Tensor] = {}
        for kind, own in self.chance.states.items():
            for rank, state in enumerate(self.ranks.gather(own)):
                tensors[of_rank(kind, rank)] = state
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{key}.{name}"] = own_or_whole(value)
            # Then model.safetensors holds the averages, and the weights themselves stand here.
            if self.average.weights and parameter.requires_grad:
                tensors[f"weights.{name}"] = own_or_whole(parameter.detach())
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
            origin=self.origin,
            scaler=self.scaler.state_dict(),
            ranks=self.ranks.count,
            timetable=self.timetable,
        )
        return TrainingState(tensors=tensors, counters=counters)

    def restore(self, state: TrainingState, *, weights: Mapping[str, AnyTensor], folder: Path) -> None:
        """`weights` are those to use, as the model has them: averages, where there are any. `folder`: the checkpoint all this was read from."""
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
        own = {**weights, **saved.own_weights}
        self.model.load_state_dict({name: share(value, like=parameters.get(name)) for name, value in own.items()})
        averages = {name: share(weights[name], like=parameters[name]) for name in saved.own_weights}
        self.average.weights = {name: value.to(self.device) for name, value in averages.items()}
        self.average.count = counters.average_count
        for name, kept in saved.optimiser.items():
            parameter = parameters[name]
            self.optimiser.state[parameter] = {
                key: share(value, like=parameter).to(kept_on(key, kept, device=self.device))
                for key, value in kept.items()
            }
        self._take_memories(saved.memories)
        self.step, self.tokens, self.seconds = counters.step, counters.tokens, counters.seconds
        self.skipped, self.rate_scale, self.best_nats = counters.skipped, counters.rate_scale, counters.best_nats
        self.window, self.origin = counters.window, counters.origin
        if self.scaler.is_enabled() and counters.scaler:
            self.scaler.load_state_dict(counters.scaler)
        if same_ranks:
            self.chance.states = {kind: saved.random[of_rank(kind, self.ranks.rank)] for kind in self.chance.states}
        else:
            self.chance = Chance(self.ranks.seed(self.config.training.seed, step=self.step), device=self.device)

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
