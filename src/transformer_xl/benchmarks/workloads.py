"""What is timed: shapes, lengths, who takes part, and how much work it is at the very least. No torch, no clock."""

from dataclasses import dataclass, replace
from typing import Literal

from transformer_xl.config import ModelConfig
from transformer_xl.errors import ConfigError
from transformer_xl.presets import find_preset

Kind = Literal["generation", "evaluation", "sliding", "training"]
Scale = Literal["full", "tiny"]
MANY_LANES = 16
CLUSTER_SHARES = (0.936, 0.030, 0.032, 0.002)
"""How many of WikiText-103's training tokens are in the head and in each tail of the paper's adaptive softmax."""
SHORT_MEMORY = {"full": 128, "tiny": 6}
PAPER_RATIOS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""How many times slower than memory the paper finds the sliding window at each attention length (Table 9)."""
TAILS_SHUT, TAILS_OPEN = -20.0, 10.0
"""Bias of the logit of each tail: no word of a tail can be among the best; or each tail is so likely that it must be looked into."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    kind: Kind
    config: ModelConfig
    segment: int = 1
    """Tokens of a step."""
    top_k: int = 0
    """Sample from so many of the likeliest; 0: from all."""
    tail_bias: float | None = None
    many_lanes: bool = False
    """Also with many lanes at once, ours alone."""
    batch: int = 1
    """Lanes of a training step."""
    paper_ratio: int | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least a step of a workload must do. Whoever does more is further from the limit, whatever the reason."""

    flops: float
    bytes: float


FORMULAS = (
    "per token 2 [N (4 D HK + 2 D F + 2 M HK + min(clamp, M) HK) + output] operations",
    "per step 4 [N (4 D HK + 2 D F + lanes 2 M HK + min(clamp, M) HK) + output] bytes (weights, keys and values, relative keys; int8: weights 1 byte)",
    "output D V, or D (head + tails) while the tails are shut",
    "window of W tokens: the same for W tokens with (W + 1)/2 keys each, one query in the last layer",
    "training step of B lanes of T: 6 [N (2 B T D HK + 2 B S D HK + S D HK + 2 B T D F + 3 B T S HK) + B T output], S = M + T, output D (head + tails); words are drawn as WikiText-103's fall into the clusters: 93.6, 3.0, 3.2, 0.2 %",
    "the limit of a step is the longer of operations / matrix-multiply peak and bytes / memory-read peak",
)


def work_of_step(workload: Workload, *, lanes: int, weight_bytes: int) -> Work:
    config = workload.config
    keys, tokens = config.memory, lanes * workload.segment
    matrices = config.n_layer * _layer_matrices(config)
    per_key = config.n_layer * config.n_head * config.d_head
    told_apart = min(config.clamp_len or keys, keys)
    output = _output(workload)
    return Work(
        flops=2 * tokens * (matrices + per_key * (2 * keys + told_apart) + output),
        bytes=weight_bytes * (matrices + output) + 4 * per_key * (lanes * 2 * keys + told_apart),
    )


def work_of_training(workload: Workload) -> Work:
    """Forward, and twice as much backward; parameters read, their gradients written, and Adam's three numbers of each read and written."""
    config, B, T = workload.config, workload.batch, workload.segment
    D, HK, F, S = config.d_model, config.n_head * config.d_head, config.d_inner, config.memory + workload.segment
    layer = 2 * B * T * D * HK + 2 * B * S * D * HK + S * D * HK + 2 * B * T * D * F + 3 * B * T * S * HK
    tails = len(config.cutoffs)
    edges, shares = config.cluster_edges, CLUSTER_SHARES[: config.clusters]
    in_tails = sum(shares[i] * (edges[i + 1] - edges[i]) for i in range(1, tails + 1))
    head = edges[1] + tails + in_tails
    parameters = config.n_layer * (_layer_matrices(config) + D * HK) + D * config.vocabulary
    return Work(flops=6 * (config.n_layer * layer + B * T * D * head), bytes=4 * 8 * parameters)


def work_of_window(workload: Workload) -> Work:
    """One token from a window as long as the workload's memory."""
    config, W = workload.config, workload.config.memory
    width = config.n_head * config.d_head
    clamp = min(config.clamp_len or W, W)
    pairs, pairs_told_apart = W * (W + 1) / 2, clamp * (clamp + 1) / 2 + (W - clamp) * clamp
    lower = W * _layer_matrices(config) + width * (2 * pairs + pairs_told_apart)
    keys_and_values = 2 * config.d_model * width
    last = (W - 1) * keys_and_values + _layer_matrices(config) + width * (2 * W + clamp)
    return Work(
        flops=2 * ((config.n_layer - 1) * lower + last + _output(workload)),
        bytes=4 * (config.n_layer * _layer_matrices(config) + _output(workload)),
    )


