"""How good a model is on a split: losses per token in corpus order, and the figures made from them with the rule that made them: which tokens are scored, and what each may see."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transformer_xl.config import NOT_A_TARGET, EvaluationConfig, ModelConfig, RecurrentConfig
from transformer_xl.console import Advance
from transformer_xl.data.feeding.evaluation_stream import EvaluationStream, PaperEvaluation
from transformer_xl.data.feeding.lanes import Segment
from transformer_xl.data.store import Split
from transformer_xl.devices import free_bytes, to_device
from transformer_xl.errors import ConfigError, DataError, InputError, shown
from transformer_xl.inference import make_reader
from transformer_xl.inference.cache import kept_bytes
from transformer_xl.inference.reader import chunk_of
from transformer_xl.inference.weights import WeightKind
from transformer_xl.model import AnyModel
from transformer_xl.model.memory import check_fits
from transformer_xl.model.products import computing_in
from transformer_xl.model.protocol import NOT_FINITE, check_tokens

RuleName = Literal["exact", "paper", "sliding"]
PAPER_LANES = 10
MOST_LANES = 16
WARM_UP_SHARE = 0.1
"""Lanes are added only as long as warming them up costs no more than this share of the tokens."""
KEPT_BYTES = 1 << 30
"""And, on a processor, only as long as their kept keys and values take no more than this."""
MOST_DEVICE_LANES, FREE_SHARE = 256, 0.5
"""On a device, which is faster the more it is given: as long as all they need takes no more than this share of what is free."""


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
    precision: str = "float32"
    """Of products."""
    recurrent: bool = False
    """A state is carried from token to token, however the text is cut."""
    adaptation: str = ""
    """What was learned while reading, in words; nothing, where empty."""

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
        if self.precision != "float32":
            seen += f", products in {self.precision}"
        if self.adaptation:
            seen += f"; each token scored before it was learned from: {self.adaptation}"
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


def lanes_for(
    model: ModelConfig | RecurrentConfig,
    *,
    tokens: int,
    segment: int,
    device: torch.device | None = None,
    ranks: int = 1,
) -> int:
    """As many as fit without wasting time on warming up, or memory on what is kept; the figure does not depend on it. Of several `ranks` each has as many,
    and at least one: a rank that warms up is faster than one that waits."""
    if model.recurrent:  # a state never forgets how it started
        return 1
    warm_up = warm_up_tokens(model, segment=segment)
    in_time = WARM_UP_SHARE * tokens / warm_up if warm_up else tokens / segment
    if device is None or device.type == "cpu":
        in_memory, most = KEPT_BYTES / kept_bytes(model, lanes=1), MOST_LANES
    else:
        in_memory, most = FREE_SHARE * free_bytes(device) / _bytes_of_a_lane(model, segment=segment), MOST_DEVICE_LANES
    own = max(1, min(most, int(in_time) // ranks, int(in_memory)))
    return own * min(ranks, max(1, -(-tokens // segment)))


def _bytes_of_a_lane(model: ModelConfig | RecurrentConfig, *, segment: int) -> int:
    """What it keeps, and what one segment of it needs at a time: a layer, the head's logits three times over, attention to all it sees."""
    heads = getattr(model, "n_head", 1) * (model.memory + segment)
    widths = 8 * model.d_model + getattr(model, "d_inner", model.d_model) + heads
    return kept_bytes(model, lanes=1) + segment * (widths + 3 * (model.cluster_edges[1] + model.clusters)) * 4


Losses = NDArray[np.float32]
SLIDING_TOKENS_AT_ONCE = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came out, in every unit; `rule` says how."""

    tokens: int
    loss_nats: float
    bits_per_token: float
    perplexity: float
    bits_per_byte: float
    seconds: float
    rule: Rule

    def value(self, unit: str) -> float:
        """In the corpus's own unit."""
        if unit == "perplexity_per_word":
            return self.perplexity
        return self.bits_per_byte if unit == "bits_per_byte" else self.bits_per_token

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "rule": vars(self.rule), "rule_in_words": self.rule.sentence()}


UNIT_NAMES = {
    "perplexity_per_word": "perplexity",
    "bits_per_character": "bits per character",
    "bits_per_byte": "bits per byte",
}


