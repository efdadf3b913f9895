"""Texts that are read and told about: how surprising each token is, what a head looks at, what a session has read."""

import asyncio
from collections.abc import Generator
from typing import Any

from fastapi.responses import JSONResponse, Response

from transformer_xl.data.tokenizers import readable
from transformer_xl.generation import TextStream
from transformer_xl.inference import Reader
from transformer_xl.serving import reading
from transformer_xl.serving.admission import Slot
from transformer_xl.serving.bodies import Attention, Given
from transformer_xl.serving.bodies import Feed as FeedBody
from transformer_xl.serving.lanes import LEAST
from transformer_xl.serving.models import Served
from transformer_xl.serving.refusals import Refusal
from transformer_xl.serving.scheduler import Task
from transformer_xl.serving.sessions import Session, memory_use
from transformer_xl.serving.texts import PlacedTokens, placed


async def score(
    served: Served, body: Given, slot: Slot, *, segment: int | None, source: Reader | None = None
) -> Response:
    """With `source`, as a session would read it; the session itself does not move."""
    given = await asyncio.to_thread(placed, served.tokenizer, body)
    mailbox = slot.take(served)

    def pieces() -> Generator[int, None, dict[str, Any]]:
        reader = reading.fresh_scorer(served.model) if source is None else source.fork()
        scored = yield from reading.score(reader, given.tokens, segment=segment)
        read_before = 0 if source is None else int(source.read_B[0])
        return _scores(served, given, scored, read=read_before + len(given.tokens))

    served.submit(Task(pieces(), mailbox=mailbox))
    return await asyncio.to_thread(JSONResponse, await slot.result(mailbox))


def _scores(served: Served, given: PlacedTokens, scored: reading.Scored, *, read: int) -> dict[str, Any]:
    names: dict[int, str] = {}
    tokens = []
    for token, (start, end), loss in zip(given.tokens, given.spans, scored.loss_P.tolist(), strict=True):
        if token not in names:
            names[token] = readable(served.tokenizer, token)
        tokens.append({"id": token, "text": names[token], "start": start, "end": end, "logprob": _logprob(loss)})
    known = [loss for loss in scored.loss_P.tolist() if loss == loss]
    return {
        "model": served.name,
        "tokens": tokens,
        "loss_nats": sum(known) / len(known) if known else None,
        "memory": memory_use(served, read),
    }


def _logprob(loss_nats: float) -> float | None:
    return None if loss_nats != loss_nats else max(-loss_nats, LEAST)


async def feed(session: Session, body: FeedBody, slot: Slot) -> Response:
    served, source = session.served, session.reader
    given = await asyncio.to_thread(placed, served.tokenizer, body)
    mailbox = slot.take(served)

    def pieces() -> Generator[int, None, tuple[Reader, TextStream, list[float | None] | None]]:
        reader, logprobs = source.fork(), None
        if body.logprobs:
            scored = yield from reading.score(reader, given.tokens, segment=None)
            logprobs = [_logprob(loss) for loss in scored.loss_P.tolist()]
        else:
            yield from reading.read(reader, given.tokens, segment=None)
        text = session.text.fork()
        for token in given.tokens:
            text.push(token)
        return reader, text, logprobs

    served.submit(Task(pieces(), mailbox=mailbox))
    result: Any = await slot.result(mailbox)
    session.reader, session.text, logprobs = result
    answer = {**session.as_json(), "fed": len(given.tokens)}
    return JSONResponse(answer if logprobs is None else {**answer, "logprobs": logprobs})


async def attention(served: Served, body: Attention, slot: Slot) -> Response:
    facts = served.facts()
    if not facts["attention"]:
        raise Refusal(409, "this model is recurrent and has no attention")
    if body.layer >= facts["layers"] or body.head >= facts["heads"]:
        message = f"this model has layers 0 to {facts['layers'] - 1} with heads 0 to {facts['heads'] - 1}"
        raise Refusal(422, f"layer, head: {message}")
    given = await asyncio.to_thread(placed, served.tokenizer, body)
    if len(given.tokens) < 2 or body.position >= len(given.tokens):
        raise Refusal(
            422, f"position: the text has {len(given.tokens)} tokens, and needs at least two; they count from 0"
        )
    mailbox = slot.take(served)
    looking = served.looking(given.tokens, position=body.position, layer=body.layer, head=body.head)
    served.look(Task(looking, mailbox=mailbox))
    return JSONResponse(await slot.result(mailbox))
