"""Connections that only take up room, in a process of their own: python holding.py PORT IDLE UNREAD SECONDS

IDLE send nothing, UNREAD ask for much and never read it. For each that is closed another is opened. Prints, as JSON, how many there were."""

import json
import resource
import selectors
import socket
import sys
import time
from contextlib import suppress

MUCH = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 200
OPENED_AT_ONCE = 50
PAUSE_SECONDS = 0.05


def main(port: int, idle: int, unread: int, seconds: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    selector, wanted, opened = selectors.DefaultSelector(), [b""] * idle + [MUCH] * unread, 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for data in wanted[:OPENED_AT_ONCE]:
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                connection.setblocking(False)
                opened += 1
                with suppress(OSError):
                    connection.send(data)
                # What it was sent is never read: only its end is waited for.
                selector.register(connection, selectors.EVENT_READ if not data else selectors.EVENT_WRITE, data)
        del wanted[:OPENED_AT_ONCE]
        for key, _ in selector.select(timeout=PAUSE_SECONDS):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if key.data and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) and _open(connection):
                continue
            selector.unregister(connection)
            connection.close()
            wanted.append(key.data)
        time.sleep(PAUSE_SECONDS)
    print(json.dumps(opened))


def _open(connection: socket.socket) -> bool:
    """Whether the other side has not ended it, found without reading."""
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
