"""l_i(c, t) of RECL: the loss of each token of a stretch of text, seen from exactly the c tokens before it and nothing else.

    start s   [ s  .  .  .  .  .  .  .  . ]      a reading that starts fresh at s is read once, and meets
                        ^ c=4    ^ c=8           token s + c with exactly c tokens of context for every c

Many starts are read side by side. A reading never goes on beyond what the model can see: from there on, nothing changes.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transformer_xl.analysis.loss_files import UNREADABLE, Arrays, read_arrays, write_arrays
from transformer_xl.config import NOT_A_TARGET, EvaluationConfig, ModelConfig, RecurrentConfig, TrainingConfig
from transformer_xl.config.model import ENCODINGS_WITHOUT_MEMORY
from transformer_xl.console import progress
from transformer_xl.data.store import Split
from transformer_xl.devices import to_device
from transformer_xl.errors import InputError
from transformer_xl.evaluation import make_rule
from transformer_xl.evaluation.scoring import KEPT_BYTES, MOST_LANES, using_lengths
from transformer_xl.inference import Reader, make_reader
from transformer_xl.inference.cache import kept_bytes
from transformer_xl.model import AnyModel

SECONDS_BETWEEN_SAVES = 20.0
WINDOW_TOKENS_AT_ONCE = 1 << 14
Hidden = Callable[[Tensor, list[int]], Tensor]
"""Tokens of several starts, [B, T] -> what their tokens after the first c are predicted from, [B, C, D], for each of some lengths c."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Which tokens are scored, and from which contexts: the first `tokens` of a split that have the longest context before them."""

    lengths: tuple[int, ...]
    tokens: int

    @property
    def first(self) -> int:
        return max(self.lengths)

    @property
    def end(self) -> int:
        return self.first + self.tokens


@dataclass(frozen=True, kw_only=True)
class Contexts:
    losses: dict[int, NDArray[Any]]
    """By context length: each token's loss in nats, in corpus order."""
    about: dict[str, Any]
    """All that they depend on."""


def make_stretch(split: Split, *, lengths: Sequence[int], tokens: int | None, most: int) -> Stretch:
    """`tokens` as asked for; as many as there are, up to `most`, where nothing is asked."""
    longest = max(lengths)
    left = len(split) - longest
    if min(lengths) < 1:
        raise InputError(f"a context of {min(lengths)} tokens shows a model nothing to predict from; start at 1")
    if left < 1:
        raise InputError(
            f"a context of {longest:,} tokens is longer than {split.name} allows ({len(split):,} tokens); lower the longest context"
        )
    if tokens is not None and not 1 <= tokens <= left:
        raise InputError(
            f"{tokens:,} tokens cannot be scored: {left:,} of {split.name} have {longest:,} before them; choose 1 to {left:,}"
        )
    return Stretch(lengths=tuple(lengths), tokens=min(left, most) if tokens is None else tokens)


def farthest_seen(
    model: ModelConfig | RecurrentConfig, *, evaluation: EvaluationConfig, training: TrainingConfig
) -> int | None:
    """How many tokens before a token can change its prediction. With memory each layer looks M further back; without, there is one window.
    None: all of them, as in a recurrent state."""
    if model.recurrent:
        return None
    if evaluation.memory:
        return model.n_layer * evaluation.memory + 1
    return training.context + training.segment


def context_losses(
    model: AnyModel,
    split: Split,
    *,
    stretch: Stretch,
    evaluation: EvaluationConfig,
    training: TrainingConfig,
    keep: Path | None = None,
    made_by: dict[str, Any] | None = None,
) -> Contexts:
    """The losses of every token of the stretch. With memory M a token sees the last M, whatever the chunks it is read in.

    `keep` is a file .npz for the result: one that is there, made by the same thing (`made_by`: whose weights), is reused, and an interrupted
    reading goes on from the file beside it.
    """
    farthest = farthest_seen(model.config, evaluation=evaluation, training=training)
    about = _about(split, stretch=stretch, evaluation=evaluation, farthest=farthest, made_by=made_by or {})
    if keep is not None and (found := _kept(keep, about)) is not None:
        return Contexts(losses={length: found[f"c{length}"] for length in stretch.lengths}, about=about)
    read_for = {length: length if farthest is None else min(length, farthest) for length in stretch.lengths}
    computed = sorted(set(read_for.values()))
    lanes = lanes_for(model.config, evaluation=evaluation, longest=computed[-1])
    # For its lengths: lanes here are starts, each of its own.
    rule = make_rule(model, evaluation, tokens=stretch.tokens, lanes=1)
    with using_lengths(model, rule), torch.inference_mode():
        loss_CP = _score(model, split, computed, stretch=stretch, lanes=lanes, keep=keep, about=about)
    losses = {length: loss_CP[computed.index(read_for[length])] for length in stretch.lengths}
    if keep is not None:
        write_arrays(keep, {f"c{length}": loss_P for length, loss_P in losses.items()}, about=about)
        _partial(keep).unlink(missing_ok=True)
    return Contexts(losses=losses, about=about)


