"""Several servers as one: a session's id says whose it is, and what is saved in a folder that they share outlives them. And what they count and log."""

import json
import re
import time
from itertools import pairwise

import pytest
from serving_helpers import in_process, in_thread

from transformer_xl.errors import InputError
from transformer_xl.serving.http.gate import BOUNDS_SECONDS, Histogram
from transformer_xl.serving.http.logs import LinesAside


def test_another_replica_goes_on_with_a_session_whose_server_died(trained_run, tmp_path):
    saved = tmp_path / "saved"
    saved.mkdir(mode=0o700)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    def replica(name):
        options = ("--sessions", str(saved), "--replica", f"serve-{name}", "--log-requests")
        return in_process(trained_run, folder=tmp_path / name, options=options)

    more = {"max_tokens": 20, "seed": 5, "temperature": 1.0}
    with replica("a") as first, replica("b") as second:
        opened = first.post("/v1/sessions", model=first.models[0]).json()["id"]
        assert re.fullmatch("serve-a-[0-9a-f]{32}", opened)
        assert first.post(f"/v1/sessions/{opened}/feed", text="the cat sat ").status_code == 200
        assert first.post(f"/v1/sessions/{opened}/save", name="novel").status_code == 200
        expected = first.post(f"/v1/sessions/{opened}/generate", **more).json()["choices"][0]["text"]
        first.process.kill()
        first.process.wait()

        assert second.post(f"/v1/sessions/{opened}/generate", **more).status_code == 404  # its memory died with it
        restored = second.post("/v1/sessions/restore", name="novel").json()
        assert restored["id"].startswith("serve-b-")
        assert restored["tokens_read"] == len("the cat sat ")
        written = second.post(f"/v1/sessions/{restored['id']}/generate", **more).json()["choices"][0]["text"]
        assert written == expected

        until = time.monotonic() + 10
        while second.errors.read_text().count("generate") < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
        lines = [json.loads(line) for line in second.errors.read_text().splitlines() if line.startswith("{")]
    answers = [line for line in lines if line["route"] == "/v1/sessions/{session}/generate"]
    assert [line["status"] for line in answers] == [404, 200]
    assert all(0 < line["first_byte_seconds"] <= line["seconds"] for line in answers)
    assert all(line["bytes_sent"] > 0 for line in answers)
    told = second.errors.read_text()
    assert opened not in told
    assert "novel" not in told  # nothing that was sent


@pytest.mark.parametrize("name", ["Serve", "-a", "a-", "a.b", "a/b", "", "a" * 64])
def test_a_replica_has_the_name_of_a_host(name, trained_run):
    with pytest.raises(InputError, match="is no name of a host"), in_thread(trained_run, replica=name):
        pass


def test_latencies_are_counted_in_buckets(server):
    for tokens in (1, 5):
        server.complete("the ", max_tokens=tokens)
    server.post("/v1/completions", model="nobody", prompt="x")
    lines = server.get("/metrics").text.splitlines()
    for name in ("txl_request_seconds", "txl_first_byte_seconds"):
        assert f"# TYPE {name} histogram" in lines
        of_route = '{route="/v1/completions"'
        buckets = [line for line in lines if line.startswith(f"{name}_bucket{of_route}")]
        bounds = [re.search('le="(.*)"', line)[1] for line in buckets]
        counts = [int(line.rsplit(" ", 1)[1]) for line in buckets]
        assert bounds == [*map(str, BOUNDS_SECONDS), "+Inf"]
        assert all(low <= high for low, high in pairwise(counts))
        (count,) = [int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}_count{of_route}")]
        (total,) = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}_sum{of_route}")]
        assert counts[-1] == count >= 3
        assert total > 0
    assert sum(float(line.rsplit(" ", 1)[1]) for line in lines if "_seconds_sum" in line and "first" in line) <= sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if "_seconds_sum" in line and "request" in line
    )


def test_a_value_at_a_bound_is_below_it():
    histogram = Histogram()
    for value in (0.0, BOUNDS_SECONDS[0], BOUNDS_SECONDS[0] * 1.01, BOUNDS_SECONDS[-1], 1e9):
        histogram.add(value)
    assert (histogram.counts[0], histogram.counts[1], histogram.counts[-2], histogram.counts[-1]) == (2, 1, 1, 1)


def test_lines_that_nobody_reads_hold_nobody_up(monkeypatch):
    monkeypatch.setattr("transformer_xl.serving.http.logs.MOST_LINES", 3)
    monkeypatch.setattr(LinesAside, "_write", lambda self: None)
    lines = LinesAside()
    for number in range(10):
        lines(str(number))
    assert (lines._waiting.qsize(), lines._left_out) == (3, 7)
