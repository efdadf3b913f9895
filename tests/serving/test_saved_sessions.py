"""Sessions on disk: private, so many and no more, whole under their names whoever saves at once, and trusted in nothing."""

import fcntl
import json
import os
import shutil
import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving_helpers import Running, in_thread

from transformer_xl.cli import main
from transformer_xl.data.text.tokenizers import ByteTokenizer
from transformer_xl.decoding import TextStream
from transformer_xl.errors import InputError
from transformer_xl.inference import Engine
from transformer_xl.serving.api import saved
from transformer_xl.serving.limits import Limits


def open_session(server: Running, text: str = "some text") -> str:
    path = f"/v1/sessions/{server.post('/v1/sessions', model='small').json()['id']}"
    assert server.post(f"{path}/feed", text=text).status_code == 200
    return path


def save(server: Running, name: str, *, text: str = "some text") -> None:
    session = open_session(server, text)
    answer = server.post(f"{session}/save", name=name)
    assert answer.status_code == 200, answer.text
    assert delete(server, session) == 200


def delete(server: Running, path: str) -> int:
    with server.client() as client:
        return client.delete(path).status_code


def names(server: Running) -> list[str]:
    return server.get("/v1/sessions/saved").json()["data"]


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.iterdir())}


PRIVATE = {"novel": 0o700, "engine.safetensors": 0o600, "session.json": 0o600}


def test_what_is_saved_is_private(trained_run, tmp_path):
    before = os.umask(0)
    try:
        with in_thread(trained_run, sessions=tmp_path) as server:
            save(server, "novel")
            assert modes(tmp_path / "novel") == PRIVATE
            save(server, "novel")
            assert modes(tmp_path / "novel") == PRIVATE
        for path in (tmp_path / "novel", *(tmp_path / "novel").iterdir()):
            path.chmod(0o777)
        with in_thread(trained_run, sessions=tmp_path):
            assert modes(tmp_path / "novel") == PRIVATE, "saved by an older server"
    finally:
        os.umask(before)


@pytest.mark.parametrize("requests", [15, pytest.param(122, marks=pytest.mark.slow)])
def test_saving_restoring_and_deleting_one_name_at_once_never_fails(trained_run, tmp_path, requests):
    """By eight clients of two servers that share a folder."""
    limits = Limits(sessions=10_000)
    with (
        in_thread(trained_run, sessions=tmp_path, limits=limits) as one,
        in_thread(trained_run, sessions=tmp_path, limits=limits) as two,
    ):

        def client(number: int) -> Counter[tuple[str, int]]:
            server, found = (one, two)[number % 2], Counter[tuple[str, int]]()
            session = open_session(server)
            with server.client() as http:
                for turn in range(requests):
                    found["save", http.post(f"{session}/save", json={"name": "same"}).status_code] += 1
                    if turn % 4 == 1:
                        found["restore", http.post("/v1/sessions/restore", json={"name": "same"}).status_code] += 1
                    if turn % 4 == 3 and number < 2:
                        found["delete", http.delete("/v1/sessions/saved/same").status_code] += 1
            return found

        with ThreadPoolExecutor(8) as pool:
            found = sum(pool.map(client, range(8)), Counter())
        print(f"{dict(found)}; left: {[path.name for path in tmp_path.iterdir()]}")
        assert found["save", 200] == 8 * requests
        assert set(found) <= {("save", 200), ("restore", 200), ("restore", 404), ("delete", 200), ("delete", 404)}
        assert found["restore", 200] > 0
        save(one, "same")
        assert names(two) == ["same"]
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


def test_leftovers_of_killed_servers_are_removed_at_the_start(trained_run, tmp_path):
    for name in (".txl-partial-abc", ".txl-partial-def/old"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "engine.safetensors").write_bytes(b"half")
    (tmp_path / ".txl-partial-file").write_bytes(b"half")
    victim = tmp_path.parent / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    (tmp_path / ".txl-partial-link").symlink_to(victim)
    with in_thread(trained_run, sessions=tmp_path) as server:
        assert list(tmp_path.iterdir()) == []
        assert names(server) == []
    assert (victim / "kept").read_text() == "kept"


