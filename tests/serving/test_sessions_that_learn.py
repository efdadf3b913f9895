"""Sessions that learn while they read: what they tell is what the reader of `adaptation` tells, nobody else notices, and a restart changes nothing."""

import json
import random
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving_helpers import Running, in_thread

import transformer_xl as txl
from tensor_mutations import mutated_safetensors, mutated_tensors, parse, serialise
from transformer_xl.adaptation.lanes import Learning
from transformer_xl.batching.budget import LearningCost
from transformer_xl.batching.learning import LESSON_TOKENS, Learner, learn
from transformer_xl.checkpoint.adapter_file import fingerprint
from transformer_xl.cli import main
from transformer_xl.config import AdaptationConfig
from transformer_xl.serving.api.learning import DEFAULT
from transformer_xl.serving.limits import Limits
from transformer_xl.tensor_files import write_tensors

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 3
MORE = "Winston Smith, his chin nuzzled into his breast, slipped through the glass doors of Victory Mansions.\n"
WAYS = {
    "gradient": {"by": "gradient", "rate": 0.5, "rank": 4, "segment": 32},
    "all": {"by": "gradient", "rate": 0.05, "learns": "all", "segment": 40},
    "cache": {"by": "cache", "cache_lambda": 0.2, "cache_size": 50},
    "both": {"by": "both", "rate": 0.5, "decay": 0.01, "segment": 16, "cache_lambda": 0.1, "cache_size": 50},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def server(trained_run, folder):
    with in_thread(trained_run, sessions=folder, limits=Limits(sessions=1000, learning=1000)) as running:
        yield running


@pytest.fixture(scope="module")
def loaded(trained_run):
    return txl.load(trained_run, device="cpu")


def opened(server: Running, *, compare: bool = True, model: str = "small", **adapt: object) -> str:
    answer = server.post("/v1/sessions", model=model, adapt={**adapt, "compare": compare})
    assert answer.status_code == 200, answer.text
    return f"/v1/sessions/{answer.json()['id']}"


def ask(server: Running, path: str, **body: object) -> dict:
    answer = server.post(path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def fed(server: Running, session: str, text: str = TEXT) -> dict:
    return ask(server, f"{session}/feed", text=text, logprobs=True)


def nats(reader, text: str, *, own: bool = False) -> list[float]:
    return reader.score(torch.tensor([list(text.encode())]), own=own)[0].tolist()


def settings(server: Running, session: str) -> AdaptationConfig:
    told = server.get(session).json()["adapt"]
    return AdaptationConfig(**{name: told[name] for name in told if name not in ("by", "compare", "in_words", "bytes")})


@pytest.mark.parametrize("way", WAYS)
def test_it_tells_what_the_reader_tells_with_learning_and_without(server, loaded, way):
    session = opened(server, **WAYS[way])
    how = settings(server, session)
    assert how == AdaptationConfig(
        **{**vars(DEFAULT), "segment": 12, **{name: value for name, value in WAYS[way].items() if name != "by"}}
        | ({"rate": 0.0} if way == "cache" else {})
        | ({"cache_lambda": 0.0} if WAYS[way]["by"] == "gradient" else {})
    )
    reader, still = loaded.adaptive_reader(how), loaded.adaptive_reader(how.without("cache"))
    for text in (TEXT, "x", MORE):
        found = fed(server, session, text)
        expected = [-loss for loss in nats(reader, text)], [-loss for loss in nats(still, text, own=True)]
        first = text is TEXT
        assert found["logprobs"][first:] == pytest.approx(expected[0][first:], abs=1e-4)
        assert found["static_logprobs"][first:] == pytest.approx(expected[1][first:], abs=1e-4)
        assert not first or (found["logprobs"][0], found["static_logprobs"][0]) == (None, None)
        assert found["logprobs"][30:] != found["static_logprobs"][30:] or text == "x"
    if how.moves and not how.caches:
        found = fed(server, opened(server, **WAYS[way]))
        whole = how.segment + 1
        assert found["logprobs"][:whole] == found["static_logprobs"][:whole], "scored before it is learned from"


def test_a_score_leaves_the_session_where_it_is(server):
    session = opened(server, **WAYS["both"])
    fed(server, session)
    scored = ask(server, f"{session}/score", text=MORE)
    assert server.get(session).json()["tokens_read"] == len(TEXT)
    found = fed(server, session, MORE)
    assert [token["logprob"] for token in scored["tokens"]] == found["logprobs"]
    assert [token["static_logprob"] for token in scored["tokens"]] == found["static_logprobs"]
    assert scored["loss_nats"] == pytest.approx(-sum(found["logprobs"]) / len(MORE))
    assert scored["static_loss_nats"] == pytest.approx(-sum(found["static_logprobs"]) / len(MORE))
    assert scored["static_bits"] != scored["bits"]
    alone = fed(server, opened(server, compare=False, **WAYS["both"]))
    assert "static_logprobs" not in alone


def test_what_was_read_makes_the_rest_cheaper(server):
    """The half of a text of another kind than the run was trained on."""
    session = opened(server, by="both", rate=0.5, cache_lambda=0.2, segment=32)
    fed(server, session, TEXT * 2)
    rest = ask(server, f"{session}/score", text=TEXT * 2)
    assert rest["loss_nats"] < 0.95 * rest["static_loss_nats"]


def test_nobody_notices_anybody_else_bit_for_bit(server, trained_run):
    """Sessions that learn at the same time as others, and plain ones beside them, tell what each tells alone."""
    served = server.server.app.state.models["small"]
    before = fingerprint(served.model.state_dict())
    texts = [TEXT, MORE, TEXT[::-1], MORE.upper()]

    def learns(text: str) -> list[list[float]]:
        session = opened(server, **WAYS["both"])
        return [fed(server, session, text[at : at + 50])["logprobs"] for at in range(0, 100, 50)]

    def reads(text: str) -> tuple[list[float], str]:
        session = f"/v1/sessions/{ask(server, '/v1/sessions', model='small')['id']}"
        logprobs = fed(server, session, text)["logprobs"]
        return logprobs, ask(server, f"{session}/generate", max_tokens=40, seed=4)["choices"][0]["text"]

    alone = [learns(text) for text in texts], [reads(text) for text in texts]
    with ThreadPoolExecutor(8) as clients:
        together = [clients.submit(learns, text) for text in texts], [clients.submit(reads, text) for text in texts]
    assert [one.result() for one in together[0]] == alone[0]
    assert [one.result() for one in together[1]] == alone[1]
    assert fingerprint(served.model.state_dict()) == before
    assert all(weight.grad is None for weight in served.model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_a_restart_at_any_point_changes_nothing(server, trained_run, folder, way):
    """Saved by one server and restored by another; also after it has written."""
    with in_thread(trained_run, sessions=folder) as other:
        for read, writes in ((0, 0), (20, 5), (130, 0)):
            session = opened(server, **WAYS[way])
            if read:
                fed(server, session, TEXT[:read])
            if writes:
                ask(server, f"{session}/generate", max_tokens=writes, seed=3)
            ask(server, f"{session}/save", name="point")
            again = ask(other, "/v1/sessions/restore", name="point")
            assert again["adapt"] == server.get(session).json()["adapt"]
            copy = f"/v1/sessions/{again['id']}"
            one, two = fed(server, session, MORE), fed(other, copy, MORE)
            assert (one["logprobs"], one["static_logprobs"]) == (two["logprobs"], two["static_logprobs"])
            assert one["tokens_read"] == two["tokens_read"] == read + writes + len(MORE)
            more = {"max_tokens": 30, "seed": 5, "logprobs": 2}
            written = [
                ask(*where, **more)["choices"]
                for where in ((server, f"{session}/generate"), (other, f"{copy}/generate"))
            ]
            assert written[0] == written[1]
            with other.client() as client:
                assert client.delete(copy).status_code == 200


@pytest.mark.parametrize("way", WAYS)
def test_it_writes_with_what_it_learned_and_does_not_learn_from_what_it_wrote(server, loaded, way):
    session = opened(server, **WAYS[way])
    how = settings(server, session)
    fed(server, session)
    still = f"/v1/sessions/{ask(server, '/v1/sessions', model='small')['id']}"
    fed(server, still)
    asked = {"max_tokens": 40, "temperature": 0.7, "seed": 9, "logprobs": 0}
    written = ask(server, f"{session}/generate", **asked)["choices"][0]
    expected = loaded.generate(TEXT, tokens=40, temperature=0.7, top_k=0, seed=9, adapt=how)
    assert written["text"] == expected
    assert written["finish_reason"] == "length"
    assert written["text"] != ask(server, f"{still}/generate", **asked)["choices"][0]["text"]
    assert server.get(session).json()["tokens_read"] == len(TEXT) + 40
    reader = loaded.adaptive_reader(how)
    nats(reader, TEXT)
    reader.score(torch.tensor([written["logprobs"]["token_ids"]]), own=True)
    found = fed(server, session, MORE)["logprobs"]
    assert found == pytest.approx([-loss for loss in nats(reader, MORE)], abs=1e-4)


def test_a_stream_and_a_session_that_has_read_nothing(server):
    one, two = opened(server, **WAYS["both"]), opened(server, **WAYS["both"])
    asked = {"max_tokens": 20, "seed": 2, "stop": ["e"]}
    whole = ask(server, f"{one}/generate", **asked)["choices"][0]
    with server.client() as client, client.stream("POST", f"{two}/generate", json={**asked, "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert fed(server, one, MORE)["logprobs"] == fed(server, two, MORE)["logprobs"]
    assert server.get(one).json()["tokens_read"] == server.get(two).json()["tokens_read"]


def test_a_fork_goes_on_alone(server):
    session = opened(server, **WAYS["both"])
    fed(server, session)
    fork = f"/v1/sessions/{ask(server, f'{session}/fork')['id']}"
    fed(server, fork, MORE)
    again = f"/v1/sessions/{ask(server, f'{session}/fork')['id']}"
    assert fed(server, again, "and on")["logprobs"] == fed(server, session, "and on")["logprobs"]


def test_the_commands_of_the_docs(trained_run, tmp_path):
    """As a reader would run them."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (block,) = [one for one in re.findall("^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if '"adapt"' in one]
    with in_thread(trained_run, sessions=tmp_path) as server:
        opening, *lines = re.findall(r"localhost:8000(\S+) .* -d '(.*?)'", block)
        id = ask(server, opening[0], **json.loads(opening[1]) | {"model": "small"})["id"]
        answers = [ask(server, path.replace("$id", id), **json.loads(body)) for path, body in lines]
    told, scored, written, saved, restored = answers
    assert len(told["logprobs"]) == len(told["static_logprobs"]) == told["tokens_read"]
    assert scored["static_loss_nats"] > 0 < scored["loss_nats"]
    assert written["usage"]["completion_tokens"] == 50
    assert saved["bytes"] < 1_000_000
    assert restored["tokens_read"] == told["tokens_read"] + 50


# How much, and for how long


def test_others_go_on_between_two_lessons(server, loaded):
    """A long text that is learned from does not keep a short one waiting; no piece is longer than so many tokens."""
    for how in (AdaptationConfig(rate=0.1, segment=5), AdaptationConfig(rate=0.1, segment=200, learns="adapters")):
        learner = Learner.begin(loaded.model, how, statistics=None, compare=False)
        pieces = learn(learner, list(TEXT.encode()))
        found = list(pieces)
        assert max(found) <= max(how.segment, LESSON_TOKENS) + 1
        assert sum(found) == len(TEXT)
        assert learner.read == 0, "a value"
    session, long = opened(server, **WAYS["both"]), [7] * 3_000
    ended = list[str]()

    def learns() -> None:
        ask(server, f"{session}/feed", tokens=long)
        ended.append("learning")

    learning = threading.Thread(target=learns)
    learning.start()
    server.complete("x", max_tokens=4)
    ended.append("writing")
    learning.join(60)
    assert ended == ["writing", "learning"]


def test_there_are_so_many_and_no_more(trained_run, loaded):
    with in_thread(trained_run, limits=Limits(learning=2)) as server:
        session = opened(server)
        ask(server, f"{session}/fork")
        for path, body in (("/v1/sessions", {"model": "small", "adapt": {}}), (f"{session}/fork", {})):
            answer = server.post(path, **body)
            assert answer.status_code == 409
            assert "already 2 sessions that learn; DELETE one first" in answer.text
        assert ask(server, "/v1/sessions", model="small")
        assert (server.metric("sessions_learning"), server.metric("sessions_learning_most")) == (2, 2)
        with server.client() as client:
            assert client.delete(session).status_code == 200
        opened(server)
    with in_thread(trained_run, limits=Limits(learning=0)) as server:
        assert "--max-learning 1" in server.post("/v1/sessions", model="small", adapt={}).text
    how = replace(DEFAULT, segment=12)
    size = LearningCost.of(loaded.model, how, compare=False).session
    with in_thread(trained_run, limits=Limits(learning_bytes=2 * size)) as server:
        for _ in range(2):
            taken = ask(server, "/v1/sessions", model="small", adapt={})["adapt"]["bytes"]
        assert taken == size
        answer = server.post("/v1/sessions", model="small", adapt={})
        assert f"take {2 * size:,} of {2 * size:,} bytes, and this one up to {size:,}" in answer.text
        answer = server.post("/v1/sessions", model="small", adapt={"cache_size": 100_000})
        assert (answer.status_code, "smaller rank, segment or cache_size" in answer.text) == (409, True)


@pytest.mark.parametrize("way", WAYS)
def test_a_session_keeps_no_more_than_was_reckoned(loaded, way):
    how = AdaptationConfig(**{"segment": 16} | {name: value for name, value in WAYS[way].items() if name != "by"})
    learner = Learner.begin(loaded.model, how, statistics=None, compare=True)
    nats(learner.adaptive, TEXT * 3)
    lane, cost = learner.adaptive.lane(0), LearningCost.of(loaded.model, how, compare=True)
    kept = [] if lane.cache is None else [lane.cache.hidden_ND, lane.cache.next_N]
    if isinstance(lane, Learning):
        assert sum(weight.nbytes for weight in lane.weights) == cost.weights
        kept += [*lane.weights, *lane.memory.layers]
    taken = sum(tensor.nbytes for tensor in kept)
    assert taken <= cost.state
    assert 2 * taken < cost.session


@pytest.mark.parametrize(
    ("adapt", "status", "message"),
    [
        ({"by": "cache", "rate": 1.0}, 422, "no weights move"),
        ({"by": "gradient", "cache_size": 5}, 422, "there is no cache"),
        ({"by": "everything"}, 422, "adapt.by"),
        ({"rate": 0}, 422, "adapt.rate"),
        ({"rate": -1.0}, 422, "adapt.rate"),
        ({"decay": 1.0}, 422, "adapt.decay"),
        ({"cache_size": 0}, 422, "adapt.cache_size"),
        ({"cache_lambda": 1.0}, 422, "adapt.cache_lambda"),
        ({"segment": 513}, 422, "adapt.segment"),
        ({"segment": 1.5}, 422, "adapt.segment"),
        ({"rank": 17}, 422, "adapt.rank: larger than"),
        ({"rank": 1 << 20}, 422, "adapt.rank"),
        ({"learns": "everything"}, 422, "adapt.learns"),
        ({"rule": "rms"}, 409, "sizes of gradients"),
        ({"cache_size": 1 << 22}, 409, "bytes"),
        ({"memory": 1}, 422, "not known"),
        (5, 422, "adapt"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(server, adapt, status, message):
    answer = server.post("/v1/sessions", model="small", adapt=adapt)
    assert (answer.status_code, message in answer.text) == (status, True), answer.text


def test_weights_that_stray_end_a_request_and_nothing_else(server):
    session = opened(server, by="gradient", rate=1e6, learns="all", segment=5)
    answer = server.post(f"{session}/feed", text=TEXT)
    assert (answer.status_code, "smaller adapt.rate" in answer.text) == (409, True)
    assert server.get(session).json()["tokens_read"] == 0
    assert server.get("/health").json()["status"] == "ok"


def test_a_recurrent_model_learns_with_all_its_weights(recurrent_run):
    with in_thread(recurrent_run) as server:
        session = opened(server, model="lstm")
        assert settings(server, session).learns == "all"
        found = fed(server, session, TEXT)
        assert found["logprobs"][-50:] != found["static_logprobs"][-50:]
        assert ask(server, f"{session}/generate", max_tokens=5)
        answer = server.post("/v1/sessions", model="lstm", adapt={"learns": "adapters"})
        assert (answer.status_code, "recurrent" in answer.text) == (422, True)


def test_what_was_tuned_is_what_a_session_begins_with(trained_run, byte_store, tmp_path):
    run = tmp_path / "small"
    shutil.copytree(trained_run, run)
    words = ["tune-adaptation", str(run), "--data", str(byte_store.folder), "--tokens", "200", "--segments", "8"]
    assert main([*words, "--adaptation.learns", "adapters", "--adaptation.rank", "2"]) == 0
    tuned = txl.load(run).adaptation("both")
    assert (tuned.rule, tuned.rank) == ("rms", 2)
    (tmp_path / "saved").mkdir()
    with in_thread(run, sessions=tmp_path / "saved") as server:
        session = opened(server)
        how = settings(server, session)
        assert how == replace(tuned, cache_context=how.cache_context)
        assert settings(server, opened(server, rate=0.5)) == replace(how, rate=0.5)
        other = settings(server, opened(server, learns="all"))
        assert (other.rate, other.rule, other.decay) == (DEFAULT.rate, DEFAULT.rule, DEFAULT.decay)
        if how.moves:
            fed(server, session)
            ask(server, f"{session}/save", name="rms")
            assert ask(server, "/v1/sessions/restore", name="rms")["adapt"] == server.get(session).json()["adapt"]
            (run / "adaptation.safetensors").unlink()
            assert "needs the sizes of gradients" in server.post("/v1/sessions/restore", name="rms").text
    (run / "adaptation.json").write_text("{}")
    with in_thread(run) as server:
        answer = server.post("/v1/sessions", model="small", adapt={})
        assert (answer.status_code, "tune-adaptation again" in answer.text) == (409, True)
        assert ask(server, "/v1/sessions", model="small")


# At rest, where anybody may have written it


@pytest.fixture(scope="module")
def good(server, folder):
    session = opened(server, **WAYS["both"])
    fed(server, session)
    ask(server, f"{session}/save", name="good")
    return folder / "good"


def restore(server: Running) -> tuple[int, str]:
    answer = server.post("/v1/sessions/restore", name="bad")
    if answer.status_code == 200:
        with server.client() as client:
            client.delete(f"/v1/sessions/{answer.json()['id']}")
    return answer.status_code, answer.text


@pytest.fixture
def bad(good, folder):
    shutil.copytree(good, folder / "bad")
    yield folder / "bad"
    shutil.rmtree(folder / "bad")


@pytest.mark.parametrize("file", ["learning.safetensors", "still.safetensors"])
def test_states_changed_by_chance_are_refused_or_as_good(server, bad, file):
    path, chance, seen = bad / file, random.Random(5), set[int]()
    whole = path.read_bytes()
    assert restore(server)[0] == 200
    tensors, metadata = parse(whole)
    for turn in range(30):
        path.write_bytes(
            serialise(mutated_tensors(tensors, chance), metadata) if turn % 2 else mutated_safetensors(whole, chance)
        )
        status, text = restore(server)
        assert status == 200 or (status == 409 and "damaged" in text), text
        seen.add(status)
    assert 409 in seen
    assert server.get("/health").json()["status"] == "ok"


def test_states_that_are_right_and_of_something_else_are_refused(server, good, bad, loaded):
    """With a checksum that is right."""
    about = json.loads((good / "session.json").read_text())["adapt"]
    how = AdaptationConfig(**{name: value for name, value in about.items() if name not in ("compare", "sizes")})
    two = loaded.adaptive_reader(how, lanes=2)
    two.save(bad / "learning.safetensors")
    assert restore(server)[0] == 409, "two lanes"
    one = loaded.adaptive_reader(how)
    nats(one, "another text")
    one.save(bad / "learning.safetensors")
    assert restore(server)[0] == 409, "it has read less than the other"
    loaded.adaptive_reader(replace(how, rate=0.25)).save(bad / "learning.safetensors")
    assert restore(server)[0] == 409, "another rate"
    write_tensors(bad / "learning.safetensors", {"read": torch.tensor([2**52])}, metadata=one._about())
    assert restore(server)[0] == 409, "so much that nothing of it fits"
    (bad / "learning.safetensors").unlink()
    (bad / "learning.safetensors").symlink_to(good / "learning.safetensors")
    assert restore(server)[0] == 409, "a link"
    (bad / "learning.safetensors").unlink()
    (bad / "learning.safetensors").write_bytes(b"\0" * 50_000_000)
    assert restore(server)[0] == 409, "larger than it can be"


@pytest.mark.parametrize(
    "change",
    [
        {"rate": -1.0},
        {"rate": "1"},
        {"rate": 1e300},
        {"rank": 0},
        {"rank": 1 << 40},
        {"rank": 60_000},
        {"segment": 0},
        {"segment": 1 << 30},
        {"cache_size": 0},
        {"cache_size": 1 << 40},
        {"cache_size": 1 << 22},
        {"cache_lambda": 1.0},
        {"learns": "everything"},
        {"rule": "rms"},
        {"rule": 5},
        {"compare": "yes"},
        {"sizes": "0" * 64},
        {"more": 1},
    ],
    ids=str,
)
def test_every_field_of_how_it_learns_is_checked(server, bad, change):
    about = json.loads((bad / "session.json").read_text())
    about["adapt"] |= change
    (bad / "session.json").write_text(json.dumps(about))
    status, text = restore(server)
    assert status in (409, 422), text


def test_a_session_that_learns_is_private_and_counts(server, good):
    modes = {path.name: path.stat().st_mode & 0o777 for path in (good, *good.iterdir())}
    assert modes == {
        "good": 0o700,
        "learning.safetensors": 0o600,
        "still.safetensors": 0o600,
        "session.json": 0o600,
    }
