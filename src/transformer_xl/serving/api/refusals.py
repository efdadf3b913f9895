"""Answers that are errors, in OpenAI's shape. Nothing that was sent is ever sent back: only names that we gave."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from transformer_xl.serving.api.bodies import FIELDS
from transformer_xl.serving.http.aside import Gone, aside, busy, unless_gone
from transformer_xl.serving.limits import PROMPT_TOKENS, SMALL

log = logging.getLogger("transformer_xl.serving")

SAYINGS = {
    400: "the request's body is not valid JSON; send UTF-8 without NaN, infinite numbers or nesting beyond 20 levels",
    401: "this server needs a key; send it as Authorization: Bearer KEY",
    403: "requests to this host name or from this origin are refused; start the server with --allow-host to allow another name",
    404: "there is nothing here; GET /openapi.json lists what there is",
    405: "this method is not for this address; GET /openapi.json lists what there is",
    409: "this cannot be done now",
    413: "the request's body is too large; send at most 512 KiB, a longer text in pieces to a session",
    422: "the request's body does not fit; GET /openapi.json describes it",
    429: "the server is full; try again after the seconds that Retry-After says",
    431: "the request has too many headers; or too long an address; send at most 100, of 16 KiB together with the address, which has at most 8 KiB",
    500: "the server failed on this request",
    503: "the server is stopping; try again at another one",
    504: "the request took too long; ask for less, or try again",
}
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
NOT_KNOWN = "has a field that is not known; GET /openapi.json lists those that are"
RETRY_SECONDS = "1"
DEEPEST = 20
LEFT = 499
"""What a client that left is counted as; nobody reads it."""


class Refusal(Exception):
    def __init__(self, status: int, message: str | None = None) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message


def error_body(status: int, message: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message = message or SAYINGS.get(status, "the request was refused")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_answer(status: int, message: str | None = None) -> Response:
    headers = {"Retry-After": RETRY_SECONDS} if status in (429, 503) else {}
    headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse(error_body(status, message), status_code=status, headers=headers)


def install(app: FastAPI) -> None:
    """Every way in which a request can fail ends here."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return error_answer(error.status, error.message)

    @app.exception_handler(Gone)
    async def gone(request: Request, error: Gone) -> Response:
        return error_answer(LEFT)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        answer = error_answer(error.status_code)
        if allow := (error.headers or {}).get("Allow"):
            answer.headers["Allow"] = allow
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_answer(422, sentences(error.errors()))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_answer(500)


def sentences(errors: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(dict.fromkeys(map(sentence, errors[:4])))


def sentence(error: Mapping[str, Any]) -> str:
    """What is wrong, from where it is wrong and which rule it breaks: pydantic's own messages hold rules, never values."""
    names = [str(part) for part in error["loc"] if part in FIELDS]
    where = ".".join(names) or "the body"
    if error["type"] == "extra_forbidden":
        return f"{where}: {NOT_KNOWN}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message[:1].lower()}{message[1:]}"


class StrictRequest(Request):
    """Reads JSON as the standard has it, and checks what it says: all beside the event loop, where it is not small."""

    kind: type[BaseModel] | None = None
    """Of what its body must be."""

    async def json(self) -> Any:
        body = await self.body()
        small = len(body) <= SMALL
        if not small:  # whoever would not be let in with what it says need not say it
            self.app.state.admission.check()
            if busy():
                raise Refusal(429)
        reading = aside(lambda: read_body(body, self.kind), small=small)
        return await (reading if small else unless_gone(self.receive, reading))


def read_body(body: bytes, kind: type[BaseModel] | None) -> Any:
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
        _check(value, DEEPEST)
    except (ValueError, RecursionError):
        raise Refusal(400) from None
    try:
        return value if kind is None else kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise Refusal(422, sentences(found)) from None


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()
        kind: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def strictly(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            strict.kind = kind
            try:
                return await handle(strict)
            except HTTPException as error:
                if isinstance(error.__cause__, Refusal | Gone):  # the framework calls whatever a body raises unreadable
                    raise error.__cause__ from None
                raise

        return strictly


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(digits)
    return value


def _check(value: Any, depth: int) -> None:
    """Neither too deep, nor with half characters, nor with NUL in a name or a text; integers are no longer than a machine's."""
    if depth < 0:
        raise ValueError("depth")
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError("integer")
    elif isinstance(value, dict):
        if len(value) > len(FIELDS):
            raise Refusal(422, f"the body: {NOT_KNOWN}")
        for name, item in value.items():
            name.encode("utf-8")
            _check(item, depth - 1)
    elif isinstance(value, list):
        if len(value) > PROMPT_TOKENS:
            raise Refusal(422, f"the body: a list is longer than {PROMPT_TOKENS:,}; send less at a time")
        for item in value:
            _check(item, depth - 1)
