"""One model that learns beside ours, in a process of its own: trains by the clock, then is judged by the rule that holds for everybody.

    -> {"do": "learn", "entrant": "gpt2", "model": {...}, "feed": {...}, "rate": 0.002, "seconds": 240, ...}
    <- {"parameters": ..., "seconds": ..., "tokens": ..., "curve": [...], "valid": ..., "test": ...}

Run by its path, because the interpreter that has the other packages does not know this one. They stand in `PEERS`; our own recurrent models stand in
`recurrent_peers`, which only our interpreter imports.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WARM_UP_SHARE = 0.05
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.99), 0.1, 1.0
"""nanoGPT's for small batches of characters; its clip."""
WINDOWS_AT_ONCE = 32


class Peer(Protocol):
    model: nn.Module

    def loss(self, tokens_BT: Tensor, *, fresh: bool) -> Tensor:
        """Mean nats of the tokens after the first of each lane. `fresh`: this text does not go on where the last one ended."""

    def score(self, tokens_T: Tensor) -> float:
        """Sum of nats of the tokens after the first, each in full context."""


# --- peers


class GPT2:
    """transformers' GPT-2: learned positions in a fixed window, which nanoGPT has too."""

    def __init__(self, model: dict[str, Any], feed: dict[str, Any]) -> None:
        transformers = import_module("transformers")
        self.block = int(feed["segment"])
        config = transformers.GPT2Config(
            vocab_size=model["vocabulary"],
            n_positions=self.block,
            n_layer=model["layers"],
            n_embd=model["width"],
            n_head=model["heads"],
            n_inner=model["inner"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def loss(self, tokens_BT: Tensor, *, fresh: bool) -> Tensor:
        return F.cross_entropy(self.model(tokens_BT[:, :-1]).logits.flatten(0, 1), tokens_BT[:, 1:].flatten())

    def score(self, tokens_T: Tensor) -> float:
        """Windows half a window apart, of which the later half counts: at least half a window is seen. The first counts whole."""
        block, half = self.block, max(1, self.block // 2)
        last = len(tokens_T) - 1
        starts = [0, *range(half, last - block + half, half)]
        total = 0.0
        for first in range(0, len(starts), WINDOWS_AT_ONCE):
            some = starts[first : first + WINDOWS_AT_ONCE]
            ends = [min(start + block, last) for start in some]
            inputs_BT = torch.stack(
                [_padded(tokens_T[start:end], block) for start, end in zip(some, ends, strict=True)]
            )
            targets_BT = torch.stack(
                [_padded(tokens_T[start + 1 : end + 1], block) for start, end in zip(some, ends, strict=True)]
            )
            nats_BT = F.cross_entropy(self.model(inputs_BT).logits.transpose(1, 2), targets_BT, reduction="none")
            for row, (start, end) in enumerate(zip(some, ends, strict=True)):
                total += float(nats_BT[row, 0 if start == 0 else block - half : end - start].double().sum())
        return total


def _padded(tokens_T: Tensor, length: int) -> Tensor:
    """At the end, where padding is in nobody's past."""
    return F.pad(tokens_T, (0, length - len(tokens_T)))


class XTransformers:
    """x-transformers with Transformer-XL's recurrence and rotary positions, which its documentation asks for; the memory is carried on, or handed to its
    own wrapper that reads several segments for one step."""

    def __init__(self, model: dict[str, Any], feed: dict[str, Any]) -> None:
        x_transformers = import_module("x_transformers")
        self.segment, self.chunks = int(feed["segment"]), int(feed.get("chunks", 1))
        layers = x_transformers.Decoder(
            dim=model["width"],
            depth=model["layers"],
            heads=model["heads"],
            attn_dim_head=model["width"] // model["heads"],
            ff_mult=model["inner"] / model["width"],
            rotary_pos_emb=True,
            attn_flash=True,
            use_rmsnorm=True,
            ff_no_bias=True,
            shift_tokens=feed.get("shift", 0),
        )
        self.model = x_transformers.TransformerWrapper(
            num_tokens=model["vocabulary"],
            max_seq_len=self.segment,
            max_mem_len=feed["memory"],
            use_abs_pos_emb=False,
            attn_layers=layers,
        )
        self.wrapper = x_transformers.XLAutoregressiveWrapper(self.model)
        self.memory: list[Tensor] | None = None

    def loss(self, tokens_BT: Tensor, *, fresh: bool) -> Tensor:
        if self.chunks > 1:
            return self.wrapper(tokens_BT)  # type: ignore[no-any-return]
        logits_BTV, memory = self.model(
            tokens_BT[:, :-1], mems=None if fresh else self.memory, return_mems=True, detach_mems=True
        )
        self.memory = [layer_BMD.detach() for layer_BMD in memory]
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())

    def score(self, tokens_T: Tensor) -> float:
        memory, total = None, 0.0
        for start in range(0, len(tokens_T) - 1, self.segment):
            text_1T = tokens_T[None, start : start + self.segment + 1]
            logits_1TV, memory = self.model(text_1T[:, :-1], mems=memory, return_mems=True)
            total += float(F.cross_entropy(logits_1TV[0], text_1T[0, 1:], reduction="sum"))
        return total


PEERS: dict[str, type[Peer]] = {"gpt2": GPT2, "x-transformers": XTransformers}


def peer_of(entrant: str, *, model: dict[str, Any], feed: dict[str, Any]) -> Peer:
    if entrant in PEERS:
        return PEERS[entrant](model, feed)  # type: ignore[call-arg]
    recurrent = import_module("transformer_xl.benchmarks.learning.recurrent_peers")
    return recurrent.RecurrentPeer(model, feed)  # type: ignore[no-any-return]


# --- learning


class Feed:
    """Lanes at places drawn over the whole text. Each reads on for `stretch` segments, then all jump; with 1 these are nanoGPT's random windows."""

    def __init__(self, tokens: np.ndarray[Any, Any], *, lanes: int, length: int, stretch: int, seed: int) -> None:
        self.tokens, self.lanes, self.length, self.stretch = tokens, lanes, length, stretch
        self.random = np.random.default_rng(seed)
        self.served = 0
        if len(tokens) < length * stretch + 2:
            raise ValueError(
                f"{len(tokens):,} tokens of training text are too few for stretches of {length * stretch:,}"
            )

    def next(self) -> tuple[Tensor, bool]:
        """[B, T+1], and whether it begins anew."""
        fresh = self.served % self.stretch == 0
        if fresh:
            self.places_B = self.random.integers(0, len(self.tokens) - self.length * self.stretch, size=self.lanes)
        part_BT = self.tokens[self.places_B[:, None] + np.arange(self.length + 1)]
        self.places_B += self.length
        self.served += 1
        return torch.from_numpy(part_BT.astype(np.int64)), fresh


def rate_at(share: float, *, highest: float) -> float:
    """Warm-up, then a cosine that ends at zero exactly when the time does."""
    if share < WARM_UP_SHARE:
        return highest * share / WARM_UP_SHARE
    return highest * 0.5 * (1 + math.cos(math.pi * (share - WARM_UP_SHARE) / (1 - WARM_UP_SHARE)))


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def learn(request: dict[str, Any]) -> dict[str, Any]:
    processor_at = time.process_time()
    torch.manual_seed(request["seed"])
    feed, seconds, marks = request["feed"], request["seconds"], request["marks"]
    text = {name: np.fromfile(path, dtype=request["dtype"]) for name, path in request["files"].items()}
    peer = peer_of(request["entrant"], model=request["model"], feed=feed)
    length = feed["segment"] * feed.get("chunks", 1)
    lanes = Feed(text["train"], lanes=feed["lanes"], length=length, stretch=feed["stretch"], seed=request["seed"])
    optimiser = optimiser_of(peer.model)
    # Once beside the clock, with no step: kernels are compiled and buffers made.
    peer.loss(lanes.next()[0], fresh=True).backward()  # type: ignore[no-untyped-call]
    lanes.served = 0
    now = time.process_time if request["one_core"] else time.perf_counter
    elapsed, steps, learned = 0.0, 0, True
    curve: list[dict[str, float]] = []
    while learned and elapsed < seconds:
        started_at = now()
        for group in optimiser.param_groups:
            group["lr"] = rate_at(elapsed / seconds, highest=request["rate"])
        peer.model.train()
        optimiser.zero_grad(set_to_none=True)
        tokens_BT, fresh = lanes.next()
        loss = peer.loss(tokens_BT, fresh=fresh)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(peer.model.parameters(), CLIP)
        optimiser.step()
        learned = math.isfinite(float(loss))
        elapsed, steps = elapsed + now() - started_at, steps + 1
        # Judged beside the clock, and once at the end.
        if learned and elapsed * marks >= seconds * (len(curve) + 1):
            bits = bits_per_byte(peer, text["valid"], **request["valid"])
            curve.append({"minutes": elapsed / 60, "tokens": steps * feed["lanes"] * length, "valid": bits})
    judged = learned and request["test"] is not None
    return {
        "parameters": sum(weight.numel() for weight in peer.model.parameters()),
        "seconds": elapsed,
        "steps": steps,
        "tokens": steps * feed["lanes"] * length,
        "curve": curve,
        "valid": curve[-1]["valid"] if learned else None,
        "test": bits_per_byte(peer, text["test"], **request["test"]) if judged else None,
        "cpu_seconds": time.process_time() - processor_at,
    }


def bits_per_byte(peer: Peer, text: np.ndarray[Any, Any], *, tokens: int, bytes: int) -> float:
    """Of the first `tokens`, of which those after the first stand for so many bytes."""
    peer.model.eval()
    with torch.inference_mode():
        nats = peer.score(torch.from_numpy(text[:tokens].astype(np.int64)))
    return nats / math.log(2) / bytes


def answer_with(learn: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """One JSON line for each request, until there are no more. What else is printed goes to standard error."""
    torch.set_num_threads(int(sys.argv[2]))
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        assert request.pop("do") == "learn"
        print(json.dumps(learn(request)), file=answers, flush=True)


if __name__ == "__main__":
    answer_with(learn)
