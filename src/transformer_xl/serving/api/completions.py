"""Texts as OpenAI's API asks for them and gives them: whole, or as they are drawn."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from io import StringIO
from typing import Any

from fastapi.responses import Response, StreamingResponse

from transformer_xl.batching.events import Ended, Event, Figures, Mailbox, Wrote
from transformer_xl.batching.lanes import TextOptions
from transformer_xl.batching.learning import Learner
from transformer_xl.batching.requests import Prompt, WriteRequest
from transformer_xl.decoding import Sampling, start_tokens
from transformer_xl.errors import InputError
from transformer_xl.serving.api.admission import Extent, Ticket
from transformer_xl.serving.api.bodies import Completion, Generation
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.api.refusals import Refusal, error_body
from transformer_xl.serving.api.sessions import Session
from transformer_xl.serving.api.texts import TOO_LONG, UNKNOWN, checked, json_name, longest_name
from transformer_xl.serving.http.aside import SMALL
from transformer_xl.serving.http.sending import Encoded, json_answer, json_list, json_pieces, json_quoted, json_text
from transformer_xl.serving.limits import PROMPT_TOKENS

FIGURE_BYTES = 48
"""At most, of one figure in JSON beside its token's name."""
COLDEST = 1e-4
"""Below it the likeliest token is all that is left, and dividing by it would leave no numbers."""


def text_options(body: Generation, *, seed: int, segment: int | None, keep: bool) -> TextOptions:
    stop = body.stop or ()
    temperature = 1.0 if body.temperature is None else body.temperature
    temperature = temperature if temperature >= COLDEST else 0.0
    return TextOptions(
        sampling=Sampling(temperature=temperature, top_p=body.top_p or 1.0, top_k=body.top_k or 0, seed=seed),
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


def read_prompts(served: Served, body: Completion) -> list[Prompt]:
    segment, prompts = served.forgets_after(body.memory), list[Prompt]()
    for given in given_prompts(body):
        if isinstance(given, str):
            try:
                tokens = start_tokens(served.tokenizer, given)
            except InputError:
                raise Refusal(422, f"prompt: {UNKNOWN}") from None
        else:
            tokens = checked(served.tokenizer, given)
        if sum(len(prompt.tokens) for prompt in prompts) + len(tokens) > PROMPT_TOKENS:
            raise Refusal(422, f"prompt: {TOO_LONG}")
        echo = None
        if body.echo:
            echo = given if isinstance(given, str) else served.tokenizer.decode(tokens)
        text = served.text_stream(tokens)
        prompts.append(
            Prompt(model=served.model, tokenizer=served.tokenizer, tokens=tokens, text=text, echo=echo, segment=segment)
        )
    return prompts


def extent(served: Served, body: Generation, prompts: Sequence[Prompt], *, n: int) -> Extent:
    """How much the answer can come to."""
    told = sum(len(prompt.tokens) for prompt in prompts if prompt.echo is not None)
    new = len(prompts) * (16 if body.max_tokens is None else body.max_tokens)
    each, longest = 1 + (body.logprobs or 0), longest_name(served.tokenizer)
    size = n * (sum(len(json_text(prompt.echo)) for prompt in prompts if prompt.echo is not None) + new * longest)
    figures = (told + new) * each * n
    if body.logprobs is not None:
        size += figures * (longest + FIGURE_BYTES)
    return Extent(figures=figures, kept=(told + new * n) * each, size=size)


class Part:
    """Of a text: a prompt that is told too, once for all that go on from it; or what was drawn."""

    def __init__(self) -> None:
        self.text = StringIO()
        """As it stands in JSON."""
        self.characters = 0
        self.figures = Figures()

    def add(self, event: Wrote) -> None:
        self.text.write(json_text(event.text))
        self.characters += len(event.text)
        if event.figures is not None:
            self.figures.extend(event.figures)


class Answer:
    """One request's texts, as far as they are known: kept until all are there, or told as they come."""

    def __init__(
        self, served: Served, mailbox: Mailbox, *, prompt_tokens: int, prompts: int, n: int, likeliest: int | None
    ) -> None:
        self.served, self.mailbox, self.prompt_tokens, self.likeliest = served, mailbox, prompt_tokens, likeliest
        self.choices, self.drawn, self.ended = prompts * n, 0, 0
        self._id, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self._echoes = [echo for echo in [Part() for _ in range(prompts)] for _ in range(n)]
        self._parts = [Part() for _ in range(self.choices)]
        self._reasons: list[str | None] = [None] * self.choices

    def keep(self, index: int, event: Event) -> None:
        self._count(event)
        if isinstance(event, Ended):
            self._reasons[index] = event.reason
        elif isinstance(event, Wrote):
            (self._parts if event.drawn else self._echoes)[index].add(event)

    def whole(self) -> dict[str, Any]:
        return self._body([self._choice(index) for index in range(self.choices)], usage=True)

    @property
    def figures(self) -> int:
        parts = (*self._parts, *self._echoes)
        return sum(part.characters + len(part.figures) + len(part.figures.likeliest) for part in parts)

    def _choice(self, index: int) -> dict[str, Any]:
        echo, drawn = self._echoes[index], self._parts[index]
        logprobs = None
        if self.likeliest is not None:
            logprobs = self._logprobs((echo.figures, 0), (drawn.figures, echo.characters))
        text = Encoded(json_quoted(part.text.getvalue() for part in (echo, drawn)))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._reasons[index]}

    def lines(self, index: int, event: Event) -> Iterator[str]:
        """An event as a stream tells it, once for each text that it belongs to."""
        self._count(event)
        choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        if isinstance(event, Ended):
            yield sse(self._body([{**choice, "finish_reason": event.reason}], usage=False))
        elif isinstance(event, Wrote):
            echo, logprobs = self._echoes[index], "null"
            if self.likeliest is not None:
                before = echo.characters if event.drawn else 0
                logprobs = "".join(json_pieces(self._logprobs((event.figures or Figures(), before))))
            echo.characters += 0 if event.drawn else len(event.text)
            for place in range(index, index + event.texts):
                told = Encoded(iter((logprobs,)))
                choice |= {"index": place, "text": event.text, "logprobs": told}
                yield sse(self._body([choice], usage=False))

    def last_line(self) -> str:
        """How many tokens there were."""
        return sse(self._body([], usage=True))

    def _count(self, event: Event) -> None:
        assert isinstance(event, Wrote | Ended)
        if isinstance(event, Ended):
            self.ended += 1
        else:
            self.drawn += event.drawn

    def _logprobs(self, *parts: tuple[Figures, int]) -> dict[str, Any]:
        """Of figures that stand so many characters after the beginning of their text."""
        tokenizer = self.served.tokenizer

        def number(value: float) -> str:
            return repr(value) if value == value else "null"  # NaN: there is none

        def tops(figures: Figures, place: int) -> str:
            named = {json_name(tokenizer, token): value for token, value in figures.likeliest_at(place)}
            return f"{{{','.join(f'{name}:{value!r}' for name, value in named.items())}}}" if named else "null"

        columns = {
            "tokens": (json_name(tokenizer, token) for figures, _ in parts for token in figures.token),
            "token_ids": (str(token) for figures, _ in parts for token in figures.token),
            "token_logprobs": (number(value) for figures, _ in parts for value in figures.log_probability),
            "top_logprobs": (tops(figures, place) for figures, _ in parts for place in range(len(figures))),
            "text_offset": (str(before + start) for figures, before in parts for start in figures.start),
        }
        encoded: dict[str, Any] = {name: Encoded(json_list(items)) for name, items in columns.items()}
        return encoded if self.likeliest else {**encoded, "top_logprobs": None}

    def _body(self, choices: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]:
        about = {"id": self._id, "object": "text_completion", "created": self._created, "model": self.served.name}
        given, drawn = self.prompt_tokens, self.drawn
        counts = {"prompt_tokens": given, "completion_tokens": drawn, "total_tokens": given + drawn}
        return {**about, "choices": choices, **({"usage": counts} if usage else {})}


