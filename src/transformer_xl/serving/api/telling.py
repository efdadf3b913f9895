"""Texts and their figures as OpenAI's API tells them. Comes from events; knows no connection."""

import secrets
import time
from collections.abc import Iterator
from io import StringIO
from typing import Any

from transformer_xl.batching.events import Ended, Event, Figures, Mailbox, Wrote
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.http.sending import (
    Encoded,
    encoded_list,
    encoded_text,
    json_name,
    json_number,
    json_pieces,
    json_text,
)

FIGURE_BYTES = 48
"""At most, of one figure in JSON beside its token's name."""


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
        text = encoded_text(part.text.getvalue() for part in (echo, drawn))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._reasons[index]}

    def lines(self, index: int, event: Event) -> Iterator[str]:
        """An event as a stream tells it, once for each text that it belongs to."""
        self._count(event)
        choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        if isinstance(event, Ended):
            yield self._line({**choice, "finish_reason": event.reason})
        elif isinstance(event, Wrote):
            echo, logprobs = self._echoes[index], "null"
            if self.likeliest is not None:
                before = echo.characters if event.drawn else 0
                logprobs = "".join(json_pieces(self._logprobs((event.figures or Figures(), before))))
            echo.characters += 0 if event.drawn else len(event.text)
            for place in range(index, index + event.texts):
                told = Encoded(iter((logprobs,)))
                yield self._line({**choice, "index": place, "text": event.text, "logprobs": told})

    def last_line(self) -> str:
        """How many tokens there were."""
        return sse(self._body([], usage=True))

    def _line(self, choice: dict[str, Any]) -> str:
        return sse(self._body([choice], usage=False))

    def _count(self, event: Event) -> None:
        assert isinstance(event, Wrote | Ended)
        if isinstance(event, Ended):
            self.ended += 1
        else:
            self.drawn += event.drawn

    def _logprobs(self, *parts: tuple[Figures, int]) -> dict[str, Any]:
        """Of figures that stand so many characters after the beginning of their text."""
        tokenizer = self.served.tokenizer

        def tops(figures: Figures, place: int) -> str:
            named = {json_name(tokenizer, token): value for token, value in figures.likeliest_at(place)}
            return f"{{{','.join(f'{name}:{value!r}' for name, value in named.items())}}}" if named else "null"

        columns = {
            "tokens": (json_name(tokenizer, token) for figures, _ in parts for token in figures.token),
            "token_ids": (str(token) for figures, _ in parts for token in figures.token),
            "token_logprobs": (json_number(value) for figures, _ in parts for value in figures.log_probability),
            "top_logprobs": (tops(figures, place) for figures, _ in parts for place in range(len(figures))),
            "text_offset": (str(before + start) for figures, before in parts for start in figures.start),
        }
        encoded: dict[str, Any] = {name: encoded_list(items) for name, items in columns.items()}
        return encoded if self.likeliest else {**encoded, "top_logprobs": None}

    def _body(self, choices: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]:
        body = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
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


def sse(value: Any) -> str:
    return f"data: {''.join(json_pieces(value))}\n\n"
