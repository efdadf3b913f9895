"""Everything that changes while a model is trained, in one place, so that a stopped run can go on bit by bit as if it had not been stopped."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from transformer_xl.checkpoint import TrainingState
from transformer_xl.config import RunConfig
from transformer_xl.data.lanes import Lanes
from transformer_xl.data.sentences import SentenceLanes
from transformer_xl.data.store import Store
from transformer_xl.errors import CheckpointError
from transformer_xl.evaluation import Figures
from transformer_xl.model import AnyMemory, AnyModel, TransformerXL, build_model
from transformer_xl.training.optimisation import Average, build_optimiser


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A validation, and the step it was made at."""

    step: int
    figures: Figures


@dataclass
class Window:
    """What one line of metrics.jsonl sums up: the steps since the last."""

    nats: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    norm: float = 0.0


@dataclass(kw_only=True)
class Session:
    config: RunConfig
    device: torch.device
    model: AnyModel
    optimiser: Optimizer
    scaler: GradScaler
    lanes: Lanes | SentenceLanes
    average: Average
    memories: list[AnyMemory | None]
    """One for each micro-batch."""
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
    def fresh(cls, config: RunConfig, *, store: Store, device: torch.device) -> "Session":
        torch.manual_seed(config.training.seed)
        model = build_model(config.model).to(device)
        if isinstance(model, TransformerXL):
            model.recompute = config.training.checkpoint_activations
        return cls(
            config=config,
            device=device,
            model=model.train(),
            optimiser=build_optimiser(model, config.training),
            scaler=GradScaler(device.type, enabled=config.training.precision == "float16"),
            lanes=_lanes(config, store),
            average=Average(config.training),
            memories=[None] * config.training.accumulation,
        )

    def weights_to_use(self) -> dict[str, Tensor]:
        return {**self.model.state_dict(), **self.average.weights}

    def state(self) -> TrainingState:
        tensors: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{key}.{name}"] = value.contiguous()
            if self.average.weights:  # then model.safetensors holds the averages, and the weights themselves stand here
                tensors[f"weights.{name}"] = parameter.detach().contiguous()
        for part, memory in enumerate(self.memories):
            if memory is not None:
                tensors |= {f"memory.{part}.{name}": value for name, value in memory.tensors().items()}
        values: dict[str, Any] = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "rate_scale": self.rate_scale,
            "best_nats": self.best_nats,
            "average_count": self.average.count,
            "window": vars(self.window),
            "lanes": self.lanes.state(),
            "scaler": self.scaler.state_dict(),
        }
        return TrainingState(tensors=tensors, values=values)

    def restore(self, state: TrainingState, *, weights: dict[str, Tensor]) -> None:
        """`weights` are those of model.safetensors: the averages, where there are any."""
        values, tensors = state.values, state.tensors
        try:
            own = {
                name.removeprefix("weights."): value for name, value in tensors.items() if name.startswith("weights.")
            }
            self.model.load_state_dict(own or weights)
            self.average.weights = {name: value.to(self.device) for name, value in weights.items()} if own else {}
            self.average.count = values["average_count"]
            for name, parameter in self.model.named_parameters():
                self.optimiser.state[parameter] = {
                    key.split(".")[1]: value.to(self.device)
                    for key, value in tensors.items()
                    if key.startswith("optimiser.") and key.split(".", 2)[2] == name
                }
            for part in range(len(self.memories)):
                prefix = f"memory.{part}."
                saved = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
                self.memories[part] = self.model.memory_kind.from_tensors(saved).to(self.device) if saved else None
            self.step, self.tokens, self.seconds = values["step"], values["tokens"], values["seconds"]
            self.skipped, self.rate_scale, self.best_nats = values["skipped"], values["rate_scale"], values["best_nats"]
            self.window = Window(**values["window"])
            if values["lanes"] is not None:  # an imported run begins the data anew
                self.lanes.restore(values["lanes"])
            if self.scaler.is_enabled():
                self.scaler.load_state_dict(values["scaler"])
            torch.set_rng_state(tensors["random.cpu"])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"the training state does not fit this configuration ({error}); start a new run"
            ) from None


def _lanes(config: RunConfig, store: Store) -> Lanes | SentenceLanes:
    training = config.training
    reader = Lanes if store.manifest.sentence_mark is None else SentenceLanes
    return reader(
        store.split("train"),
        lanes=training.lanes,
        segment=training.segment,
        context=training.context,
        variable=training.variable_segments,
        seed=training.seed,
    )
