"""Slow-loris connections, in a process of their own so that they slow nobody down but the server: python loris.py PORT COUNT SECONDS

Each sends a byte a second of something that never ends. Prints, as JSON, how long each lived; one that lives longer than SECONDS is left out."""

import json
import selectors
import socket
import sys
import time
from contextlib import suppress

HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
KINDS = (
    HEAD + b"X-A: b\r\n",  # headers that never end
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 400\r\n\r\n{",
    HEAD + b"\r\nGET /health HTTP/1.1\r\nHost:",  # a good request, then one that never ends
    b"",  # nothing at all
)


TURNS = 20
"""A second has so many: not all send their byte at once."""


def main(port: int, count: int, seconds: float) -> None:
    selector, opened, lived = selectors.DefaultSelector(), dict[socket.socket, float](), list[float]()
    for number in range(count):
        connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        connection.sendall(KINDS[number % len(KINDS)])
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        opened[connection] = time.monotonic()
    turn, next_byte = 0, time.monotonic()
    while opened and time.monotonic() - min(opened.values()) < seconds:
        for key, _ in selector.select(timeout=max(0.0, next_byte - time.monotonic())):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            try:
                alive = bool(connection.recv(65536))
            except ConnectionError:
                alive = False
            if not alive:
                lived.append(time.monotonic() - opened.pop(connection))
                selector.unregister(connection)
                connection.close()
        if time.monotonic() >= next_byte:
            turn, next_byte = turn + 1, next_byte + 1 / TURNS
            for connection in list(opened)[turn % TURNS :: TURNS]:
                with suppress(OSError):
                    connection.send(b"x")
    print(json.dumps(lived))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