def lanes_for(model: ModelConfig | RecurrentConfig, *, evaluation: EvaluationConfig, longest: int) -> int:
    """As many starts side by side as their kept keys and values, or their windows, leave room for."""
    if model.recurrent or not evaluation.memory:
        return max(1, WINDOW_TOKENS_AT_ONCE // longest)
    one = kept_bytes(model.with_lengths(memory=evaluation.memory, clamp_len=0, same_length=False), lanes=1)
    return max(1, min(MOST_LANES, KEPT_BYTES // one))


# --- reading


def _score(
    model: AnyModel,
    split: Split,
    lengths: list[int],
    *,
    stretch: Stretch,
    lanes: int,
    keep: Path | None,
    about: dict[str, Any],
) -> NDArray[Any]:
    """[C, P]: a row for each of `lengths`, a column for each scored token."""
    blocks = list(_blocks(lengths, stretch=stretch, lanes=lanes))
    like = model.vocabulary.bias_V
    dtype = np.float64 if like.dtype == torch.float64 else np.float32
    loss_CP, done = np.full((len(lengths), stretch.tokens), np.nan, dtype=dtype), 0
    about = about | {"lanes": lanes}
    if keep is not None and (found := _kept(_partial(keep), about)) is not None:
        loss_CP, done = found["losses"], int(found["done"])
    hidden, saved_at = _reader(model, lanes=lanes), time.monotonic()
    with progress("reading contexts", total=sum(block.size for block in blocks), unit="tokens") as advance:
        advance(sum(block.size for block in blocks[:done]))
        for number, block in enumerate(blocks[done:], start=done + 1):
            tokens_BT = to_device(torch.from_numpy(split.tokens[block.inputs_BT].astype(np.int64)), like.device)
            targets_BC = np.where(block.scored_BC, split.tokens[block.targets_BC].astype(np.int64), NOT_A_TARGET)
            hidden_BCD = hidden(tokens_BT, block.lengths)
            wanted_BC = to_device(torch.from_numpy(targets_BC), like.device)
            loss_BC = model.vocabulary.loss(hidden_BCD, wanted_BC).cpu().numpy()
            lane, column = np.nonzero(block.scored_BC)
            loss_CP[column, block.targets_BC[lane, column] - stretch.first] = loss_BC[lane, column]
            advance(block.size)
            if keep is not None and time.monotonic() - saved_at >= SECONDS_BETWEEN_SAVES:
                write_arrays(_partial(keep), {"losses": loss_CP, "done": np.array(number)}, about=about)
                saved_at = time.monotonic()
    return loss_CP


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Starts that are read side by side, and the tokens each scores: the one after c tokens, where it lies in the stretch."""

    lengths: list[int]
    """The shortest few of all; the longer ones score nothing in this block."""
    inputs_BT: NDArray[np.int64]
    targets_BC: NDArray[np.int64]
    scored_BC: NDArray[np.bool_]

    @property
    def size(self) -> int:
        return self.inputs_BT.size


def _blocks(lengths: list[int], *, stretch: Stretch, lanes: int) -> Iterator[_Block]:
    start_S = np.arange(stretch.first - lengths[-1], stretch.end - lengths[0])
    target_SC = start_S[:, None] + np.array(lengths)
    scored_SC = (target_SC >= stretch.first) & (target_SC < stretch.end)
    useful_S = np.flatnonzero(scored_SC.any(axis=1))
    for begin in range(0, len(useful_S), lanes):
        chosen_B = useful_S[begin : begin + lanes]
        C = int(np.flatnonzero(scored_SC[chosen_B].any(axis=0))[-1]) + 1
        scored_BC = scored_SC[chosen_B, :C]
        yield _Block(
            lengths=lengths[:C],
            inputs_BT=start_S[chosen_B, None] + np.arange(lengths[C - 1]),
            targets_BC=np.where(scored_BC, target_SC[chosen_B, :C], stretch.first),
            scored_BC=scored_BC,
        )


def _reader(model: AnyModel, *, lanes: int) -> Hidden:
    if model.config.remembers:
        return _with_memory(make_reader(model, lanes=lanes))
    if model.config.encoding in ENCODINGS_WITHOUT_MEMORY:
        # These positions count from the window's end: another length is another window, computed anew.
        return lambda tokens_BT, lengths: torch.stack(
            [model(tokens_BT[:, :length]).hidden_BTD[:, -1] for length in lengths], dim=1
        )
    return lambda tokens_BT, lengths: _columns(model(tokens_BT).hidden_BTD, [length - 1 for length in lengths])


def _with_memory(engine: Reader) -> Hidden:
    def hidden(tokens_BT: Tensor, lengths: list[int]) -> Tensor:
        B = tokens_BT.shape[0]
        reader = engine if engine.lanes == B else engine.select(range(B))
        reader.reset(range(B))
        parts = []
        for start in range(0, lengths[-1], reader.chunk):
            hidden_BTD = reader.read(tokens_BT[:, start : start + reader.chunk])
            columns = [length - 1 - start for length in lengths if 0 <= length - 1 - start < hidden_BTD.shape[1]]
            parts.append(_columns(hidden_BTD, columns))
        return torch.cat(parts, dim=1)

    return hidden


def _columns(hidden_BTD: Tensor, columns: list[int]) -> Tensor:
    return hidden_BTD[:, to_device(torch.tensor(columns, dtype=torch.int64), hidden_BTD.device)]


# --- keeping


def _about(
    split: Split, *, stretch: Stretch, evaluation: EvaluationConfig, farthest: int | None, made_by: dict[str, Any]
) -> dict[str, Any]:
    """All that the numbers depend on."""
    read = np.ascontiguousarray(split.tokens[: stretch.end]).astype("<i8")
    return {
        "made_by": made_by,
        "split": split.name,
        "text": hashlib.sha256(read.tobytes()).hexdigest(),
        "first": stretch.first,
        "tokens": stretch.tokens,
        "lengths": list(stretch.lengths),
        **{name: getattr(evaluation, name) for name in ("memory", "clamp_len", "same_length")},
        "sees_at_most": farthest,
    }


def _partial(keep: Path) -> Path:
    return keep.with_name(f"{keep.stem}.partial.npz")


def _kept(path: Path, about: dict[str, Any]) -> Arrays | None:
    """The arrays of a file, where it is whole and about the same thing."""
    try:
        arrays, found = read_arrays(path)
    except (FileNotFoundError, *UNREADABLE):
        return None
    return arrays if found == about else None
