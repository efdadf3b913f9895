"""Texts that are read and told about: how surprising each token is, what a head looks at, what a session has read."""

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
from fastapi.responses import Response
from numpy.typing import NDArray

from transformer_xl.batching import reading
from transformer_xl.batching.events import EVENT_FIGURES, LEAST
from transformer_xl.batching.learning import Learner
from transformer_xl.batching.requests import ReadRequest
from transformer_xl.decoding import TextStream
from transformer_xl.evaluation.scores import Scores
from transformer_xl.inference import Reader, make_reader
from transformer_xl.serving.api.admission import Extent, Ticket
from transformer_xl.serving.api.bodies import Attention, Given, SessionScore
from transformer_xl.serving.api.bodies import Feed as FeedBody
from transformer_xl.serving.api.learning import learned
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.api.refusals import Refusal
from transformer_xl.serving.api.sessions import Session, memory_use
from transformer_xl.serving.api.texts import PlacedTokens, json_name, longest_name, placed
from transformer_xl.serving.http.aside import SMALL
from transformer_xl.serving.http.sending import Encoded, json_answer, json_list
from transformer_xl.serving.limits import PROMPT_TOKENS

Losses = NDArray[np.float32]
TOO_MUCH = "the texts have {:,} tokens together, and one request may have {:,}; send fewer at a time"
TOKEN_BYTES = 96
"""At most, of one token of a score in JSON beside its name."""


async def score(
    served: Served,
    bodies: list[Given],
    ticket: Ticket,
    *,
    segment: int | None,
    source: Reader | None = None,
    many: bool = False,
) -> Response:
    """Each text for itself, or as a session (`source`) would read it; the session itself does not move."""
    mailbox = ticket.take(served)
    texts = [await _placed(served, body, ticket) for body in bodies]
    total = sum(len(given.tokens) for given in texts)
    if total > PROMPT_TOKENS:
        raise Refusal(422, TOO_MUCH.format(total, PROMPT_TOKENS))

    def pieces() -> Generator[int, None, list[Losses]]:
        found = []
        for given in texts:
            reader = make_reader(served.model, window=segment) if source is None else source.fork()
            found.append((yield from reading.score(reader, given.tokens, segment=segment)))
        return found

    served.submit(ReadRequest(pieces(), mailbox=mailbox))
    losses = cast(list[Losses], await ticket.result(mailbox))
    before = 0 if source is None else int(source.read_B[0])
    told = [_scored_text(served, given, loss_P, before) for given, loss_P in zip(texts, losses, strict=True)]
    answer = {"model": served.name, "data": told} if many else {"model": served.name, **told[0]}
    return await json_answer(answer, ticket.request.receive, figures=total)


async def score_in(session: Session, body: SessionScore, ticket: Ticket) -> Response:
    """As the session would read it; where it learns, learning from each token once it is scored. The session itself does not move."""
    served, reader = session.served, session.reader
    if not isinstance(reader, Learner):
        return await score(served, [body], ticket, segment=None, source=reader)
    mailbox = ticket.take(served)
    given = await _placed(served, body, ticket, columns=1 + (reader.still is not None))
    found = await learned(served, reader, given.tokens, ticket=ticket, mailbox=mailbox)
    told = _scored_text(served, given, found.loss_P, reader.read, static_P=found.static_P)
    return await json_answer({"model": served.name, **told}, ticket.request.receive, figures=len(given.tokens))


def _scored_text(
    served: Served, given: PlacedTokens, loss_P: Losses, before: int, *, static_P: Losses | None = None
) -> dict[str, Any]:
    scores = Scores(tokens=np.asarray(given.tokens), offsets=given.start_P, nats=loss_P)
    told = {
        "tokens": Encoded(json_list(_scored_tokens(served, scores, given, static_P))),
        "loss_nats": _mean(loss_P),
        "bits": scores.total_bits,
        "memory": memory_use(served, len(given.tokens) + before),
    }
    if static_P is not None:
        told |= {"static_loss_nats": _mean(static_P), "static_bits": replace(scores, nats=static_P).total_bits}
    return told


def _mean(loss_P: Losses) -> float | None:
    known_P = loss_P[~np.isnan(loss_P)]
    return float(known_P.mean(dtype=np.float64)) if len(known_P) else None


async def _placed(served: Served, body: Given, ticket: Ticket, *, columns: int = 1) -> PlacedTokens:
    """What was given, and room for an answer about it, with so many figures of each token."""
    small, tokenizer = len(body.tokens or body.text or "") <= SMALL, served.tokenizer
    given, longest = await ticket.aside(lambda: (placed(tokenizer, body), longest_name(tokenizer)), small=small)
    count = len(given.tokens)
    ticket.reserve(
        Extent(figures=columns * count, kept=columns * count, size=count * (longest + columns * TOKEN_BYTES))
    )
    return given