def test_a_server_that_never_lets_go_is_not_waited_for_long(trained_run, tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "LOCK_SECONDS", 0.2)
    with in_thread(trained_run, sessions=tmp_path) as server:
        session = open_session(server)
        other = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX)
        answer = server.post(f"{session}/save", name="a")
        assert (answer.status_code, "another server is busy" in answer.text) == (409, True)
        os.close(other)
        assert server.post(f"{session}/save", name="a").status_code == 200
        shutil.rmtree(tmp_path)
        for answer in (server.post(f"{session}/save", name="a"), server.get("/v1/sessions/saved")):
            assert (answer.status_code, "cannot be read or written" in answer.text) == (409, True)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(trained_run, tmp_path, monkeypatch):
    with in_thread(trained_run, sessions=tmp_path) as server:
        save(server, "a")
        before = (tmp_path / "a" / "engine.safetensors").read_bytes()
        session = open_session(server, "more")

        def full(self: Engine, path: Path) -> None:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Engine, "save", full)
        answer = server.post(f"{session}/save", name="a")
        assert (answer.status_code, "No space left on device" in answer.text) == (409, True)
        monkeypatch.undo()
        assert (tmp_path / "a" / "engine.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_there_are_only_so_many_saved_sessions(trained_run, tmp_path):
    with in_thread(trained_run, sessions=tmp_path, limits=Limits(saved=2)) as server:
        save(server, "a")
        save(server, "b")
        save(server, "a", text="in its own place")
        session = open_session(server)
        answer = server.post(f"{session}/save", name="c")
        assert (answer.status_code, "DELETE /v1/sessions/saved/NAME" in answer.text) == (409, True)
        assert names(server) == ["a", "b"]
        assert delete(server, "/v1/sessions/saved/b") == 200
        assert delete(server, "/v1/sessions/saved/b") == 404
        assert server.post(f"{session}/save", name="c").status_code == 200
        assert names(server) == ["a", "c"]
        assert delete(server, "/v1/sessions/saved/..") in (404, 405, 422)
        assert delete(server, "/v1/sessions/saved/a%2fb") == 404
        assert delete(server, f"/v1/sessions/saved/{'a' * 65}") == 422
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_saved_sessions_take_only_so_many_bytes(trained_run, tmp_path):
    with in_thread(trained_run, sessions=tmp_path) as server:
        session = open_session(server)
        size = server.post(f"{session}/save", name="a").json()["bytes"]
        reckoned = saved.saved_bytes(server.server.app.state.models["small"].model) + saved.ABOUT_BYTES
    assert size < reckoned < size + 70_000
    with in_thread(trained_run, sessions=tmp_path, limits=Limits(saved_bytes=reckoned + size - 1)) as server:
        session = open_session(server)
        assert server.post(f"{session}/save", name="a").status_code == 200, "in its own place"
        answer = server.post(f"{session}/save", name="b")
        assert (answer.status_code, f"take {size:,} of" in answer.text) == (409, True)
    with in_thread(trained_run, sessions=tmp_path, limits=Limits(saved_bytes=reckoned - 1)) as server:
        assert server.post(f"{open_session(server)}/save", name="b").status_code == 413
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_sessions_outlive_the_checkpoint_that_a_trainer_removed(trained_run, tmp_path):
    run, folder = tmp_path / "small", tmp_path / "saved"
    shutil.copytree(trained_run, run)
    folder.mkdir()
    with in_thread(run, sessions=folder) as server:
        shutil.rmtree(run / "checkpoints")
        save(server, "a")
        assert server.post("/v1/sessions/restore", name="a").status_code == 200
    with in_thread(trained_run, sessions=folder) as server:
        assert server.post("/v1/sessions/restore", name="a").status_code == 200


def test_a_session_of_another_memory_length_is_refused_with_the_length_that_it_needs(trained_run, tmp_path):
    with in_thread(trained_run, sessions=tmp_path, memory=24) as server:
        save(server, "long")
    with in_thread(trained_run, sessions=tmp_path) as server:
        answer = server.post("/v1/sessions/restore", name="long")
        assert (answer.status_code, "--memory 24" in answer.text) == (409, True)
        # The file of the one under the description of the other: what joins the lanes of other texts must fit them.
        save(server, "short")
        shutil.copy(tmp_path / "long" / "engine.safetensors", tmp_path / "short" / "engine.safetensors")
        answer = server.post("/v1/sessions/restore", name="short")
        assert answer.status_code == 409
        assert server.complete("x")


GOOD = {"begun": "", "marks": 0, "line_begins": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"text": {**GOOD, "begun": "c3" * 4}},
        {"text": {**GOOD, "begun": "ff"}},
        {"text": {**GOOD, "begun": "6161"}},
        {"text": {**GOOD, "begun": 7}},
        {"text": {**GOOD, "begun": "zz"}},
        {"text": {**GOOD, "marks": -1}},
        {"text": {**GOOD, "marks": 1 << 80}},
        {"text": {**GOOD, "marks": 1.5}},
        {"text": {**GOOD, "marks": "1"}},
        {"text": {**GOOD, "marks": True}},
        {"text": {**GOOD, "line_begins": 2}},
        {"text": {**GOOD, "more": 1}},
        {"text": {"begun": ""}},
        {"text": []},
        {"text": None},
        {"model": 5},
        {"model": "x" * 64},
        {"model": ["a"]},
        {"memory": -1},
        {"memory": "12"},
        {"more": 1},
    ],
    ids=str,
)
def test_every_field_of_a_saved_session_is_checked(server_with_saved, change):
    server, folder = server_with_saved
    about = json.loads((folder / "good" / "session.json").read_text())
    assert server.post("/v1/sessions/restore", name="good").status_code == 200
    write_about(folder, json.dumps({**about, **change}).encode())
    answer = server.post("/v1/sessions/restore", name="bad")
    assert (answer.status_code, "damaged" in answer.text) == (409, True), answer.text


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"1", b"null", b"\xff\xfe", b"[" * 4000, b'{"model": NaN}', b'{"a":' * 800, b" " * 5_000_000],
    ids=["empty", "list", "number", "null", "no text", "deep", "NaN", "deep objects", "large"],
)
def test_what_is_no_description_of_a_session_is_refused(server_with_saved, data):
    server, folder = server_with_saved
    write_about(folder, data)
    assert server.post("/v1/sessions/restore", name="bad").status_code == 409


