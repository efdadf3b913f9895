"""Training on more than one device: who this process is among the others, and how they exchange what must be the same everywhere.

Every rank owns consecutive lanes and their memory, and has the whole model (ddp) or its share of every tensor (fsdp):

    rank 0   lanes 0 1 2 3   micro-batches 0 1 | 2 3      gradients are exchanged after the last micro-batch;
    rank 1   lanes 4 5 6 7   micro-batches 4 5 | 6 7      what is written, rank 0 writes

One process is the case of one rank: everything here is then a no-op, and nothing is imported for it.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from transformer_xl.checkpoint.shards import AnyTensor, Pieces, row_counts
from transformer_xl.config import RunConfig
from transformer_xl.console import be_quiet
from transformer_xl.errors import ConfigError, TransformerXLError
from transformer_xl.model import AnyMemory, AnyModel, Output

Parallel = Literal["ddp", "fsdp"]
Value = TypeVar("Value")

LONGEST_WAIT = timedelta(days=1)
"""The others wait while rank 0 validates. A rank that died is not waited for: its connections close, and torchrun stops the others."""
POLLING_SECONDS = 0.01
ASKED = ("interrupt", "terminate", "save", "end")
"""What a rank may ask all to do after a step: it is told with the gradients."""


class RankLost(TransformerXLError):
    """Another process of this run is gone."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    rank: int = 0
    count: int = 1
    parallel: Parallel | None = None
    """None where there is only one."""

    @property
    def first(self) -> bool:
        """Whether this is the one that talks and writes."""
        return self.rank == 0

    # --- what is this rank's

    def device(self, chosen: torch.device) -> torch.device:
        """Each rank of a machine takes a GPU of its own."""
        if self.count > 1 and chosen.type == "cuda":
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return chosen

    def rows(self, lanes: int) -> np.ndarray:
        share = lanes // self.count
        return np.arange(self.rank * share, (self.rank + 1) * share)

    def share_of(self, lanes: int) -> range:
        """This rank's of any number of lanes, of which some ranks may have one more, or none."""
        return range(lanes * self.rank // self.count, lanes * (self.rank + 1) // self.count)

    def seed(self, seed: int, *, step: int) -> int:
        """Each rank draws its own dropout, from `step` on, unlike any other rank's."""
        return int(np.random.SeedSequence([seed, self.rank, step]).generate_state(1)[0])

    def check(self, config: RunConfig) -> None:
        training, parts = config.training, self.count * config.training.accumulation
        if training.lanes % parts:
            raise ConfigError(
                f"training.lanes: {training.lanes} lanes cannot be dealt to {self.count} ranks in {training.accumulation}"
                f" micro-batches each; make it a multiple of {parts}"
            )
        if training.shards and self.parallel != "fsdp":
            raise ConfigError(
                "training.shards: true is for `parallel=fsdp`, where each rank has a share of every weight; set it to false"
            )
        if self.parallel == "fsdp" and config.model.recurrent:
            raise ConfigError(
                "`parallel=fsdp` shards the layers of a Transformer-XL; train a recurrent model with `parallel=ddp`"
            )

    # --- the model

    def wrap(
        self, model: AnyModel, *, device: torch.device, numbers: int, half: torch.dtype | None = None
    ) -> nn.Module:
        """What to call instead of `model`, whose gradients are then the mean over the ranks; so many `numbers` travel with them (`carried`). fsdp also
        shards `model` itself, and layers are then gathered in `half`, in which they multiply; their gradients are added up in float32. Embeddings and
        positions travel as they are."""
        if self.count == 1:
            return model
        model.vocabulary.every_tail = True  # a rank without a target in some tail must still take part in its exchange
        if self.parallel == "ddp":
            return self._replicate(model, device=device, numbers=numbers)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # What goes in stays float32: the sum that layers add to.
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh(device.type, (self.count,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy if half is not None else MixedPrecisionPolicy())
        fully_shard(model, mesh=mesh)
        # The losses leave as a view, and FSDP2 warns that nobody may change one in place; nobody does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        return model

    def _replicate(self, model: AnyModel, *, device: torch.device, numbers: int) -> nn.Module:
        # Al-Rfou's classifier of the token after next has nothing to do in a segment of one token.
        unused = bool(model.auxiliary_classifiers)
        carrying = Carrying(model, numbers=numbers)
        wrapped = DistributedDataParallel(carrying, find_unused_parameters=unused)
        # DDP lays out its buckets anew after its first backward pass, which changes the order in which three or more ranks are added. Done
        # here, with nothing to learn, so that the first step after resuming adds in the order of a step in the middle.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            nothing_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
            output = self.forward(wrapped, nothing_11, targets_BT=nothing_11)
            assert output.loss_BT is not None
            torch.autograd.backward(output.loss_BT.sum() + self.carrier(wrapped, carrying.numbers.detach()))
        carrying.zero_grad(set_to_none=True)
        return wrapped

    def forward(self, wrapped: nn.Module, tokens_BT: Tensor, **more: Any) -> Output[AnyMemory]:
        """What the model gives, called through what `wrap` made of it."""
        found: Any = wrapped(tokens_BT, **more)
        output: Output[AnyMemory] = found[0] if isinstance(wrapped, DistributedDataParallel) else found
        return output

    def exchange_gradients(self, wrapped: nn.Module, *, now: bool) -> None:
        """Whether the next backward pass exchanges gradients, or only adds them up here."""
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.require_backward_grad_sync = now
        elif self.parallel == "fsdp":
            wrapped.set_requires_gradient_sync(now)  # type: ignore[operator]

    def carrier(self, wrapped: nn.Module, numbers: Tensor) -> Tensor | float:
        """To be added to an objective: 0, and whose backward pass takes `numbers` along with the gradients."""
        if not isinstance(wrapped, DistributedDataParallel):
            return 0.0
        carrying = wrapped.module
        assert isinstance(carrying, Carrying)
        carrying.numbers.grad = None
        return (carrying.entered * numbers.to(carrying.numbers.dtype)).sum()

    def carried(self, wrapped: nn.Module, numbers: Tensor) -> Tensor:
        """`numbers` summed over the ranks, after the backward pass that took them along; fsdp, whose gradients travel in parts, sends them by themselves."""
        if self.count == 1:
            return numbers
        if isinstance(wrapped, DistributedDataParallel):
            found = wrapped.module.numbers.grad
            assert isinstance(found, Tensor)
            return found * self.count
        dist.all_reduce(numbers)
        return numbers

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a sharded tensor on rank 0; every rank must ask, and the others keep nothing."""
        if self.parallel != "fsdp":
            return tensor
        everything = full(tensor)
        return everything.cpu() if self.first else torch.empty(0)

    def share(self, value: AnyTensor, *, like: Tensor | None) -> Tensor:
        """What this rank holds of `value`, if it is sharded as `like`."""
        if isinstance(value, Pieces):
            return value.whole() if like is None or not hasattr(like, "full_tensor") else rows_as(value, like=like)
        if self.parallel != "fsdp" or like is None or value.dim() == 0:
            return value
        return sharded(value.to(like.device), like=like)

    # --- what the ranks tell each other

    def total(self, *values: float) -> list[float]:
        if self.count == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.tolist()

    def highest(self, *values: int) -> list[int]:
        """Of each value, the highest that any rank has."""
        if self.count == 1:
            return list(values)
        found = torch.tensor(values)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What rank 0 makes, for all."""
        if self.count == 1:
            return make()
        made: list[Value | None] = [make() if self.first else None]
        dist.broadcast_object_list(made, src=0, device=torch.device("cpu"))
        return made[0]  # type: ignore[return-value]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """On rank 0 those of all ranks, which have one shape; the others get back their own."""
        if self.count == 1:
            return [tensor]
        if not tensor.numel():
            return [tensor] * self.count
        octets = tensor.cpu().contiguous().view(torch.uint8)  # bytes travel whatever the type is
        parts = [torch.empty_like(octets) for _ in range(self.count)] if self.first else None
        dist.gather(octets, parts)
        return [tensor] if parts is None else [part.view(tensor.dtype) for part in parts]


class Carrying(nn.Module):
    """A model beside which a few numbers are a parameter. Their gradient is what each rank multiplies them with, so the exchange of gradients adds those up:
    what the ranks tell each other at every step needs no exchange of its own."""

    def __init__(self, model: AnyModel, *, numbers: int) -> None:
        super().__init__()
        self.model = model
        self.numbers = nn.Parameter(model.vocabulary.bias_V.new_zeros(numbers))
        self.entered = self.numbers.detach()

    def forward(self, *arguments: Any, **more: Any) -> tuple[Output[AnyMemory], Tensor]:
        self.entered = self.numbers * 1
        return self.model(*arguments, **more), self.entered  # what is not given out, DDP takes for unused


ALONE = Ranks()


def full(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, whole, on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded(value: Tensor, *, like: Tensor) -> Tensor:
    """A whole tensor as `like` is: this rank's shard of it where that is a shard."""
    if not hasattr(like, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def rows_as(value: Pieces, *, like: Tensor) -> Tensor:
    """This rank's rows of what stands in several files, sharded as `like`; no others are read."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    counts = row_counts(value.shape[0], mesh.size())
    first = sum(counts[: mesh.get_local_rank()])
    own = value.rows(first, first + counts[mesh.get_local_rank()]).to(like.device)
    whole = torch.empty(value.shape, device="meta")
    return DTensor.from_local(own, mesh, like.placements, shape=whole.shape, stride=whole.stride())


@contextmanager
def joined(*, parallel: Parallel, device: str) -> Iterator[Ranks]:
    """Joins the processes that torchrun started. An error ends them all, and only the first to have one reports it."""
    if int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    shared, rank, count = next(iter(rendezvous("env://", timeout=LONGEST_WAIT)))
    store = only_this_attempt(shared, rank=rank, count=count)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=LONGEST_WAIT)
    ranks = Ranks(rank=rank, count=count, parallel=parallel)
    if not ranks.first:
        be_quiet()
    try:
        if device == "cuda":
            torch.cuda.set_device(ranks.device(torch.device(device)))
        elif device != "cpu":
            raise ConfigError(f"`device=` {device} is one device, and each rank takes its own; give cpu or cuda")
        yield ranks
        ranks.highest(0)  # all leave together: torchrun stops the others once one has left with a signal's code
    except Exception as error:
        if not _first_to_speak(store):
            raise SystemExit(2) from None
        if _is_lost_connection(error):
            raise RankLost(
                "another rank is gone, so this one stops too; the same command goes on from the newest checkpoint"
                " (torchrun --max-restarts N does so by itself)"
            ) from None
        raise
    dist.destroy_process_group()


def only_this_attempt(store: Store, *, rank: int, count: int) -> Store:
    """torchrun keeps one store through its restarts, and addresses that a dead attempt left in it would be taken for the living's: ranks then wait
    for each other for ever. So rank 0 names the attempt, each other rank answers with a name of its own, and is told that it was heard."""
    mine = uuid4().hex
    if rank == 0:
        store.set("attempt", mine)
        for other in range(1, count):
            while not (answer := store.get(f"answer of {other}").decode()).startswith(mine):
                time.sleep(POLLING_SECONDS)
            store.set(f"heard from {other}", answer)
        return PrefixStore(mine, store)
    while True:
        attempt = store.get("attempt").decode()
        store.set(f"answer of {rank}", attempt + mine)
        heard = f"heard from {rank}"
        if store.check([heard]) and store.get(heard).decode() == attempt + mine:
            return PrefixStore(attempt, store)
        time.sleep(POLLING_SECONDS)


def _first_to_speak(store: Any) -> bool:
    try:
        return bool(store.add("spoken", 1) == 1)
    except RuntimeError:  # whoever kept the store is gone, and has said why
        return False


def _is_lost_connection(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