def make_rule(
    model: AnyModel,
    lengths: EvaluationConfig,
    *,
    name: RuleName = "exact",
    tokens: int,
    lanes: int | None = None,
    score_boundaries: bool = False,
    weights: WeightKind = "exact",
    ranks: int = 1,
) -> Rule:
    """The rule these lengths make for this model; the number of lanes is chosen where none is asked for, for so many `ranks` that share them."""
    if lanes is not None and not 1 <= lanes <= max(1, tokens):
        raise ConfigError(
            f"lanes: {shown(lanes)} for {tokens:,} tokens; take at least 1, and at most as many as tokens"
        )
    if lanes is None:
        asked = {name: getattr(lengths, name) for name in ("memory", "clamp_len", "same_length")}
        config = model.config.with_lengths(**asked)
        where = {"device": model.vocabulary.bias_V.device, "ranks": ranks}
        chosen = lanes_for(config, tokens=tokens, segment=lengths.segment, **where)  # type: ignore[arg-type]
        lanes = PAPER_LANES if name == "paper" else chosen
    if model.config.recurrent and name == "exact" and lanes > 1:
        raise ConfigError(
            f"lanes: {lanes}, where a recurrent state never forgets and the exact figure needs one; take 1, or the rule paper"
        )
    check_fits(
        lanes * min(lengths.segment, tokens) * model.config.d_model,
        like=model.vocabulary.bias_V,
        what=f"reading segments of {lengths.segment:,} tokens in {lanes:,} lanes",
        way_out="take a smaller `segment=`, or fewer `lanes=`",
    )
    if name == "sliding" and lengths.memory:
        raise ConfigError(
            f"evaluation.memory: {lengths.memory} with sliding windows, which keep none; set it to 0 (`memory=0`)"
        )
    if weights == "int8" and not lengths.memory:
        raise ConfigError("weights: 'int8' with memory 0; rounded weights are for reading with memory, take 'exact'")
    same = {field: getattr(lengths, field) for field in ("segment", "memory", "clamp_len", "same_length")}
    precision = "float32" if model.reads_in is None else str(model.reads_in).removeprefix("torch.")
    how: dict[str, Any] = {"score_boundaries": score_boundaries, "weights": weights, "precision": precision}
    return Rule(name=name, recurrent=model.config.recurrent, lanes=lanes, **same, **how)


def score_split(
    model: AnyModel, split: Split, *, rule: Rule, advance: Advance | None = None, own: range | None = None
) -> Losses:
    """Each token's loss in nats at its place in the split; NaN where the rule scores none (the first token, a dropped remainder). `own`: of an exact rule's
    lanes, those that are read here; NaN at the places of the others."""
    losses = np.full(len(split), np.nan, dtype=np.float32)
    half = computing_in(model.reads_in, model.vocabulary.bias_V.device)
    with using_lengths(model, rule), torch.inference_mode(), half:
        if rule.name == "sliding":
            _score_windows(model, split, losses, window=rule.segment, advance=advance)
        else:
            _score_segments(model, _stream(model, split, rule, own), losses, weights=rule.weights, advance=advance)
    return losses


def figures(losses: Losses, *, split: Split, rule: Rule, seconds: float) -> Figures:
    return figures_of(*summed(losses), split=split, rule=rule, seconds=seconds)


def summed(losses: Losses) -> tuple[float, int]:
    """The nats of all tokens that were scored, and how many these are."""
    scored = losses[~np.isnan(losses)]
    return float(scored.sum(dtype=np.float64)), len(scored)


def figures_of(nats: float, tokens: int, *, split: Split, rule: Rule, seconds: float) -> Figures:
    if not tokens:
        raise DataError(f"{split.name} has {len(split)} tokens and none could be scored; evaluate on a longer text")
    mean = nats / tokens
    bits = mean / math.log(2)
    return Figures(
        tokens=tokens,
        loss_nats=mean,
        bits_per_token=bits,
        perplexity=math.exp(min(mean, 700.0)),
        # The scored tokens' share of the text is taken to be their share of the tokens.
        bits_per_byte=bits * len(split) / split.bytes,
        seconds=seconds,
        rule=rule,
    )


