"""A model's figure at an attention length: how many keys the predicting token sees, itself among them.

relative, shaw       memory of that length, every token seeing as many (also where the model was trained without: the weights allow it)
absolute, per_layer  windows of that length, the last half scored, as half loss trains them
both, beside it      a window for each token, as Section 3.1 has it, for those that were trained without memory

    window 0   s s s s            s scored, w fed again; the first window has nothing before it and is scored whole
    window 1       w w s s
    window 2           w w s s
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from transformer_xl.config import EvaluationConfig, RunConfig
from transformer_xl.config.model import ENCODINGS_WITHOUT_MEMORY
from transformer_xl.console import Advance
from transformer_xl.data.store import Split
from transformer_xl.errors import DataError
from transformer_xl.evaluation import Rule, figures, make_rule
from transformer_xl.evaluation.scoring import Losses, score_split
from transformer_xl.model import TransformerXL
from transformer_xl.studies.intervals import block_means
from transformer_xl.studies.models import transformer

SWEEP = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
"""Attention lengths of a sweep, over the segment length of the base."""
FED_AT_ONCE = 1 << 14
SAME = {"perplexity_per_word": 0.01, "bits_per_character": 0.001, "bits_per_byte": 0.001}
"""Figures closer than this are the same figure: what is printed of them."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One figure: at which attention length, and by which rule."""

    attention: int
    clamp: int = 0
    """Distances beyond this one look like it; 0: none do."""
    value: float
    """In the corpus's own unit."""
    loss_nats: float
    blocks: Sequence[float]
    """Mean nats of each block of the text."""
    tokens: int
    seconds: float
    rule: str

    @property
    def length(self) -> str:
        return f"{self.attention:,}" + f" clamped at {self.clamp:,}" * bool(self.clamp)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def has_windows(config: RunConfig) -> bool:
    return transformer(config).encoding in ENCODINGS_WITHOUT_MEMORY


def fed_at_once(config: RunConfig) -> int:
    return config.training.context + config.training.segment


def trained_attention(config: RunConfig) -> int:
    """The most keys that a token saw in training."""
    return config.model.memory + fed_at_once(config)


def sweep_lengths(config: RunConfig, *, segment: int) -> list[int]:
    """Multiples of the base's segment, and the model's own; a table of learned positions has no more than its rows."""
    lengths = {max(2, round(segment * share)) for share in SWEEP} | {fed_at_once(config), trained_attention(config)}
    model = transformer(config)
    limit = model.learned_positions if model.encoding == "per_layer" else max(lengths)
    return sorted(length for length in lengths if length <= limit)


def as_trained(model: TransformerXL, split: Split, *, config: RunConfig, unit: str, advance: Advance) -> Point:
    """With the attention of training: segments and memory of training, or where it had no memory the length of a segment."""
    if not config.model.memory:
        return at_attention(model, split, attention=fed_at_once(config), unit=unit, advance=advance)
    rule = make_rule(model, config.evaluation, tokens=len(split))
    told = _Told(split, unit, attention=trained_attention(config), rule=rule)
    return told.point(score_split(model, split, rule=rule, advance=advance), rule.sentence())


def at_attention(
    model: TransformerXL, split: Split, *, attention: int, clamp: int = 0, unit: str, advance: Advance
) -> Point:
    if model.config.encoding in ENCODINGS_WITHOUT_MEMORY:
        told = _Told(split, unit, attention=attention, rule=_windows_of(attention))
        losses = window_losses(model, split, window=attention, advance=advance)
        words = f"windows: every token after the first scored once, in the last half of a window of {attention} tokens; no memory"
        return told.point(losses, words)
    lengths = EvaluationConfig(segment=attention, memory=attention, clamp_len=clamp, same_length=True)
    rule = make_rule(model, lengths, tokens=len(split))
    told = _Told(split, unit, attention=attention, clamp=clamp, rule=rule)
    words = f"exact: every token after the first scored once in full context; memory {attention}, every token seeing as many"
    words += f", distances clamped at {clamp}" * bool(clamp)
    return told.point(score_split(model, split, rule=rule, advance=advance), words)


def in_windows(model: TransformerXL, split: Split, *, attention: int, unit: str, advance: Advance) -> Point:
    """A window for each token, which is its last: the same keys for every token, and as many times the work as a window has tokens."""
    told = _Told(split, unit, attention=attention, rule=_windows_of(attention))
    words = f"sliding: every token after the first scored once, at the end of a window of {attention} tokens of its own; no memory"
    return told.point(score_split(model, split, rule=told.rule, advance=advance), words)


def _windows_of(attention: int) -> Rule:
    return Rule(name="sliding", segment=attention, memory=0, clamp_len=0, same_length=False, lanes=1)


class _Told:
    """A figure under way: begins with the clock."""

    def __init__(self, split: Split, unit: str, *, attention: int, rule: Rule, clamp: int = 0) -> None:
        self.split, self.unit, self.attention, self.rule, self.clamp = split, unit, attention, rule, clamp
        self.started_at = time.perf_counter()

    def point(self, losses: Losses, words: str) -> Point:
        found = figures(losses, split=self.split, rule=self.rule, seconds=time.perf_counter() - self.started_at)
        return Point(
            attention=self.attention,
            clamp=self.clamp,
            value=found.value(self.unit),
            blocks=block_means(losses),
            rule=words,
            **{name: getattr(found, name) for name in ("loss_nats", "tokens", "seconds")},
        )


def best_point(points: Sequence[Point], *, unit: str) -> Point:
    """The shortest attention length that attains the best figure, as far as it is printed."""
    best = min(point.value for point in points)
    same = (point for point in points if point.value < best + SAME[unit])
    return min(same, key=lambda point: (point.attention, point.clamp))


@torch.inference_mode()
def window_losses(model: TransformerXL, split: Split, *, window: int, advance: Advance) -> Losses:
    """Each token's loss at its place in the split, NaN for the first; all of the first window is scored, and half of every other."""
    if len(split) < 2:
        raise DataError(f"{split.name} has {len(split)} tokens: there is nothing to predict")
    device = model.vocabulary.bias_V.device
    tokens = torch.from_numpy(np.asarray(split.tokens, dtype=np.int64)).to(device)
    losses = np.full(len(split), np.nan, dtype=np.float32)
    last, half = len(tokens) - 1, max(1, window // 2)
    done = min(window, last)
    first = model(tokens[None, :done], targets_BT=tokens[None, 1 : done + 1]).loss_BT
    losses[1 : done + 1] = first[0].float().cpu().numpy()
    advance(done)
    while done < last:
        scored = min(half, last - done)
        rows = max(1, min(FED_AT_ONCE // window, (last - done) // scored))
        ends = done + scored * torch.arange(1, rows + 1, device=device)
        fed_BT = tokens[(ends[:, None] + torch.arange(-window, 0, device=device))]
        target_BT = tokens[ends[:, None] + torch.arange(1 - scored, 1, device=device)]
        loss_BT = model(fed_BT, targets_BT=target_BT).loss_BT
        losses[done + 1 : done + 1 + rows * scored] = loss_BT.float().cpu().numpy().reshape(-1)
        done += rows * scored
        advance(rows * scored)
    if split.sentence_mark is not None:  # as everywhere: the pair of marks between two sentences is not scored
        marks = np.asarray(split.tokens) == split.sentence_mark
        losses[1:][marks[1:] & marks[:-1]] = np.nan
    return losses
