"""How a figure is made: which tokens are scored, and what each of them may see. Every figure carries its rule."""

import math
from dataclasses import dataclass
from typing import Literal

from transformer_xl.config import ModelConfig, RecurrentConfig
from transformer_xl.inference.cache import kept_bytes
from transformer_xl.inference.weights import WeightKind

RuleName = Literal["exact", "paper", "sliding"]
PAPER_LANES = 10
MOST_LANES = 16
WARM_UP_SHARE = 0.1
"""Lanes are added only as long as warming them up costs no more than this share of the tokens."""
KEPT_BYTES = 1 << 30
"""And only as long as their kept keys and values take no more than this."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: RuleName
    segment: int
    memory: int
    clamp_len: int
    same_length: bool
    lanes: int
    score_boundaries: bool = False
    """For corpora made of sentences: whether the pair of marks between two sentences is scored, which makes figures look better."""
    weights: WeightKind = "exact"
    recurrent: bool = False
    """A state is carried from token to token, however the text is cut."""

    def sentence(self) -> str:
        seen = f"segments of {self.segment} with memory {self.memory}"
        if self.recurrent:
            seen = "the state carried from token to token"
        if self.clamp_len:
            seen += f", distances clamped at {self.clamp_len}"
        if self.same_length:
            seen += ", every token seeing as many"
        if self.score_boundaries:
            seen += ", the pair of marks between sentences scored too"
        if self.weights == "int8":
            seen += ", weights rounded to int8"
        match self.name:
            case "exact":
                return f"exact: every token after the first scored once in full context; {seen}"
            case "paper":
                return f"paper: {self.lanes} columns each starting cold, the remainder dropped; {seen}"
            case "sliding":
                return f"sliding: a full window of {self.segment} tokens for each predicted token, no memory"


def warm_up_tokens(model: ModelConfig | RecurrentConfig, *, segment: int) -> int:
    """How far back anything a token sees can reach: after as many tokens, a lane that started in the middle knows all that one long lane would.

    Each layer looks from the start of a segment M tokens back, into a segment that starts on a multiple of T.
    """
    return model.n_layer * math.ceil(model.memory / segment) * segment


def lanes_for(model: ModelConfig | RecurrentConfig, *, tokens: int, segment: int) -> int:
    """As many as fit without wasting time on warming up, or memory on what is kept; the figure does not depend on it."""
    if model.recurrent:  # a state never forgets how it started
        return 1
    warm_up = warm_up_tokens(model, segment=segment)
    in_time = WARM_UP_SHARE * tokens / warm_up if warm_up else tokens / segment
    in_memory = KEPT_BYTES / kept_bytes(model, lanes=1)
    return max(1, min(MOST_LANES, int(in_time), int(in_memory)))
