"""Texts as OpenAI's API gives them: whole, or as they are drawn."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse

from transformer_xl.data.tokenizers import readable
from transformer_xl.errors import InputError
from transformer_xl.generation import Sampling, start_tokens
from transformer_xl.serving.admission import Slot
from transformer_xl.serving.bodies import Completion, Generation
from transformer_xl.serving.events import Ended, Event, Mailbox, Told, Wrote
from transformer_xl.serving.lanes import Wish, Writing
from transformer_xl.serving.limits import PROMPT_TOKENS
from transformer_xl.serving.models import Served
from transformer_xl.serving.orders import Order
from transformer_xl.serving.refusals import Refusal, error_body
from transformer_xl.serving.sessions import Session
from transformer_xl.serving.texts import TOO_LONG, UNKNOWN, checked

COLDEST = 1e-4
"""Below it the likeliest token is all that is left, and dividing by it would leave no numbers."""


@dataclass
class Answer:
    """One request's texts, as far as they are known."""

    served: Served
    mailbox: Mailbox
    prompt_tokens: int
    choices: int
    likeliest: int | None
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    drawn: int = 0
    ended: int = 0

    def __post_init__(self) -> None:
        self._echoed = [0] * self.choices
        """Characters of each choice's prompt that were told before its own."""

    def chunk(self, index: int, event: Event) -> dict[str, Any]:
        """A part of a choice."""
        assert isinstance(event, Wrote | Ended)
        if isinstance(event, Ended):
            self.ended += 1
            return {"index": index, "text": "", "logprobs": None, "finish_reason": event.reason}
        self.drawn += event.drawn
        logprobs = None if self.likeliest is None else self._logprobs(event.tokens, self._echoed[index])
        self._echoed[index] += 0 if event.drawn else len(event.text)
        return {"index": index, "text": event.text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[Told], before: int) -> dict[str, Any]:
        tops = [
            {readable(self.served.tokenizer, token): value for token, value in one.likeliest} or None for one in tokens
        ]
        return {
            "tokens": [one.text for one in tokens],
            "token_ids": [one.token for one in tokens],
            "token_logprobs": [one.log_probability for one in tokens],
            "top_logprobs": tops if self.likeliest else None,
            "text_offset": [before + one.start for one in tokens],
        }

    def body(self, choices: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]:
        body = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.served.name,
            "choices": choices,
        }
        if usage:
            total = self.prompt_tokens + self.drawn
            body["usage"] = {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.drawn,
                "total_tokens": total,
            }
        return body


def wish(body: Generation, *, seed: int, segment: int | None, keep: bool) -> Wish:
    stop = body.stop or ()
    temperature = 1.0 if body.temperature is None else body.temperature
    return Wish(
        sampling=Sampling(
            temperature=temperature if temperature >= COLDEST else 0.0,
            top_p=body.top_p or 1.0,
            top_k=body.top_k or 0,
            seed=seed,
        ),
        tokens=16 if body.max_tokens is None else body.max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        likeliest=body.logprobs,
        segment=segment,
        keep=keep,
    )


def prompts_of(served: Served, body: Completion) -> list[tuple[list[int], str]]:
    """Each prompt's tokens and its text."""
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    else:
        prompts = [prompt] if isinstance(prompt[0], int) else list(prompt)
    found = []
    for one in prompts:
        if isinstance(one, str):
            try:
                found.append((start_tokens(served.tokenizer, one), one))
            except InputError:
                raise Refusal(422, f"prompt: {UNKNOWN}") from None
        else:
            tokens = checked(served.tokenizer, one)
            found.append((tokens, served.tokenizer.decode(tokens)))
    if sum(len(tokens) for tokens, _ in found) > PROMPT_TOKENS:
        raise Refusal(422, f"prompt: {TOO_LONG}")
    return found


async def complete(served: Served, body: Completion, slot: Slot) -> Response:
    prompts, n = prompts_of(served, body), body.n or 1
    mailbox = slot.take(served, len(prompts) * n)
    seed = secrets.randbits(48) if body.seed is None else body.seed
    segment = served.forgets_after(body.memory)
    forgets_after = segment if served.remembers else None  # a model without memory has a window instead
    for number, (tokens, text) in enumerate(prompts):
        order = Order(
            model=served.model,
            tokenizer=served.tokenizer,
            prompt=tokens,
            text=served.text_stream(tokens),
            echo=text if body.echo else None,
            segment=segment,
        )
        writings = [
            Writing(
                wish(body, seed=seed + choice, segment=forgets_after, keep=False),
                served.tokenizer,
                mailbox=mailbox,
                index=number * n + choice,
            )
            for choice in range(n)
        ]
        served.write(order, writings)
    prompt_tokens = sum(len(tokens) for tokens, _ in prompts)
    return await _answer(Answer(served, mailbox, prompt_tokens, len(prompts) * n, body.logprobs), body, slot)


async def go_on(session: Session, body: Generation, slot: Slot) -> Response:
    """A session writes on from what it has read, and has then read what it wrote."""
    served, source = session.served, session.reader if session.tokens_read else None
    prompt = [] if source is not None else start_tokens(served.tokenizer, "")
    mailbox = slot.take(served)
    seed = secrets.randbits(48) if body.seed is None else body.seed
    text = session.text if source is not None else served.text_stream(prompt)
    order = Order(model=served.model, tokenizer=served.tokenizer, prompt=prompt, text=text, source=source)
    writing = Writing(wish(body, seed=seed, segment=None, keep=True), served.tokenizer, mailbox=mailbox, index=0)
    served.write(order, [writing])
    return await _answer(Answer(served, mailbox, len(prompt), 1, body.logprobs), body, slot, session)


async def _answer(answer: Answer, body: Generation, slot: Slot, session: Session | None = None) -> Response:
    if body.stream:
        # The first event is waited for: what fails before any text is an answer with a status of its own.
        first = await slot.unless_gone(slot.next(answer.mailbox))
        usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _events(answer, slot, first, usage=usage, session=session)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    choices = await slot.unless_gone(_whole(answer, slot, session))
    return JSONResponse(answer.body(choices, usage=True))


async def _events(
    answer: Answer, slot: Slot, first: tuple[int, Event], *, usage: bool, session: Session | None
) -> AsyncIterator[str]:
    index, event = first
    try:
        while True:
            yield _sse(answer.body([answer.chunk(index, event)], usage=False))
            _commit(session, event)
            if answer.ended == answer.choices:
                break
            index, event = await slot.next(answer.mailbox)
    except Refusal as refusal:
        yield _sse(error_body(refusal.status, refusal.message))
        return
    if usage:
        yield _sse(answer.body([], usage=True))
    yield "data: [DONE]\n\n"


def _sse(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def _whole(answer: Answer, slot: Slot, session: Session | None) -> list[dict[str, Any]]:
    parts: list[list[dict[str, Any]]] = [[] for _ in range(answer.choices)]
    while answer.ended < answer.choices:
        index, event = await slot.next(answer.mailbox)
        parts[index].append(answer.chunk(index, event))
        _commit(session, event)
    return [_joined(chunks) for chunks in parts]


def _commit(session: Session | None, event: Event) -> None:
    if session is not None and isinstance(event, Ended):
        assert event.state is not None
        session.reader, session.text = event.state


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    found = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    logprobs = None
    if found:
        logprobs = {
            name: None if found[0][name] is None else [value for one in found for value in one[name]]
            for name in found[0]
        }
    return {
        "index": chunks[0]["index"],
        "text": "".join(chunk["text"] for chunk in chunks),
        "logprobs": logprobs,
        "finish_reason": chunks[-1]["finish_reason"],
    }
