"""One implementation in a process of its own: takes requests as JSON lines, works only while it is asked, answers with JSON lines.

    -> {"do": "open", ...}    a model from a folder in Hugging Face's layout, its memory filled with a text
    -> {"do": "check", ...}   what it computes for some more tokens, written to a file
    -> {"do": "run", ...}     so many steps against the clock
    -> {"do": "peaks", ...}   what the machine can do at best

Run by its path, for the interpreter of the Hugging Face implementation does not know this package: that implementation stands here, our own in `ours`,
which only our interpreter imports.
"""

import gc
import json
import os
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

PACKAGES = {"huggingface": ("transformers.models.transfo_xl.modeling_transfo_xl",)}
OUR_PACKAGES = ("transformer_xl.benchmarks.ours",)
"""Imported while all the processes start, that is at the same time."""
LEARNING_RATE, CLIP = 2.5e-4, 0.25
FILLED_AT_ONCE = 128
"""Tokens read together while the memory is filled, by those who make everything anew for each segment."""


class Implementation(Protocol):
    def fill(self, tokens_BT: Tensor) -> None:
        """Reads a text whose predictions nobody asks for."""

    def next(self, tokens_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Reads one token of every lane. Log-probabilities of the next, best first where only the best are asked for, and the tokens they belong to, [B, K]."""

    def score(self, tokens_BT: Tensor) -> Tensor:
        """Reads the tokens; the loss of each given all before it, [B, T]."""


class Segmentwise:
    """What Hugging Face's model and our own forward share: hidden states as memory, and a distribution over everything."""

    def __init__(self, *, top_k: int, segment: int) -> None:
        self.top_k, self.segment = top_k, segment
        self.before_BV: Tensor | None = None

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        raise NotImplementedError

    def log_probabilities(self, hidden_BTD: Tensor) -> Tensor:
        raise NotImplementedError

    def fill(self, tokens_BT: Tensor) -> None:
        for part_BT in parts(tokens_BT, FILLED_AT_ONCE):
            hidden_BTD = self.hidden(part_BT)
        self.before_BV = self.log_probabilities(hidden_BTD[:, -1:])[:, 0]

    def next(self, tokens_B1: Tensor) -> tuple[Tensor, Tensor]:
        log_probability_BV = self.log_probabilities(self.hidden(tokens_B1))[:, -1]
        return log_probability_BV.topk(self.top_k) if self.top_k else everything(log_probability_BV)

    def score(self, tokens_BT: Tensor) -> Tensor:
        losses = []
        for part_BT in parts(tokens_BT, self.segment):
            log_probability_BTV = self.log_probabilities(self.hidden(part_BT))
            assert self.before_BV is not None  # the memory has been filled
            predicted_BTV = torch.cat([self.before_BV[:, None], log_probability_BTV[:, :-1]], dim=1)
            losses.append(-predicted_BTV.gather(-1, part_BT[..., None])[..., 0])
            self.before_BV = log_probability_BTV[:, -1]
        return torch.cat(losses, dim=1)


class HuggingFace(Segmentwise):
    def __init__(self, folder: Path, *, top_k: int, segment: int) -> None:
        super().__init__(top_k=top_k, segment=segment)
        transformers = import_module("transformers")
        self.model = transformers.TransfoXLLMHeadModel.from_pretrained(folder).eval()
        self.mems: Any = None

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        output = self.model.transformer(tokens_BT, mems=self.mems)
        self.mems = output.mems
        return output.last_hidden_state  # type: ignore[no-any-return]

    def log_probabilities(self, hidden_BTD: Tensor) -> Tensor:
        return self.model.crit(hidden_BTD).view(*hidden_BTD.shape[:2], -1)  # type: ignore[no-any-return]


class Trainer:
    """One that trains: losses and gradients of a segment for checking, steps for timing."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
        self.memory: Any = None

    def losses(self, tokens_BT: Tensor) -> Tensor:
        """Without dropout: the loss of every token after the first given those before it."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        """Of whatever was last computed, by Hugging Face's names."""
        raise NotImplementedError

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Any]:
        """Losses of a segment that goes on from the memory, and the new memory."""
        raise NotImplementedError

    def step(self, tokens_BT: Tensor) -> None:
        """Forward, backward, clip, Adam; the memory is carried on."""
        self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        loss_BT, memory = self.forward(tokens_BT)
        torch.autograd.backward(loss_BT.mean())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimiser.step()
        self.memory = memory