@pytest.fixture(scope="module")
def server_with_saved(trained_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with in_thread(trained_run, sessions=folder, limits=Limits(sessions=1000)) as server:
        save(server, "good")
        shutil.copytree(folder / "good", folder / "bad")
        yield server, folder


def write_about(folder: Path, data: bytes) -> None:
    (folder / "bad" / "session.json").write_bytes(data)


@pytest.mark.parametrize("file", ["engine.safetensors", "session.json"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "folder", "device"])
def test_links_and_special_files_are_not_followed(server_with_saved, tmp_path, file, kind):
    server, folder = server_with_saved
    shutil.rmtree(folder / "bad")
    shutil.copytree(folder / "good", folder / "bad")
    path = folder / "bad" / file
    path.rename(tmp_path / file)
    make = {
        "link": lambda: path.symlink_to(tmp_path / file),
        "dangling link": lambda: path.symlink_to(tmp_path / "nothing"),
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
    }[kind]
    make()
    assert server.post("/v1/sessions/restore", name="bad").status_code == 409
    assert server.get("/v1/sessions/saved").status_code == 200


@pytest.mark.parametrize("kind", ["link to a session", "link to a folder", "dangling link", "fifo", "file"])
def test_a_name_that_is_no_folder_is_neither_listed_nor_read_nor_written_nor_removed(server_with_saved, tmp_path, kind):
    server, folder = server_with_saved
    (tmp_path / "kept").write_text("kept")
    path = folder / "trap"
    make = {
        "link to a session": lambda: path.symlink_to(folder / "good"),
        "link to a folder": lambda: path.symlink_to(tmp_path),
        "dangling link": lambda: path.symlink_to(tmp_path / "nothing"),
        "fifo": lambda: os.mkfifo(path),
        "file": lambda: path.write_text("a file"),
    }[kind]
    make()
    try:
        assert "trap" not in names(server)
        assert server.post("/v1/sessions/restore", name="trap").status_code == 409
        answer = server.post(f"{open_session(server)}/save", name="trap")
        assert (answer.status_code, "remove it there" in answer.text) == (409, True)
        assert delete(server, "/v1/sessions/saved/trap") == 409
        assert sorted(child.name for child in tmp_path.iterdir()) == ["kept"]
        assert "good" in names(server)
    finally:
        path.unlink()


def test_a_place_in_a_text_is_one_or_is_refused():
    tokenizer = ByteTokenizer()
    for place in ({**GOOD, "begun": "e282"}, {**GOOD, "marks": 7, "line_begins": 0}):
        assert TextStream.at(tokenizer, place).place() == place
    for wrong in ({"begun": "e28282"}, {"begun": "80"}, {"marks": -1}, {"line_begins": 2}):
        with pytest.raises(InputError, match="is no place in a text"):
            TextStream.at(tokenizer, {**GOOD, **wrong})


def test_how_many_sessions_there_are_is_a_choice_and_a_folder_that_others_can_write_to_is_named(
    trained_run, tmp_path, monkeypatch, capsys
):
    assert main(["serve", str(trained_run), "--max-sessions", "0"]) == 2
    assert "serve.sessions: 0 is too small" in capsys.readouterr().err
    served = []
    monkeypatch.setattr("transformer_xl.serving.http.server.serve", lambda server, ready: served.append(server) or True)
    tmp_path.chmod(0o777)
    assert main(["serve", str(trained_run), "--max-sessions", "5", "--sessions", str(tmp_path)]) == 0
    assert served[0].limits.sessions == served[0].app.state.admission.limits.sessions == 5
    assert capsys.readouterr().err.count(f"chmod go-w {tmp_path}") == 1
    tmp_path.chmod(0o755)
    assert main(["serve", str(trained_run), "--sessions", str(tmp_path)]) == 0
    assert "chmod" not in capsys.readouterr().err


def test_opening_sessions_takes_no_memory_until_they_are_read_with(trained_run):
    with in_thread(trained_run) as server:
        first, second = (server.post("/v1/sessions", model="small").json() for _ in range(2))
        readers = {id(session.reader) for session in server.server.app.state.sessions.all()}
        assert len(readers) == 1
        fed = [
            server.post(f"/v1/sessions/{one['id']}/feed", text="abc", logprobs=True).json() for one in (first, second)
        ]
        assert fed[0]["logprobs"] == fed[1]["logprobs"]
        assert fed[0]["tokens_read"] == 3
        third = server.post("/v1/sessions", model="small").json()
        assert third["tokens_read"] == 0