def evaluate(model: AnyModel, split: Split, *, rule: Rule, advance: Advance | None = None) -> Figures:
    started_at = time.perf_counter()
    losses = score_split(model, split, rule=rule, advance=advance)
    return figures(losses, split=split, rule=rule, seconds=time.perf_counter() - started_at)


@contextmanager
def using_lengths(model: AnyModel, rule: Rule) -> Iterator[None]:
    """The model with the rule's lengths, in evaluation mode; as it was, afterwards."""
    config, training = model.config, model.training
    try:
        model.set_lengths(memory=rule.memory, clamp_len=rule.clamp_len, same_length=rule.same_length)
        model.eval()
        yield
    finally:
        model.set_lengths(memory=config.memory, clamp_len=config.clamp_len, same_length=config.same_length)
        model.train(training)


def _stream(model: AnyModel, split: Split, rule: Rule, own: range | None = None) -> Any:
    if rule.name == "paper":
        return PaperEvaluation(split, lanes=rule.lanes, segment=rule.segment, score_boundaries=rule.score_boundaries)
    # Where every token sees as many keys the figure does not depend on how the text is cut: then it is cut as reading goes fastest.
    cut_freely = rule.same_length or rule.recurrent
    segment = max(rule.segment, chunk_of(rule.lanes)) if cut_freely else rule.segment
    warm_up = warm_up_tokens(model.config, segment=segment)
    boundaries = rule.score_boundaries
    how: dict[str, Any] = {"lanes": rule.lanes, "segment": segment, "warm_up": warm_up, "own": own}
    return EvaluationStream(split, score_boundaries=boundaries, **how)


def _numbers(loss_BT: Tensor) -> Losses:
    """A token without a number would drop out of the mean unseen."""
    found: Losses = loss_BT.float().cpu().numpy()
    if np.isnan(found).any():
        raise InputError(NOT_FINITE)
    return found


def _score_segments(
    model: AnyModel, stream: Any, losses: Losses, *, weights: WeightKind, advance: Advance | None
) -> None:
    device, reader = model.vocabulary.bias_V.device, None
    segment: Segment
    for segment in stream:
        tokens_BT = to_device(torch.from_numpy(segment.tokens), device)
        targets_BT = to_device(torch.from_numpy(segment.targets), device)
        check_tokens(targets_BT, vocabulary=model.config.vocabulary, name="targets", lowest=NOT_A_TARGET)
        if reader is None:
            lanes, window = tokens_BT.shape
            reader = make_reader(model, lanes=lanes, sight="segment", weights=weights, window=window)
        elif not model.config.remembers:
            reader.reset(range(reader.lanes))
        loss_BT = reader.loss(reader.read(tokens_BT), targets_BT)
        scored = segment.positions >= 0
        losses[segment.positions[scored]] = _numbers(loss_BT)[scored]
        if advance:
            advance(int(scored.sum()))


def _score_windows(model: AnyModel, split: Split, losses: Losses, *, window: int, advance: Advance | None) -> None:
    """The vanilla model's evaluation: the window moves by one token and is computed anew for each prediction."""
    device = model.vocabulary.bias_V.device
    tokens = to_device(torch.from_numpy(np.asarray(split.tokens, dtype=np.int64)), device)
    if len(tokens) < 2:
        raise InputError(f"{split.name} has {len(tokens)} tokens: there is nothing to predict")
    first = tokens[: min(window, len(tokens) - 1) + 1][None]
    losses[1 : first.shape[1]] = _numbers(model(first[:, :-1], targets_BT=first[:, 1:]).loss_BT)[0]
    windows_PW = tokens.unfold(0, window + 1, 1)[1:] if len(tokens) > window + 1 else tokens.new_zeros(0, window + 1)
    at_once = max(1, SLIDING_TOKENS_AT_ONCE // window)
    if advance:
        advance(first.shape[1] - 1)
    for start in range(0, len(windows_PW), at_once):
        some_PW = windows_PW[start : start + at_once]
        loss_P1 = model(some_PW[:, :-1], targets_BT=some_PW[:, -1:]).loss_BT
        places = start + window + 1 + np.arange(len(some_PW))
        losses[places] = _numbers(loss_P1)[:, 0]
        if advance:
            advance(len(some_PW))
