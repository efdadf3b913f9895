"""A model's thread outlives whatever fails on it, memory is reckoned before it is taken, and /health says how it stands."""

import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from serving_helpers import Running, in_process, in_thread

from transformer_xl.batching.budget import Cost, available_bytes, needed_bytes
from transformer_xl.batching.events import Outbox
from transformer_xl.batching.lanes import Lanes
from transformer_xl.batching.scheduler import Scheduler
from transformer_xl.cli import main
from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.inference import Engine
from transformer_xl.inference.cache import kept_bytes
from transformer_xl.serving.api.admission import within_memory
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.limits import Limits

SOON = Limits(deadline_seconds=12, patience_seconds=6)
TEXTS = [{"prompt": "y" * (3 + 5 * number), "max_tokens": 30 + 7 * number, "seed": number} for number in range(6)]


def write_all(server: Running) -> list[str]:
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        return list(pool.map(lambda body: server.complete(**body), TEXTS))


@contextmanager
def until_ok(server: Running, *, seconds: float = 10.0) -> Iterator[list[dict]]:
    """What /health says meanwhile; afterwards it is well again."""
    seen = []
    yield seen
    until = time.monotonic() + seconds
    while (answer := server.get("/health")).status_code != 200:
        seen.append(answer.json())
        assert time.monotonic() < until, answer.text
        time.sleep(0.05)
    assert answer.json() == {"status": "ok", "models": {"small": "ok"}}


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
@pytest.mark.parametrize("where", ["grown", "without"])
def test_texts_whose_lanes_cannot_change_go_on_alone(trained_run, monkeypatch, caplog, where, times):
    """The engine has changed and yet has failed: nobody may go on with it."""
    caplog.set_level("CRITICAL")
    with in_thread(trained_run, limits=SOON) as server:
        alone = [server.complete(**body) for body in TEXTS]
        change, failed = getattr(Engine, where), []

        def fails(self: Engine, *arguments: object) -> object:
            found = change(self, *arguments)
            if len(failed) < times:
                failed.append(self.lanes)
                raise MemoryError
            return found

        monkeypatch.setattr(Engine, where, fails)
        assert write_all(server) == alone
        assert failed, "nothing failed"
        assert server.metric("threads_died_total") == server.metric("threads_abandoned_total") == 0
        assert server.get("/health").status_code == 200


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Iterator[threading.Event]:
    """When the event is set, the model's thread dies where it next calls this, past every guard."""
    method, die = getattr(owner, name), threading.Event()

    def dies(self: object, *arguments: object) -> object:
        if die.is_set() and threading.current_thread().name == "txl-small" and getattr(self, "_waiting", True):
            die.clear()
            raise SystemExit("killed")
        return method(self, *arguments)

    monkeypatch.setattr(owner, name, dies)
    yield die
    assert not die.is_set(), "nothing died"


@pytest.mark.parametrize(("owner", "name"), [(Scheduler, "_drop"), (Scheduler, "_write")])
def test_a_thread_that_dies_is_replaced_and_its_texts_go_on(trained_run, monkeypatch, caplog, owner, name):
    caplog.set_level("CRITICAL")
    writing, step = threading.Event(), Lanes.step

    def stepping(self: Lanes) -> object:
        writing.set()
        return step(self)

    with in_thread(trained_run, limits=SOON) as server:
        alone = [server.complete(**body) for body in TEXTS]
        monkeypatch.setattr(Lanes, "step", stepping)
        with dying(monkeypatch, owner, name) as die, ThreadPoolExecutor(1) as pool, until_ok(server):
            texts = pool.submit(write_all, server)
            assert writing.wait(5)
            die.set()
            assert texts.result() == alone
        assert server.metric("threads_died_total") == 1
        assert server.metric("in_flight") == 0
        assert write_all(server) == alone


@pytest.mark.parametrize(("owner", "name", "status"), [(Scheduler, "_tell", 500), (Outbox, "send", 200)])
def test_what_a_thread_died_of_is_answered_at_once(trained_run, monkeypatch, caplog, owner, name, status):
    """What was already done is told by the next thread; what was not is answered 500."""
    caplog.set_level("CRITICAL")
    with in_thread(trained_run, limits=SOON) as server, dying(monkeypatch, owner, name) as die:
        die.set()
        started_at = time.monotonic()
        assert server.post("/v1/completions", model="small", prompt="x", max_tokens=1).status_code == status
        assert time.monotonic() - started_at < 5
        assert server.complete("x")
        assert server.metric("threads_died_total") == 1