def _layer_matrices(config: ModelConfig) -> int:
    return 4 * config.d_model * config.n_head * config.d_head + 2 * config.d_model * config.d_inner


def _output(workload: Workload) -> int:
    config = workload.config
    shut = workload.tail_bias == TAILS_SHUT
    return config.d_model * (config.cutoffs[0] + len(config.cutoffs) if shut else config.vocabulary)


def workloads_of(kind: Kind, *, scale: Scale, preset: str | None = None) -> list[Workload]:
    """Those of one word of the command. Tiny ones have the same rows and say nothing about speed."""
    characters = _ready("enwik8-12l", memory=2100, clamp_len=820)
    words = _ready("wikitext-103-standard", memory=640, clamp_len=400)
    titles, segment = {"enwik8": "41M enwik8", "words": "151M wikitext-103"}, 128
    lengths = list(PAPER_RATIOS)
    evaluated = [2100, 3800]
    if scale == "tiny":
        tiny = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "init_std": 0.2}
        characters = replace(characters, **tiny, memory=24, clamp_len=10)  # type: ignore[arg-type]
        words = replace(words, **tiny, vocabulary=300, cutoffs=(60, 120, 200), memory=16, clamp_len=8)  # type: ignore[arg-type]
        titles, segment = {"enwik8": "tiny characters", "words": "tiny words"}, 8
        lengths, evaluated = [18, 38], [21, 38]
    match kind:
        case "generation":
            title = f"generate {titles['enwik8']} memory"
            plain = Workload(name=f"{title} {characters.memory}", kind=kind, config=characters, many_lanes=True)
            # With a long memory most of the bytes are each lane's own keys and values; with a short one lanes share most of what is read.
            short = replace(plain, config=replace(characters, memory=SHORT_MEMORY[scale]))
            short = replace(short, name=f"{title} {short.config.memory}")
            title = f"generate {titles['words']} memory {words.memory} top-40"
            shut = Workload(
                name=f"{title}, tails shut", kind=kind, config=words, top_k=40, tail_bias=TAILS_SHUT, many_lanes=True
            )
            opened = replace(shut, name=f"{title}, tails open", tail_bias=TAILS_OPEN, many_lanes=False)
            return [plain, short, shut, opened]
        case "evaluation":
            return [
                Workload(
                    name=f"evaluate {titles['enwik8']} segment {segment} memory {memory}",
                    kind=kind,
                    config=replace(characters, memory=memory),
                    segment=segment,
                )
                for memory in evaluated
            ]
        case "sliding":
            return [
                Workload(
                    name=f"sliding {titles['enwik8']} attention {length}",
                    kind=kind,
                    config=replace(characters, memory=length),
                    paper_ratio=PAPER_RATIOS.get(length),
                    segment=segment,
                )
                for length in lengths
            ]
        case "training":
            if preset is not None:
                run = find_preset(preset).run
                if not isinstance(run.model, ModelConfig):
                    raise ConfigError(f"preset {preset} is no Transformer-XL; bench training compares those")
                name = f"train {preset} segment {run.training.segment} memory {run.model.memory} batch {run.training.lanes}"
                model = replace(run.model, initial_memory="zeros")
                segment, batch = run.training.segment, run.training.lanes
                return [Workload(name=name, kind=kind, config=model, segment=segment, batch=batch)]
            if scale == "tiny":
                return [
                    _trained(config, name=f"train tiny {config.vocabulary} words", segment=8)
                    for config in (characters, words)
                ]
            words = replace(words, init_std=0.02)
            return [
                _trained(
                    SMALL_CHARACTERS, name="train 5M characters segment 128 memory 128 batch 8", segment=128, batch=8
                ),
                _trained(words, name="train 151M wikitext-103 segment 150 memory 150 batch 2", segment=150),
            ]


SMALL_CHARACTERS = ModelConfig(
    vocabulary=204, n_layer=6, d_model=256, n_head=8, d_head=32, d_inner=1024, initial_memory="zeros"
)
"""The character model that earlier implementations were timed on."""


def _trained(config: ModelConfig, *, name: str, segment: int, batch: int = 2) -> Workload:
    config = replace(config, memory=segment, clamp_len=0, same_length=False, dropout=0.1)
    return Workload(name=name, kind="training", config=config, segment=segment, batch=batch)


def _ready(preset: str, *, memory: int, clamp_len: int) -> ModelConfig:
    """For inference, under the convention that Hugging Face computes; weights so large that attention has a pattern to get wrong."""
    config = find_preset(preset).run.model
    assert isinstance(config, ModelConfig)
    config = replace(config, same_length=True, initial_memory="zeros", init_std=0.05, dropout=0.0)
    return replace(config, memory=memory, clamp_len=clamp_len)