class HuggingFaceTrainer(Trainer):
    def __init__(self, folder: Path, *, dropout: float) -> None:
        transformers = import_module("transformers")
        super().__init__(transformers.TransfoXLLMHeadModel.from_pretrained(folder, dropout=dropout))
        self.model.crit.keep_order = True  # or its losses come out by cluster

    def losses(self, tokens_BT: Tensor) -> Tensor:
        return cast(Tensor, self.model(tokens_BT, labels=tokens_BT).losses)

    def gradients(self) -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in self.model.named_parameters() if weight.grad is not None}

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Any]:
        output = self.model(tokens_BT, labels=tokens_BT, mems=self.memory)
        return output.losses, output.mems


def shifted(tokens_BT: Tensor) -> Tensor:
    """Each token's target is the next; the last has none, as in Hugging Face's loss."""
    return torch.cat([tokens_BT[:, 1:], torch.full_like(tokens_BT[:, :1], -1)], dim=1)


def build(name: str, folder: Path, *, lanes: int, top_k: int, segment: int) -> Implementation:
    if name == "huggingface":
        return HuggingFace(folder, top_k=top_k, segment=segment)
    from transformer_xl.benchmarks import ours

    return ours.build(name, folder, lanes=lanes, top_k=top_k, segment=segment)


def build_trainer(name: str, folder: Path, *, dropout: float) -> Trainer:
    if name == "huggingface":
        return HuggingFaceTrainer(folder, dropout=dropout)
    from transformer_xl.benchmarks.ours import OurTrainer

    return OurTrainer(folder, dropout=dropout, formula=name == "formula")


def parts(tokens_BT: Tensor, length: int) -> list[Tensor]:
    return [tokens_BT[:, start : start + length] for start in range(0, tokens_BT.shape[1], length)]


def everything(log_probability_BV: Tensor) -> tuple[Tensor, Tensor]:
    return log_probability_BV, torch.arange(log_probability_BV.shape[-1]).expand_as(log_probability_BV)


# --- what can be asked


