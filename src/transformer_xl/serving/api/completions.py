"""Texts as OpenAI's API gives them: whole, or as they are drawn."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence

from fastapi.responses import Response, StreamingResponse

from transformer_xl.batching.events import Ended, Event
from transformer_xl.batching.lanes import Wish, Writing
from transformer_xl.batching.orders import Order
from transformer_xl.errors import InputError
from transformer_xl.generation import Sampling, start_tokens
from transformer_xl.serving.api.admission import Extent, Slot
from transformer_xl.serving.api.bodies import Completion, Generation
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.api.refusals import Refusal, error_body
from transformer_xl.serving.api.sessions import Session
from transformer_xl.serving.api.telling import FIGURE_BYTES, Answer, sse
from transformer_xl.serving.api.texts import TOO_LONG, UNKNOWN, checked
from transformer_xl.serving.http.sending import json_answer, json_text, longest_name
from transformer_xl.serving.limits import PROMPT_TOKENS, SMALL

COLDEST = 1e-4
"""Below it the likeliest token is all that is left, and dividing by it would leave no numbers."""


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


def given_prompts(body: Completion) -> list[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    return [body.prompt] if isinstance(body.prompt[0], int) else list(body.prompt)


def orders_of(served: Served, body: Completion) -> list[Order]:
    segment, orders = served.forgets_after(body.memory), list[Order]()
    for prompt in given_prompts(body):
        if isinstance(prompt, str):
            try:
                tokens = start_tokens(served.tokenizer, prompt)
            except InputError:
                raise Refusal(422, f"prompt: {UNKNOWN}") from None
        else:
            tokens = checked(served.tokenizer, prompt)
        if sum(len(order.prompt) for order in orders) + len(tokens) > PROMPT_TOKENS:
            raise Refusal(422, f"prompt: {TOO_LONG}")
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) else served.tokenizer.decode(tokens)
        text = served.text_stream(tokens)
        orders.append(
            Order(model=served.model, tokenizer=served.tokenizer, prompt=tokens, text=text, echo=echo, segment=segment)
        )
    return orders


def extent(served: Served, body: Generation, orders: Sequence[Order], *, n: int) -> Extent:
    """How much the answer can come to."""
    told = sum(len(order.prompt) for order in orders if order.echo is not None)
    new = len(orders) * (16 if body.max_tokens is None else body.max_tokens)
    each, longest = 1 + (body.logprobs or 0), longest_name(served.tokenizer)
    size = n * (sum(len(json_text(order.echo)) for order in orders if order.echo is not None) + new * longest)
    figures = (told + new) * each * n
    if body.logprobs is not None:
        size += figures * (longest + FIGURE_BYTES)
    return Extent(figures=figures, kept=(told + new * n) * each, size=size)


async def complete(served: Served, body: Completion, slot: Slot) -> Response:
    prompts, n = given_prompts(body), body.n or 1
    mailbox = slot.take(served, len(prompts) * n)
    small = sum(map(len, prompts)) <= SMALL

    def prepared() -> tuple[list[Order], Extent]:
        orders = orders_of(served, body)
        return orders, extent(served, body, orders, n=n)

    orders, size = await slot.aside(prepared, small=small)
    slot.reserve(size)
    seed = secrets.randbits(48) if body.seed is None else body.seed
    # A model without memory has a window instead.
    forgets_after = orders[0].segment if served.remembers else None
    for number, order in enumerate(orders):
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
    prompt_tokens = sum(len(order.prompt) for order in orders)
    answer = Answer(served, mailbox, prompt_tokens=prompt_tokens, prompts=len(orders), n=n, likeliest=body.logprobs)
    return await _answer(answer, body, slot)


async def go_on(session: Session, body: Generation, slot: Slot) -> Response:
    """A session writes on from what it has read, and has then read what it wrote."""
    served, source = session.served, session.reader if session.tokens_read else None
    mailbox = slot.take(served)
    prompt = [] if source is not None else start_tokens(served.tokenizer, "")
    seed = secrets.randbits(48) if body.seed is None else body.seed
    text = session.text if source is not None else served.text_stream(prompt)
    order = Order(model=served.model, tokenizer=served.tokenizer, prompt=prompt, text=text, source=source)
    slot.reserve(extent(served, body, [order], n=1))
    writing = Writing(wish(body, seed=seed, segment=None, keep=True), served.tokenizer, mailbox=mailbox, index=0)
    served.write(order, [writing])
    answer = Answer(served, mailbox, prompt_tokens=len(prompt), prompts=1, n=1, likeliest=body.logprobs)
    return await _answer(answer, body, slot, session)


async def _answer(answer: Answer, body: Generation, slot: Slot, session: Session | None = None) -> Response:
    if body.stream:
        # The first event is waited for: what fails before any text is an answer with a status of its own.
        first = await slot.unless_gone(slot.next(answer.mailbox))
        usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _events(answer, slot, first, usage=usage, session=session)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    await slot.unless_gone(_whole(answer, slot, session))
    return await json_answer(answer.whole(), slot, figures=answer.figures)


async def _events(
    answer: Answer, slot: Slot, first: tuple[int, Event], *, usage: bool, session: Session | None
) -> AsyncIterator[str]:
    index, event = first
    try:
        while True:
            for line in answer.lines(index, event):
                yield line
                await asyncio.sleep(0)  # however much there is to tell, others have their turn
            _commit(session, event)
            if answer.ended == answer.choices:
                break
            index, event = await slot.next(answer.mailbox)
    except Refusal as refusal:
        yield sse(error_body(refusal.status, refusal.message))
        return
    if usage:
        yield answer.last_line()
    yield "data: [DONE]\n\n"


async def _whole(answer: Answer, slot: Slot, session: Session | None) -> None:
    while answer.ended < answer.choices:
        index, event = await slot.next(answer.mailbox)
        answer.keep(index, event)
        _commit(session, event)
        await asyncio.sleep(0)


def _commit(session: Session | None, event: Event) -> None:
    if session is not None and isinstance(event, Ended):
        assert event.state is not None
        session.reader, session.text = event.state
