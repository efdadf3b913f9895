"""What a hostile request gets: 4xx, nothing of what it sent, nothing of the disk, and no work done for it (W4 to W8)."""

import json
import os
import random
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving_helpers import in_thread

from transformer_xl.batching.lanes import TextOptions
from transformer_xl.cli import main
from transformer_xl.serving.api import completions
from transformer_xl.serving.limits import Limits

MARK = "Zx7Marked"
"""Stands in everything that is sent; must stand in nothing that comes back."""


def request(body: bytes, *, path: str = "/v1/completions", headers: bytes = b"") -> bytes:
    length = str(len(body)).encode()
    return (
        b"POST " + path.encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: " + length + b"\r\n" + headers + b"\r\n" + body
    )


def with_value(value: str, *, field: str = "prompt") -> bytes:
    return f'{{"model": "small", "{field}": {value}, "user": "{MARK}"}}'.encode("utf-8", "surrogatepass")


ABUSE = {
    "1 MB of text": with_value(json.dumps(MARK * 120_000)),
    "1 MB of spaces": b" " * 1_000_000 + with_value('"x"'),
    "1 MB that lies about its length": with_value(json.dumps(MARK * 120_000)),
    "100,000 lists deep": with_value("[" * 100_000 + "]" * 100_000),
    "100,000 objects deep": with_value('{"a":' * 100_000 + "1" + "}" * 100_000),
    "30 lists deep": with_value("[" * 30 + "]" * 30),
    "NaN": with_value("NaN", field="temperature"),
    "Infinity": with_value("Infinity", field="temperature"),
    "-Infinity": with_value("-Infinity", field="top_p"),
    "1e400": with_value("1e400", field="temperature"),
    "-1e400": with_value("-1e400", field="temperature"),
    "a huge integer": with_value("9" * 4000, field="seed"),
    "an integer of 5,000 digits": with_value("9" * 5000, field="max_tokens"),
    "a lone surrogate": with_value(f'"{MARK}\\ud800"'),
    "a lone surrogate as a name": f'{{"model": "small", "{MARK}\\udfff": 1}}'.encode(),
    "raw surrogate bytes": with_value('"\ud800"'),
    "NUL escaped": with_value(f'"{MARK}\\u0000"'),
    "NUL raw": with_value(f'"{MARK}\0"'),
    "NUL in stop": f'{{"model": "small", "stop": "{MARK}\\u0000"}}'.encode(),
    "bytes that are no text": with_value('"x"') + b"\xff\xfe",
    "nothing": b"",
    "not JSON": MARK.encode(),
    "half of it": with_value('"x"')[:-5],
    "a list": b"[]",
    "a number": b"17",
    "null": b"null",
    "a string": f'"{MARK}"'.encode(),
    "an unknown field": f'{{"model": "small", "{MARK}<script>": "{MARK}"}}'.encode(),
    "an unknown model": f'{{"model": "{MARK}", "prompt": "x"}}'.encode(),
    **{
        f"{field} = {value}": with_value(value, field=field)
        for field, values in {
            "prompt": ("1", "null", "true", "{}", "[]", "[[]]", "[1, \"x\"]", "[-1]", "[256]", "[1.5]", "[[1], \"x\"]", "[true]"),
            "max_tokens": ("-1", "1.5", '"8"', "true", "[]", "16385", "0"),
            "temperature": ("-1", '"1"', "3", "true", "{}"),
            "top_p": ("0", "2", '"x"'),
            "top_k": ("-1", "1.5"),
            "n": ("0", "65", '"1"', "1e3"),
            "seed": ("-1", "1.5", '"x"', "18446744073709551616"),
            "stop": ('""', "1", '["a", 1]', json.dumps(["x"] * 17), json.dumps("x" * 257)),
            "logprobs": ("21", "-1", "true"),
            "stream": ("1", '"true"'),
            "echo": ("1",),
            "memory": ('"maybe"', "1"),
            "logit_bias": ('{"5": 1}',),
            "presence_penalty": ("0.5",),
            "suffix": ('"x"',),
        }.items()
        for value in values
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ABUSE)
def test_w4_abuse_is_answered_4xx_and_never_sent_back(server, name):
    data = request(ABUSE[name])
    if "lies" in name:
        data = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", data)
        head, _, body = data.partition(b"\r\n\r\n")
        parts = [body[start : start + 60_000] for start in range(0, len(body), 60_000)]
        data = head + b"\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    answer = server.raw(data)
    assert 400 <= int(answer.split(b" ", 2)[1]) < 500, answer[:300]
    assert MARK.encode() not in answer
    assert b"Traceback" not in answer


@pytest.mark.parametrize(
    "headers",
    [
        b"".join(b"X-%d: %s\r\n" % (number, MARK.encode()) for number in range(1000)),
        b"".join(b"X-%d: 1\r\n" % number for number in range(150)),
        b"X: " + MARK.encode() * 10_000 + b"\r\n",
        b"Host: " + MARK.encode() + b"\r\n",
        b"Origin: http://" + MARK.encode() + b"\r\n",
        b"Origin: null\r\n",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        MARK.encode() + b"\r\n",
    ],
    ids=["1,000", "150", "long", "two hosts", "evil origin", "null origin", "two lengths", "two framings", "no colon"],
)
def test_w4_abuse_by_headers_is_answered_4xx(server, headers):
    answer = server.raw(request(with_value('"x"'), headers=headers))
    assert 400 <= int(answer.split(b" ", 2)[1]) < 500, answer[:300]
    assert MARK.encode() not in answer


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "127.0.0.1:x", "user@127.0.0.1", "10.0.0.1"]
)
def test_a_name_that_is_not_ours_is_refused(server, host):
    answer = server.raw(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert answer.split(b" ", 2)[1] in (b"403", b"400")


def test_pages_talk_only_to_the_server_they_came_from(server):
    with server.client() as client:
        body = {"model": "small", "prompt": "x", "max_tokens": 1}
        for origin, status in ((server.address, 200), ("http://evil.example", 403), ("http://127.0.0.1:1", 403)):
            assert client.post("/v1/completions", json=body, headers={"Origin": origin}).status_code == status
        answer = client.get("/health")
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers
        plain = client.post("/v1/completions", content=json.dumps(body), headers={"Content-Type": "text/plain"})
        assert plain.status_code == 422, "a form of another page could send this without asking"


@pytest.mark.parametrize(
    ("examples", "phases"),
    [
        (2, "fuzzing"),
        pytest.param(1000, "examples,coverage,fuzzing", marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_w5_what_openapi_describes_is_what_happens(trained_run, tmp_path, monkeypatch, examples, phases):
    """Requests made from the server's own description, broken ones among them; of long texts only the beginning is written."""
    asked = completions.text_options

    def short(*arguments: Any, **options: Any) -> TextOptions:
        found = asked(*arguments, **options)
        return replace(found, tokens=min(found.tokens, 16))

    monkeypatch.setattr(completions, "text_options", short)
    (tmp_path / "saved").mkdir()
    report = tmp_path / "report.ndjson"
    limits = Limits(sessions=10_000)
    with in_thread(trained_run, sessions=tmp_path / "saved", limits=limits) as server:
        session, victim = (server.post("/v1/sessions", model="small").json()["id"] for _ in range(2))
        (tmp_path / "schemathesis.toml").write_text(
            f'[parameters]\n"path.session" = "{session}"\n[[operations]]\ninclude-method = "DELETE"\n'
            f'parameters = {{ "path.session" = "{victim}" }}\n'
        )
        command = [
            *(str(Path(sys.executable).with_name("st")), "run", f"{server.address}/openapi.json"),
            *("--max-examples", str(examples), "--mode", "all", "--phases", phases),
            *("--checks", "not_a_server_error,status_code_conformance", "--suppress-health-check", "all"),
            *("--seed", "1", "--no-color", "--report-ndjson-path", str(report), "--generation-database", "none"),
            *("--continue-on-failure", "--workers", "1", "--no-shrink"),
        ]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "NO_PROXY": "*"})
        answered = server.server.app.state.requests.answered
    print(ran.stdout[-3000:])
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    routes = {route for route, _ in answered if route.startswith("/v1")}
    assert len(routes) == 14, routes
    assert {status for _, status in answered} <= {200, 400, 404, 405, 409, 413, 422}
    assert {200, 422} <= {status for _, status in answered}
    if examples > 2:
        # Names of saved sessions, and positions within a text, are more than a schema can describe: they are guessed rarely or never.
        guessed = routes - {"/v1/sessions/restore", "/v1/sessions/saved/{name}", "/v1/attention"}
        assert all(answered[route, 200] for route in guessed), answered


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 65_537},
        {"prompt": [[1] * 40_000, [1] * 40_000]},
        {"prompt": "x" * 65_537},
        {"prompt": "x", "max_tokens": 16_385},
        {"prompt": "x", "n": 65},
        {"prompt": ["x"] * 60, "n": 2},
        {"prompt": ["x"] * 65},
    ],
    ids=["tokens", "tokens of two", "text", "max_tokens", "n", "prompts times n", "prompts"],
)
def test_w6_what_is_too_large_is_refused_before_the_model_runs(server, body):
    def work() -> list[float]:
        return [
            server.metric(name) for name in ("tokens_read_total", "tokens_written_total", "steps_total", "under_way")
        ]

    before = work()
    answer = server.post("/v1/completions", model="small", **body)
    assert answer.status_code == 422
    assert work() == before
    assert server.complete("x", max_tokens=2)
    assert work() != before, "this would have counted"


