"""Reading done in pieces, so that the thread that does it can write for others in between. Knows no request.

Each of these is a generator: it yields how many tokens it has just read, and returns what it found.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from transformer_xl.batching.lanes import LANES, ModelFault
from transformer_xl.decoding.distribution import Distribution, Words, best
from transformer_xl.inference import Reader
from transformer_xl.inference.reader import CHUNK


@dataclass(frozen=True, kw_only=True)
class Scored:
    loss_P: NDArray[np.float32]
    """In nats; NaN for the first token of all."""
    likeliest: list[Words | None]
    """At each token's place, None at the first of all; empty where none were asked for."""


def read(reader: Reader, tokens: Sequence[int], *, segment: int | None) -> Generator[int, None, None]:
    """Reads one lane's tokens; of a model that forgets at every `segment`, only what it still knows at the end."""
    begin = (len(tokens) - 1) // segment * segment if segment else 0
    for start in range(begin, len(tokens), CHUNK):
        piece = tokens[start : start + CHUNK]
        reader.read(reader.tokens([piece]))
        yield len(piece)


def score(reader: Reader, tokens: Sequence[int], *, segment: int | None) -> Generator[int, None, NDArray[np.float32]]:
    """Reads one lane's tokens, and tells how surprising each is given all before it: its loss in nats."""
    # Room for all at once: small arrays that stay would keep apart the large ones that come and go, and memory would grow with every piece.
    loss_P, done = np.empty(len(tokens), dtype=np.float32), 0
    for part in scored(reader, tokens, segment=segment):
        loss_P[done : done + len(part.loss_P)] = part.loss_P
        done += len(part.loss_P)
        yield len(part.loss_P)
    return loss_P


def scored(reader: Reader, tokens: Sequence[int], *, segment: int | None, likeliest: int = 0) -> Iterator[Scored]:
    """The same, piece by piece. With `segment`, the reader has read nothing and forgets at every one."""
    before_BD = reader.last_hidden_BD if reader.read_B[0] else None
    edges = reader.model.config.cluster_edges
    for start in range(0, len(tokens), segment or CHUNK):
        piece_BT = reader.tokens([tokens[start : start + (segment or CHUNK)]])
        if segment:
            reader.reset([0])
        hidden_BTD = reader.read(piece_BT)
        unread = before_BD is None
        if before_BD is None:
            before_BD = torch.zeros_like(hidden_BTD[:, 0])
        before_BTD = torch.cat([before_BD[:, None], hidden_BTD[:, :-1]], dim=1)
        loss_BT = reader.loss(before_BTD, piece_BT)
        loss_P: NDArray[np.float32] = loss_BT[0].float().cpu().numpy()
        words = list[Words | None]()
        for first in range(0, piece_BT.shape[1] if likeliest else 0, LANES):
            rows_PD = before_BTD[0, first : first + LANES]
            questions = [lambda lane: best(lane, likeliest)] * len(rows_PD)
            words += Distribution(reader, rows_PD, edges=edges).ask(questions)
        if not np.isfinite(loss_P[1 if unread else 0 :]).all():
            raise ModelFault("losses that are no numbers")
        if unread:
            loss_P[0] = math.nan
            words[:1] = [None] * bool(words)
        before_BD = hidden_BTD[:, -1]
        yield Scored(loss_P=loss_P, likeliest=words)
