"""What a request passes before anything looks at what it wants: its host and origin, its key, its headers. And what every answer carries."""

import hashlib
import hmac
import json
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transformer_xl.serving.limits import HEADER_BYTES, HEADERS, TARGET_BYTES

BOUNDS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Of the buckets that times are counted in; the last is the longest that a request may take, unless told otherwise."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::", "")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
ALWAYS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


class Histogram:
    """How many values lie at or below each bound, and what they come to."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        """Of values in each bucket alone, those beyond the last bound in the last."""
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS_SECONDS, value)] += 1
        self.sum += value


class Requests:
    """Answers by route and status, how long they took, and how long until their first byte. With `log`, a line of JSON for each."""

    def __init__(self, *, log: Callable[[str], None] | None = None) -> None:
        self.answered: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.first_byte_seconds: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._log = log

    def add(
        self, route: str, status: int, *, seconds: float, first_byte_seconds: float | None, bytes_sent: int
    ) -> None:
        self.answered[route, status] += 1
        self.seconds[route].add(seconds)
        if first_byte_seconds is not None:
            self.first_byte_seconds[route].add(first_byte_seconds)
        if self._log is not None:
            # The route's own name, not what was asked for: nothing that was sent is written down.
            facts = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "route": route, "status": status}
            first = None if first_byte_seconds is None else round(first_byte_seconds, 4)
            times = {"seconds": round(seconds, 4), "first_byte_seconds": first, "bytes_sent": bytes_sent}
            self._log(json.dumps(facts | times))


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        allowed: Sequence[str],
        key: str | None,
        open_: Collection[str],
        refuse: Callable[[int], Response],
        requests: Requests,
    ) -> None:
        """`open_`: paths that need no key. `refuse` makes the answer that has a status."""
        self.app, self.requests = app, requests
        self._open, self._refuse = open_, refuse
        self._key = None if key is None else _digest(key.encode())
        names = {host.lower(), *map(str.lower, allowed)} - set(EVERYWHERE)
        self._names = names | set(LOOPBACK) if is_loopback(host) or host in EVERYWHERE else names
        self._everywhere = host in EVERYWHERE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_at, status, sent = time.monotonic(), 499, 0
        first_byte_seconds: float | None = None

        async def told(message: Message) -> None:
            nonlocal status, sent, first_byte_seconds
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                for name, value in ALWAYS.items():
                    headers[name] = value
                message = {**message, "headers": headers.raw}
            elif body := message.get("body"):
                sent += len(body)
                if first_byte_seconds is None:
                    first_byte_seconds = time.monotonic() - started_at
            await send(message)

        try:
            if refused := self._refused(scope):
                answer = self._refuse(refused)
                if refused == 400:  # nobody knows where this request ends, so nothing after it is read
                    answer.headers["Connection"] = "close"
                await answer(scope, receive, told)
            else:
                await self.app(scope, receive, told)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.monotonic() - started_at
            self.requests.add(route, status, seconds=seconds, first_byte_seconds=first_byte_seconds, bytes_sent=sent)

    def _refused(self, scope: Scope) -> int | None:
        headers = scope["headers"]
        target = len(scope["raw_path"]) + len(scope["query_string"])
        size = target + sum(len(name) + len(value) for name, value in headers)
        if len(headers) > HEADERS or size > HEADER_BYTES or target > TARGET_BYTES:
            return 431
        # Two ways to tell where the body ends: what one server reads as one request, another reads as two.
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            return 400
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._known(hosts[0].decode("latin-1"), scope):
            return 403
        # A page may talk to the server that it came from.
        own = [f"{scheme}://{hosts[0].decode('latin-1')}".lower() for scheme in ("http", "https")]
        if any(name == b"origin" and value.decode("latin-1").lower() not in own for name, value in headers):
            return 403
        scope["has_key"] = self._key is None or self._has_key(headers)
        if scope["path"] not in self._open and not scope["has_key"]:
            return 401
        return None

    def _known(self, host: str, scope: Scope) -> bool:
        """A page elsewhere whose name was made to lead here (DNS rebinding) names itself, and is not known."""
        name = _hostname(host)
        own = (scope.get("server") or ("",))[0] if self._everywhere else None
        return name is not None and (name in self._names or name == own)

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        assert self._key is not None
        given = [value for name, value in headers if name == b"authorization"]
        sent = given[0] if len(given) == 1 else b""
        scheme, _, key = sent.partition(b" ")
        # Digests are compared, in constant time: how much of a key is right, or how long it is, takes no time to tell.
        return hmac.compare_digest(_digest(key.strip()), self._key) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _hostname(host: str) -> str | None:
    """Of a name and perhaps a port, and nothing else of an address."""
    if set(host) & set("/?#@\\"):
        return None
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
        return parts.hostname
    except ValueError:
        return None