def sse(value: Any) -> str:
    return f"data: {''.join(json_pieces(value))}\n\n"


async def complete(served: Served, body: Completion, ticket: Ticket) -> Response:
    given, n = given_prompts(body), body.n or 1
    mailbox = ticket.take(served, len(given) * n)

    def prepared() -> tuple[list[Prompt], Extent]:
        prompts = read_prompts(served, body)
        return prompts, extent(served, body, prompts, n=n)

    prompts, size = await ticket.aside(prepared, small=sum(map(len, given)) <= SMALL)
    ticket.reserve(size)
    seed = secrets.randbits(48) if body.seed is None else body.seed
    # A model without memory has a window instead.
    forgets_after = prompts[0].segment if served.remembers else None
    options = [text_options(body, seed=seed + choice, segment=forgets_after, keep=False) for choice in range(n)]
    for number, prompt in enumerate(prompts):
        served.submit(WriteRequest(prompt, options, mailbox=mailbox, index=number * n))
    prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
    answer = Answer(served, mailbox, prompt_tokens=prompt_tokens, prompts=len(prompts), n=n, likeliest=body.logprobs)
    return await _answer(answer, body, ticket)


async def go_on(session: Session, body: Generation, ticket: Ticket) -> Response:
    """A session writes on from what it has read, and has then read what it wrote."""
    served, begun, learns = session.served, session.tokens_read > 0, isinstance(session.reader, Learner)
    source = session.reader if begun or learns else None
    mailbox = ticket.take(served)
    tokens = [] if begun else start_tokens(served.tokenizer, "")
    seed = secrets.randbits(48) if body.seed is None else body.seed
    text = session.text if begun else served.text_stream(tokens)
    prompt = Prompt(model=served.model, tokenizer=served.tokenizer, tokens=tokens, text=text, source=source)
    ticket.reserve(extent(served, body, [prompt], n=1))
    options = text_options(body, seed=seed, segment=None, keep=not learns)
    served.submit(WriteRequest(prompt, [options], mailbox=mailbox))
    answer = Answer(served, mailbox, prompt_tokens=len(tokens), prompts=1, n=1, likeliest=body.logprobs)
    return await _answer(answer, body, ticket, session)


async def _answer(answer: Answer, body: Generation, ticket: Ticket, session: Session | None = None) -> Response:
    if body.stream:
        # The first event is waited for: what fails before any text is an answer with a status of its own.
        first = await ticket.unless_gone(ticket.next(answer.mailbox))
        usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _events(answer, ticket, first, usage=usage, session=session)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    await ticket.unless_gone(_whole(answer, ticket, session))
    return await json_answer(answer.whole(), ticket.request.receive, figures=answer.figures)


async def _events(
    answer: Answer, ticket: Ticket, first: tuple[int, Event], *, usage: bool, session: Session | None
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
            index, event = await ticket.next(answer.mailbox)
    except Refusal as refusal:
        yield sse(error_body(refusal.status, refusal.message))
        return
    if usage:
        yield answer.last_line()
    yield "data: [DONE]\n\n"


async def _whole(answer: Answer, ticket: Ticket, session: Session | None) -> None:
    while answer.ended < answer.choices:
        index, event = await ticket.next(answer.mailbox)
        answer.keep(index, event)
        _commit(session, event)
        await asyncio.sleep(0)


def _commit(session: Session | None, event: Event) -> None:
    if session is not None and isinstance(event, Ended):
        assert event.state is not None
        session.reader, session.text = event.state
