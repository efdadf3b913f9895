"""JSON that is made while it is sent, piece by piece, so that no answer is ever whole in memory and none keeps others waiting."""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from transformer_xl.serving.http.aside import aside, aside_unless_gone
from transformer_xl.serving.limits import PIECE_BYTES

NUMBERS = PIECE_BYTES // 64
"""So many numbers become text at a time; none is longer than that."""
# ASCII, because some clients take characters beyond it for the end of a line.
as_json: Callable[[object], str] = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Encoded:
    """JSON already, in short pieces."""

    pieces: Iterator[str]


def json_list(items: Iterator[str]) -> Iterator[str]:
    """Of things that are JSON already."""
    yield "["
    for number, item in enumerate(items):
        yield f",{item}" if number else item
    yield "]"


def json_pieces(value: Any) -> Iterator[str]:
    """Of dicts, lists and what is `Encoded`, however long; each piece is short."""
    if isinstance(value, Encoded):
        yield from value.pieces
    elif isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' if number else '{'}{as_json(name)}:"
            yield from json_pieces(item)
        yield "}" if value else "{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            yield "," if number else "["
            yield from json_pieces(item)
        yield "]"
    elif isinstance(value, list):
        parts = (value[start : start + NUMBERS] for start in range(0, len(value), NUMBERS))
        yield from json_list(as_json(part)[1:-1] for part in parts)
    else:
        yield as_json(value)


def json_text(text: str) -> str:
    """What stands between the quotation marks."""
    return as_json(text)[1:-1]


def json_quoted(parts: Iterable[str]) -> Iterator[str]:
    """A text whose parts stand as `json_text` gives them."""
    yield '"'
    for part in parts:
        yield from (part[start : start + PIECE_BYTES] for start in range(0, len(part), PIECE_BYTES))
    yield '"'


def _bytes(value: Any) -> Iterator[bytes]:
    found, size = list[str](), 0
    for piece in json_pieces(value):
        found.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield "".join(found).encode()
            found, size = [], 0
    if found:
        yield "".join(found).encode()


async def json_answer(value: Any, receive: Receive, *, figures: int) -> Response:
    """An answer that holds so many figures."""
    pieces = _bytes(value)

    def following() -> bytes | None:
        return next(pieces, None)

    small = figures <= NUMBERS
    first = await aside_unless_gone(receive, following, small=small)
    second = await aside_unless_gone(receive, following, small=small)
    if second is None:
        return Response(first, media_type="application/json")

    async def all_pieces() -> AsyncIterator[bytes]:
        piece: bytes | None = second
        yield first or b""
        while piece is not None:
            yield piece
            piece = await aside(following)

    return StreamingResponse(all_pieces(), media_type="application/json")
