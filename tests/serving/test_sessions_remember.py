"""Sessions: a text in any number of calls is the text in one call, memory is bounded, and what does not end well changes nothing."""

import random
import time

import pytest
from serving_helpers import events, in_thread

from transformer_xl.serving.limits import Limits


def open_session(server) -> str:
    answer = server.post("/v1/sessions", model="small")
    assert answer.status_code == 200
    return f"/v1/sessions/{answer.json()['id']}"


def some_text(length: int) -> str:
    return "".join(random.Random(0).choices("abcdefgh {}[]\n", k=length))


def pieces_of(text: str, most: int) -> list[str]:
    draw, pieces = random.Random(1), []
    while text:
        size = draw.randint(1, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def memory_kb(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@pytest.mark.parametrize(
    ("tokens", "most", "at_once"),
    [(3_000, 200, 3_000), pytest.param(100_000, 4_000, 50_000, marks=pytest.mark.slow)],
)
def test_a_session_fed_in_pieces_says_what_one_call_says_and_stays_flat(process, tokens, most, at_once):
    """One call takes 65,536 tokens at most: of a longer text, two calls."""
    text, whole, pieced = some_text(tokens), list[float](), list[float]()
    session = open_session(process)
    for start in range(0, tokens, at_once):
        fed = process.post(f"{session}/feed", text=text[start : start + at_once], logprobs=True)
        assert fed.status_code == 200, fed.text
        whole += fed.json()["logprobs"]
    other, sizes = open_session(process), list[int]()
    for piece in pieces_of(text, most):
        fed = process.post(f"{other}/feed", text=piece, logprobs=True)
        pieced += fed.json()["logprobs"]
        sizes.append(memory_kb(process.process.pid))
    assert whole[0] is None
    assert pieced[0] is None
    assert len(pieced) == tokens
    difference = max(abs(a - b) for a, b in zip(whole[1:], pieced[1:], strict=True))
    print(f"{tokens:,} tokens in {len(sizes)} pieces: at most {difference:.1e} apart")
    assert difference < 1e-4
    shown = process.get(other).json()
    assert shown["tokens_read"] == tokens
    assert shown["memory"] == {"used": 12, "length": 12}
    tenth = len(sizes) // 10
    early, late = max(sizes[tenth : 2 * tenth]), max(sizes[-tenth:])
    print(f"memory {early / 1000:.1f} MB after a tenth, {late / 1000:.1f} MB at the end")
    assert late < early + 8_000
    for path in (session, other):
        with process.client() as client:
            assert client.delete(path).json()["deleted"]


def test_a_session_has_read_what_it_wrote(server):
    session = open_session(server)
    server.post(f"{session}/feed", text="def loads(")
    asked = {"max_tokens": 15, "temperature": 0.0}  # no broken characters: the text is its bytes
    wrote = server.post(f"{session}/generate", **asked).json()["choices"][0]["text"]
    assert wrote == server.complete("def loads(", **asked)
    assert server.get(session).json()["tokens_read"] == 25
    again = server.post(f"{session}/generate", **asked, stream=True)
    went_on = "".join(event["choices"][0]["text"] for event in events(again.text))
    assert server.get(session).json()["tokens_read"] == 40
    fresh = open_session(server)
    server.post(f"{fresh}/feed", tokens=list(("def loads(" + wrote).encode()))
    assert server.post(f"{fresh}/generate", **asked).json()["choices"][0]["text"] == went_on


def test_an_empty_session_begins_at_a_line(server):
    session = open_session(server)
    wrote = server.post(f"{session}/generate", max_tokens=10, seed=1).json()["choices"][0]["text"]
    assert wrote == server.complete("", max_tokens=10, seed=1)


def test_scoring_does_not_move_a_session_and_a_fork_goes_its_own_way(server):
    session = open_session(server)
    server.post(f"{session}/feed", text="some words")
    scored = server.post(f"{session}/score", text=" more").json()
    assert server.get(session).json()["tokens_read"] == 10
    fork = f"/v1/sessions/{server.post(f'{session}/fork').json()['id']}"
    fed = server.post(f"{fork}/feed", text=" more", logprobs=True).json()
    assert [one["logprob"] for one in scored["tokens"]] == pytest.approx(fed["logprobs"], abs=1e-6)
    assert (server.get(fork).json()["tokens_read"], server.get(session).json()["tokens_read"]) == (15, 10)
    again = server.post(f"{session}/score", text=" more").json()
    assert again["tokens"] == scored["tokens"]


def test_a_session_is_saved_and_goes_on_after_the_server_was_restarted(trained_run, tmp_path):
    asked = {"max_tokens": 20, "seed": 9}
    with in_thread(trained_run, sessions=tmp_path) as first:
        session = open_session(first)
        first.post(f"{session}/feed", tokens=[*b"caf", 0xC3])  # in the middle of a character
        saved = first.post(f"{session}/save", name="my-text").json()
        assert saved["bytes"] == sum(path.stat().st_size for path in (tmp_path / "my-text").iterdir())
        went_on = first.post(f"{session}/generate", **asked).json()["choices"][0]["text"]
    with in_thread(trained_run, sessions=tmp_path) as second:
        assert second.get("/v1/sessions/saved").json() == {"data": ["my-text"]}
        restored = second.post("/v1/sessions/restore", name="my-text").json()
        assert restored["tokens_read"] == 4
        path = f"/v1/sessions/{restored['id']}/generate"
        assert second.post(path, **asked).json()["choices"][0]["text"] == went_on
        assert second.post("/v1/sessions/restore", name="another").status_code == 404
        (tmp_path / "my-text" / "engine.safetensors").write_bytes(b"damaged")
        assert second.post("/v1/sessions/restore", name="my-text").status_code == 409


def test_a_session_of_another_model_is_not_restored(trained_run, recurrent_run, tmp_path):
    with in_thread(trained_run, sessions=tmp_path) as first:
        first.post(f"{open_session(first)}/save", name="a")
    with in_thread(recurrent_run, sessions=tmp_path) as second:
        answer = second.post("/v1/sessions/restore", name="a")
        assert (answer.status_code, "not served here" in answer.text) == (409, True)


def test_without_a_folder_nothing_is_saved(server):
    session = open_session(server)
    assert server.post(f"{session}/save", name="a").status_code == 409
    assert "--sessions DIR" in server.get("/v1/sessions/saved").json()["error"]["message"]


def test_there_are_only_so_many_sessions(trained_run):
    with in_thread(trained_run, limits=Limits(sessions=3)) as server:
        paths = [open_session(server) for _ in range(3)]
        assert server.post("/v1/sessions", model="small").status_code == 409
        assert server.post(f"{paths[0]}/fork").status_code == 409
        with server.client() as client:
            client.delete(paths[0])
        assert server.get(paths[0]).status_code == 404
        open_session(server)
        assert len(server.get("/v1/sessions").json()["data"]) == 3


def test_a_session_is_for_one_request_at_a_time_and_a_cancelled_one_changes_nothing(server):
    session = open_session(server)
    server.post(f"{session}/feed", text="abc")
    with server.client() as client:
        with client.stream("POST", f"{session}/generate", json={"max_tokens": 16_000, "stream": True}) as stream:
            lines = stream.iter_lines()  # held: httpx ends the stream when its iterator goes
            next(lines)
            assert server.post(f"{session}/feed", text="x").status_code == 409
            with server.client() as other:
                assert other.delete(session).status_code == 409
        until = time.monotonic() + 5
        while (fed := server.post(f"{session}/feed", text="d")).status_code == 409:
            assert time.monotonic() < until
    assert fed.json()["tokens_read"] == 4