def test_health_says_that_a_model_does_not_answer_until_it_does(trained_run, monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    released = threading.Event()
    monkeypatch.setattr(Served, "_prove", lambda self: released.wait(20))
    with in_thread(trained_run, limits=SOON) as server, until_ok(server) as seen:
        assert server.get("/health").json() == {"status": "ok", "models": {"small": "ok"}}
        drop = Scheduler._drop

        def dies(self: Scheduler) -> None:
            monkeypatch.setattr(Scheduler, "_drop", drop)
            raise SystemExit("killed")

        monkeypatch.setattr(Scheduler, "_drop", dies)
        with ThreadPoolExecutor(1) as pool:
            text = pool.submit(server.complete, "x")
            until = time.monotonic() + 5
            while {"not answering"} != {state for one in seen[-1:] for state in one["models"].values()}:
                assert time.monotonic() < until
                answer = server.get("/health")
                if answer.status_code == 503:
                    seen.append(answer.json())
                    assert server.metric("answering") == 0
            assert seen[-1] == {"status": "failing", "models": {"small": "not answering"}}
            released.set()
            assert text.result()
    assert {one["models"]["small"] for one in seen} <= {"dead", "not answering"}


def test_without_the_key_health_names_no_model(trained_run):
    with in_thread(trained_run, key="a key") as server:
        assert server.get("/health").json() == {"status": "ok", "models": {"small": "ok"}}
        server.key = None
        assert server.get("/health").json() == {"status": "ok"}


def test_more_texts_than_there_is_memory_for_are_refused_beforehand(trained_run, tmp_path):
    """A lane of the small model takes 19 MB here, and 1,000 MB are left: two requests for 16 texts each need more while their lanes are joined."""
    program = (str(Path(__file__).with_name("limited_server.py")), "1000")
    options = ("--memory", "50000", "--deadline", "10")
    with in_process(trained_run, folder=tmp_path, options=options, program=program) as server:
        told = server.errors.read_text()
        with ThreadPoolExecutor(2) as pool:
            asked = {"model": "small", "prompt": "x", "n": 16, "max_tokens": 3}
            answers = list(pool.map(lambda _: server.post("/v1/completions", **asked), range(2)))
        later = [server.post("/v1/completions", model="small", prompt="x", max_tokens=3).status_code for _ in range(2)]
        print(f"two requests for 16 texts: {[answer.status_code for answer in answers]}, then for one: {later}")
        assert later == [200, 200]
        most = int(server.metric("in_flight_most"))
        print(f"{most} texts at a time, {int(server.metric('sessions_most'))} sessions: {told.splitlines()[0]}")
        assert 1 < most < 16
        assert f"memory for {most} texts" in told
        assert [answer.status_code for answer in answers] == [422, 422]
        assert f"at most {most} texts" in answers[0].text
        with ThreadPoolExecutor(most) as pool:
            asked = {"model": "small", "prompt": "x", "max_tokens": 3, "echo": True, "logprobs": 1}
            answers = list(pool.map(lambda _: server.post("/v1/completions", **asked), range(2 * most)))
        assert {answer.status_code for answer in answers} <= {200, 429}
        assert server.post("/v1/completions", model="small", prompt="x", n=most, max_tokens=3).status_code == 200
        assert server.get("/health").status_code == 200
        assert "Traceback" not in server.errors.read_text()


def test_memory_that_runs_out_all_the_same_fails_only_what_needs_it(trained_run, tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")  # each tensor is asked of the system, and given back to it
    with in_process(trained_run, folder=tmp_path, options=("--memory", "100000", "--deadline", "10")) as server:
        pid, everything = server.process.pid, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        assert server.complete("x", max_tokens=3)
        taken = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmSize"))
        resource.prlimit(pid, resource.RLIMIT_AS, (int(taken.split()[1]) * 1024 + 8_000_000, resource.RLIM_INFINITY))
        with until_ok(server) as seen:
            answer = server.post("/v1/completions", model="small", prompt="x")
            assert answer.status_code == 500, answer.text
            until = time.monotonic() + 5
            while server.get("/health").status_code == 200:
                assert time.monotonic() < until
            assert server.get("/health").json() == {"status": "failing", "models": {"small": "not answering"}}
            resource.prlimit(pid, resource.RLIMIT_AS, everything)
        assert all(one["status"] == "failing" for one in seen)
        assert server.complete("x", max_tokens=3)


def test_a_model_that_memory_is_too_small_for_refuses_to_start(trained_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("transformer_xl.batching.budget.available_bytes", lambda: 3_000_000)
    assert main(["serve", str(trained_run), "--memory", "4000", "--max-sessions", "9"]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert "give a smaller --memory or --max-sessions" in told[0]


def test_fewer_are_admitted_where_memory_is_short():
    config = ModelConfig(vocabulary=256, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, memory=1000)
    lane = kept_bytes(config, lanes=1)
    costs = [Cost(lane=lane, engine=lane, working=0)] * 2
    asked = Limits()
    enough = needed_bytes(costs, admitted=64, sessions=32)
    assert enough == (2 * (3 * 63 + 2) + 2 * 64 + 32 + 3) * lane
    assert within_memory(asked, costs, available=None) is asked
    plenty = within_memory(asked, costs, available=2 * enough)
    assert plenty == replace(asked, learning_bytes=enough // 4), "half of what texts and sessions leave"
    fewer = within_memory(asked, costs, available=enough // 2)
    assert (fewer.admitted, fewer.sessions) == (23, 11)
    assert (
        needed_bytes(costs, admitted=23, sessions=11) <= enough * 0.375 < needed_bytes(costs, admitted=24, sessions=12)
    )
    with pytest.raises(InputError, match="one text and 1 sessions"):
        within_memory(asked, costs, available=10 * lane)


def test_every_limit_of_the_system_counts(tmp_path):
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert available_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:  5000 kB\n")
    assert available_bytes(tmp_path) == 5000 * 1024
    write("proc/self/cgroup", "0::/a/b\n")
    write("sys/fs/cgroup/a/b/memory.max", "max\n")
    write("sys/fs/cgroup/a/b/memory.current", "1000\n")
    assert available_bytes(tmp_path) == 5000 * 1024
    write("sys/fs/cgroup/a/memory.max", "4000000\n")
    write("sys/fs/cgroup/a/memory.current", "3000000\n")
    write("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 500000\n")
    assert available_bytes(tmp_path) == 1_500_000
    write("proc/self/cgroup", "5:cpu,memory:/c\n")
    write("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "900000\n")
    write("sys/fs/cgroup/memory/c/memory.usage_in_bytes", "950000\n")
    assert available_bytes(tmp_path) == 0