TRICKS = (
    "..",
    "%2e%2e",
    "..%2f",
    "%2e%2e%2f",
    "..%5c",
    "..\\",
    "....//",
    "%252e%252e",
    "..;",
    ".%00.",
    "%c0%ae%c0%ae",
    "..%c0%af",
)
PLACES = ("canary.txt", "etc/passwd", "proc/self/environ", "pyproject.toml", "serving/page_files.py", "config.json")


def tricks(count: int) -> list[str]:
    draw = random.Random(0)
    found = {"//", "/./", "/page.js/../../canary.txt", "/%00", "/page.js%00.html", "/v1/../canary.txt", "*", "/~root"}
    while len(found) < count:
        steps = [draw.choice(TRICKS) for _ in range(draw.randint(1, 9))]
        start = draw.choice(("/", "/v1/", "/page/", "//", "/v1/sessions/", "/static/", "/page.js/", "/.git/"))
        slash = draw.choice(("/", "%2f", "%5c", "//"))
        found.add(start + slash.join(steps) + slash + draw.choice(PLACES))
    return sorted(found)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_w7_no_path_leads_outside(trained_run, tmp_path, count):
    saved = tmp_path / "saved"
    saved.mkdir()
    canary = "never to be shown"
    (tmp_path / "canary.txt").write_text(canary)
    (tmp_path / "canary.txt.safetensors").write_text(canary)
    with in_thread(trained_run, sessions=saved) as server, server.client() as client:
        session = server.post("/v1/sessions", model="small").json()["id"]
        good = server.raw(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert good.startswith(b"HTTP/1.1 200")
        for path in tricks(count):
            answer = server.raw(b"GET " + path.encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert answer.split(b" ", 2)[1] in (b"404", b"400", b"405", b"422"), (path, answer[:200])
            for secret in (canary.encode(), b"root:", b"[project]", b"SCRIPTS"):
                assert secret not in answer
            for address in ("/v1/sessions/restore", f"/v1/sessions/{session}/save"):
                assert client.post(address, json={"name": path[:64]}).status_code == 422
        assert server.post(f"/v1/sessions/{session}/save", name="good").status_code == 200
    assert [path.name for path in saved.iterdir()] == ["good"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["canary.txt", "canary.txt.safetensors", "saved"]


def routes(server) -> list[tuple[str, str]]:
    described = server.get("/openapi.json").json()["paths"]
    found = [(method.upper(), path) for path, methods in described.items() for method in methods]
    return [*found, ("GET", "/openapi.json"), ("GET", "/nothing"), ("POST", "/v1/nothing"), ("GET", "/v1/models/")]


def test_w8_only_health_and_the_page_are_open(trained_run):
    with in_thread(trained_run, key="the right key") as server:
        session = server.post("/v1/sessions", model="small").json()["id"]
        checked = routes(server)
        assert len(checked) > 18
        with server.client() as client:
            right = client.headers["Authorization"]
            for method, path in checked:
                address = path.replace("{session}", session)
                for wrong in (
                    "",
                    "Bearer",
                    "Bearer wrong",
                    "Bearer the right ke",
                    f"{right}x",
                    f"Basic {right[7:]}",
                    right[7:],
                ):
                    status = client.request(method, address, headers={"Authorization": wrong}).status_code
                    assert status == (200 if path == "/health" else 401), (method, path, wrong)
                assert client.request(method, address).status_code not in (401, 403)
            for path in ("/", "/page.js", "/page.css"):
                assert client.get(path, headers={"Authorization": ""}).status_code in (200, 404)
            assert client.request("GET", "/%2e%2e/v1/models", headers={"Authorization": ""}).status_code == 401
            assert client.request("GET", "//health/../v1/models", headers={"Authorization": ""}).status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_w8_a_public_bind_without_a_key_refuses_to_start(trained_run, host, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("TXL_API_KEY", raising=False)
    assert main(["serve", str(trained_run), "--host", host, "--port", "0"]) == 2
    told = capsys.readouterr().err.strip()
    assert told.count("\n") == 0
    assert host in told
    assert "--api-key-file" in told
    (tmp_path / "key").write_text("\n")
    assert main(["serve", str(trained_run), "--host", host, "--api-key-file", str(tmp_path / "key")]) == 2
    assert "is empty" in capsys.readouterr().err


def test_a_key_is_no_word_of_the_command_line(capsys):
    assert main(["serve", "x", "--api-key", "secret"]) == 2
    assert "did you mean --api-key-file?" in capsys.readouterr().err


def test_a_missing_run_or_folder_is_one_sentence(trained_run, tmp_path, capsys):
    assert main(["serve", str(tmp_path / "none")]) == 2
    assert main(["serve", str(trained_run), "--sessions", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_nothing_is_read_after_a_request_that_ends_in_two_ways(server):
    """What one server reads as its body, another reads as the next request."""
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    head = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = (
        b"POST /v1/completions HTTP/1.1\r\n"
        + head
        + both
        + b"\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request)
        found = b""
        while part := connection.recv(65536):
            found += part
    assert found.startswith(b"HTTP/1.1 400")
    assert found.count(b"HTTP/1.1") == 1