def _scored_tokens(served: Served, scores: Scores, given: PlacedTokens, static_P: Losses | None) -> Iterator[str]:
    for first in range(0, len(given.tokens), EVENT_FIGURES):
        places = slice(first, first + EVENT_FIGURES)
        start_P, end_P = scores.offsets[places], given.end_P[places]
        rows = given.tokens[places], start_P.tolist(), end_P.tolist(), _logprobs(scores.nats[places])
        beside = [""] * len(rows[0])
        if static_P is not None:
            beside = [f',"static_logprob":{_number(logprob)}' for logprob in _logprobs(static_P[places])]
        for token, start, end, logprob, more in zip(*rows, beside, strict=True):
            name = json_name(served.tokenizer, token)
            yield f'{{"id":{token},"text":{name},"start":{start},"end":{end},"logprob":{_number(logprob)}{more}}}'


def _number(value: float | None) -> str:
    return "null" if value is None else repr(value)


def _logprobs(loss_P: Losses) -> list[float | None]:
    return [None if loss != loss else max(-loss, LEAST) for loss in loss_P.tolist()]


async def feed(session: Session, body: FeedBody, ticket: Ticket) -> Response:
    served, source = session.served, session.reader
    if isinstance(source, Learner):
        return await _feed_learning(session, source, body, ticket)
    mailbox = ticket.take(served)
    given = await _placed(served, body, ticket)

    def pieces() -> Generator[int, None, tuple[Reader, list[float | None] | None]]:
        reader, logprobs = source.fork(), None
        if body.logprobs:
            logprobs = _logprobs((yield from reading.score(reader, given.tokens, segment=None)))
        else:
            yield from reading.read(reader, given.tokens, segment=None)
        return reader, logprobs

    text = await _read_on(session, given, ticket)
    served.submit(ReadRequest(pieces(), mailbox=mailbox))
    result: Any = await ticket.result(mailbox)
    session.reader, logprobs = result
    session.text = text
    answer = {**session.as_json(), "fed": len(given.tokens)}
    told = answer if logprobs is None else {**answer, "logprobs": logprobs}
    return await json_answer(told, ticket.request.receive, figures=len(given.tokens) if body.logprobs else 0)


async def _feed_learning(session: Session, learner: Learner, body: FeedBody, ticket: Ticket) -> Response:
    mailbox = ticket.take(session.served)
    given = await _placed(session.served, body, ticket, columns=1 + (learner.still is not None))
    text = await _read_on(session, given, ticket)
    found = await learned(session.served, learner, given.tokens, ticket=ticket, mailbox=mailbox)
    session.reader, session.text = found.learner, text
    answer: dict[str, Any] = {**session.as_json(), "fed": len(given.tokens)}
    if body.logprobs:
        answer["logprobs"] = _logprobs(found.loss_P)
        if found.static_P is not None:
            answer["static_logprobs"] = _logprobs(found.static_P)
    return await json_answer(answer, ticket.request.receive, figures=len(given.tokens) if body.logprobs else 0)


async def _read_on(session: Session, given: PlacedTokens, ticket: Ticket) -> TextStream:
    """Where the session's text stands after it."""

    def read() -> TextStream:
        text = session.text.fork()
        text.read(given.tokens)
        return text

    return await ticket.aside(read, small=len(given.tokens) <= SMALL)


async def attention(served: Served, body: Attention, ticket: Ticket) -> Response:
    facts = served.facts()
    if not facts["attention"]:
        raise Refusal(409, "this model is recurrent and has no attention")
    if body.layer >= facts["layers"] or body.head >= facts["heads"]:
        message = f"this model has layers 0 to {facts['layers'] - 1} with heads 0 to {facts['heads'] - 1}"
        raise Refusal(422, f"layer, head: {message}")
    mailbox = ticket.take(served)
    given = await _placed(served, body, ticket)
    if len(given.tokens) < 2 or body.position >= len(given.tokens):
        count = len(given.tokens)
        raise Refusal(422, f"position: the text has {count} tokens, and needs at least two; they count from 0")
    looking = served.looking(given.tokens, position=body.position, layer=body.layer, head=body.head)
    served.look(ReadRequest(looking, mailbox=mailbox))
    row: Any = await ticket.result(mailbox)
    return await json_answer(row, ticket.request.receive, figures=len(row["weights"]) * (2 + len(row["terms"])))
