"""How long /health takes, asked again and again from a process of its own: python watching.py PORT

Until its input ends. Prints, as JSON, the seconds that each answer took; an answer that never came took as long as was waited for it."""

import json
import select
import socket
import sys
import time
from contextlib import suppress

HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
PAUSE_SECONDS = 0.02
PATIENCE_SECONDS = 20.0


def ask(port: int) -> float:
    started_at, answer = time.monotonic(), b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(HEALTH)
        while part := connection.recv(4096):
            answer += part
    return time.monotonic() - started_at if b'{"status":"ok"' in answer else PATIENCE_SECONDS


def main(port: int) -> None:
    taken = [ask(port)]
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        taken.append(ask(port))
    print(json.dumps(taken))


if __name__ == "__main__":
    main(int(sys.argv[1]))