class Worker:
    def __init__(self, name: str) -> None:
        self.name = name
        self.implementation: Implementation | None = None
        self.trainer: Trainer | None = None

    @torch.inference_mode()
    def open(
        self, *, folder: str, lanes: int, top_k: int, segment: int, vocabulary: int, text: list[int]
    ) -> dict[str, object]:
        self.implementation = None  # the one before goes first: its memory is not this one's
        gc.collect()
        self.lanes, self.segment, self.vocabulary = lanes, segment, vocabulary
        self.implementation = build(self.name, Path(folder), lanes=lanes, top_k=top_k, segment=segment)
        self.implementation.fill(torch.tensor([text]))
        self.token_B1 = torch.full((lanes, 1), text[-1])
        return {}

    def open_training(
        self, *, folder: str, lanes: int, segment: int, dropout: float, edges: list[int], shares: list[float]
    ) -> dict[str, object]:
        self.trainer = self.implementation = None
        gc.collect()
        self.lanes, self.segment = lanes, segment
        self.edges_C, self.shares_C = torch.tensor(edges), torch.tensor(shares, dtype=torch.float64)
        self.trainer = build_trainer(self.name, Path(folder), dropout=dropout)
        return {}

    def check_training(self, *, file: str, seed: int, precise: bool) -> dict[str, object]:
        """A segment's losses and their gradients, in a file; memory is what it is at a stream's start. `precise`: gradients in float64."""
        assert self.trainer is not None
        generator = torch.Generator().manual_seed(seed)
        tokens_BT = self._words(generator)
        model = self.trainer.model.eval()
        with torch.no_grad():
            found = {"losses": self.trainer.losses(tokens_BT).contiguous()}
        model.to(torch.float64 if precise else torch.float32)
        torch.autograd.backward(self.trainer.losses(tokens_BT).sum())
        # Tables that stand under several names are written once each.
        found |= {name: value.detach().clone() for name, value in self.trainer.gradients().items()}
        save_file(found, file)
        model.zero_grad(set_to_none=True)
        model.float()
        forget_peak_memory()
        return {}

    @torch.inference_mode()
    def check(self, *, mode: str, tokens: list[int], file: str) -> dict[str, object]:
        """The last lane's answer: all lanes were given the same."""
        implementation = self._opened()
        tokens_BT = torch.tensor([tokens]).expand(self.lanes, -1)
        if mode == "evaluation":
            found = {"values": implementation.score(tokens_BT)[-1]}
        else:
            steps = [implementation.next(tokens_BT[:, t : t + 1]) for t in range(len(tokens))]
            found = {
                "values": torch.stack([values_BK[-1] for values_BK, _ in steps]),
                "ids": torch.stack([ids_BK[-1] for _, ids_BK in steps]),
            }
        save_file({name: value.contiguous() for name, value in found.items()}, file)
        forget_peak_memory()
        return {}

    def run(self, *, mode: str, steps: int) -> dict[str, object]:
        return self._train(steps) if mode == "training" else self._read(mode, steps)

    @torch.inference_mode()
    def _read(self, mode: str, steps: int) -> dict[str, object]:
        implementation = self._opened()
        generator = torch.Generator().manual_seed(steps)
        text_BT = torch.randint(self.vocabulary, (self.lanes, steps * self.segment), generator=generator)

        def work() -> None:
            if mode == "evaluation":
                implementation.score(text_BT)
                return
            for _ in range(steps):
                values_BK, ids_BK = implementation.next(self.token_B1)
                self.token_B1 = ids_BK.gather(1, torch.multinomial(values_BK.exp(), 1, generator=generator))

        return against_the_clock(work, tokens=steps * self.lanes * (self.segment if mode == "evaluation" else 1))

    def _train(self, steps: int) -> dict[str, object]:
        assert self.trainer is not None
        generator, step = torch.Generator().manual_seed(steps), self.trainer.step
        text = [self._words(generator) for _ in range(steps)]
        return against_the_clock(lambda: list(map(step, text)), tokens=steps * self.lanes * self.segment)

    def _words(self, generator: torch.Generator) -> Tensor:
        """A segment with as many words of each cluster as real text has, so that a tail is opened for as many targets."""
        count = self.lanes * self.segment
        cluster_P = torch.multinomial(self.shares_C, count, replacement=True, generator=generator)
        low_P, high_P = self.edges_C[cluster_P], self.edges_C[cluster_P + 1]
        place_P = torch.rand(count, dtype=torch.float64, generator=generator)
        return (low_P + place_P * (high_P - low_P)).long().view(self.lanes, self.segment)

    def peaks(self, *, size: int, megabytes: int) -> dict[str, object]:
        """Best of several: multiply-adds of two large matrices, and reading a buffer far larger than any cache."""
        left, right = torch.randn(size, size), torch.randn(size, size)
        product = torch.empty(size, size)
        multiply = min(seconds_of(lambda: torch.mm(left, right, out=product)) for _ in range(8))
        buffer = torch.ones(megabytes * 1_000_000 // 4)
        read = min(seconds_of(buffer.sum) for _ in range(8))
        return {"flops_per_second": 2 * size**3 / multiply, "bytes_per_second": buffer.numel() * 4 / read}

    def close(self) -> dict[str, object]:
        self.implementation = self.trainer = None
        gc.collect()
        return {}

    def _opened(self) -> Implementation:
        assert self.implementation is not None
        return self.implementation


def against_the_clock(work: Any, *, tokens: int) -> dict[str, object]:
    cpu_before, seconds = time.process_time(), seconds_of(work)
    spent = {"seconds": seconds, "cpu_seconds": time.process_time() - cpu_before}
    return {"tokens": tokens, **spent, "memory_mb": memory_mb("VmRSS"), "peak_memory_mb": memory_mb("VmHWM")}


def seconds_of(work: Any) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def memory_mb(line: str) -> float:
    """VmRSS now, VmHWM at most; where the kernel has no such lines, the most there ever was for both, and 0 where nobody tells."""
    with suppress(OSError):
        for told in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if told.startswith(f"{line}:"):
                return int(told.split()[1]) / 1000
    if find_spec("resource") is None:  # Windows
        return 0.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def forget_peak_memory() -> None:
    """From here on the peak is that of working, not of loading. Only Linux can; elsewhere loading is counted."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def main() -> None:
    # Answers go where stdout was; whatever a library prints goes to stderr, and cannot be taken for one.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(int(sys.argv[2]))
    worker = Worker(sys.argv[1])
    for module in PACKAGES.get(worker.name, OUR_PACKAGES):
        import_module(module)
    print("{}", file=answers, flush=True)  # ready
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(worker, request.pop("do"))(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
