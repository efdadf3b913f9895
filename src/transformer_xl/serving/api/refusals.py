"""Answers that are errors, in OpenAI's shape. Nothing that was sent is ever sent back: only names that we gave."""

from typing import Any

from starlette.responses import JSONResponse, Response

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
RETRY_SECONDS = "1"


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
