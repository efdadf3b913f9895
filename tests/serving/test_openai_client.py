"""The official client talks to the server as it talks to OpenAI's: texts, streams, log-probabilities, errors."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import openai
import pytest
import torch
from serving_helpers import events, in_thread

import transformer_xl as txl
from small_run import SMALL
from transformer_xl import native
from transformer_xl.config import EvaluationConfig
from transformer_xl.serving.limits import Limits
from transformer_xl.training import train

PROMPT = "def decode(self, s, _w=WHITESPACE.match):\n"


@pytest.fixture(scope="module")
def client(server):
    http = httpx.Client(trust_env=False, verify=False)
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, http_client=http) as made:
        yield made


def test_a_completion_is_what_the_library_writes(client, trained_run):
    answer = client.completions.create(
        model="small", prompt=PROMPT, max_tokens=40, seed=7, temperature=0.9, extra_body={"top_k": 20}
    )
    expected = txl.load(trained_run).generate(PROMPT, tokens=40, seed=7, temperature=0.9, top_k=20)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 40)
    assert answer.object == "text_completion"


def test_a_stream_is_the_same_text_in_pieces(client):
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 40, "seed": 3}
    whole = client.completions.create(**asked).choices[0].text
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole
    assert len(texts) > 20
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 40


def test_several_choices_have_seeds_of_their_own(client):
    asked = {"model": "small", "max_tokens": 12}
    answer = client.completions.create(**asked, prompt=["ab", "cd"], n=3, seed=5)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for place, choice in enumerate(answer.choices):
        alone = client.completions.create(**asked, prompt="ab" if place < 3 else "cd", seed=5 + place % 3)
        assert choice.text == alone.choices[0].text
    assert answer.usage.completion_tokens == 72


def test_a_text_ends_before_a_stop_string(client):
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 60, "seed": 1}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[20:23]
    answer = client.completions.create(**asked, stop=[stop, "never to be seen"])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]


def test_log_probabilities_are_openais_and_the_models_own(client, trained_run):
    text = "in JSON é"
    answer = client.completions.create(model="small", prompt=text, max_tokens=3, logprobs=4, echo=True, seed=2)
    choice, told = answer.choices[0], answer.choices[0].logprobs
    assert choice.text.startswith(text)
    assert told.tokens[:10] == [*"in JSON ", "\\xc3", "\\xa9"]
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    losses = txl.load(trained_run).score(text).nats[1:]
    assert told.token_logprobs[1:10] == pytest.approx((-losses).tolist(), abs=1e-5)
    assert told.text_offset[:11] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9]
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == 13
    for place in range(1, 13):
        likeliest = told.top_logprobs[place]
        assert len(likeliest) == 4
        assert told.token_logprobs[place] <= max(likeliest.values()) + 1e-6
        if told.tokens[place] in likeliest:
            assert likeliest[told.tokens[place]] == pytest.approx(told.token_logprobs[place], abs=1e-5)
    alone = client.completions.create(model="small", prompt=text, max_tokens=0, logprobs=0, echo=True)
    assert alone.choices[0].text == text
    assert alone.choices[0].logprobs.token_logprobs == pytest.approx(told.token_logprobs[:10], abs=1e-6)


def test_settings_at_their_ends_are_settings(client):
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 8, "seed": 1}
    greedy = client.completions.create(**asked, temperature=0).choices[0].text
    for extreme in (5e-324, 2.2250738585072014e-308, 1e-5):
        assert client.completions.create(**asked, temperature=extreme).choices[0].text == greedy
        assert client.completions.create(**asked, top_p=extreme).choices[0].text == greedy
    assert client.completions.create(**asked, temperature=1e-4).choices[0].text == greedy
    assert client.completions.create(**asked, temperature=2.0, extra_body={"top_k": 2**31 - 1}).choices[0].text


def test_errors_are_the_clients_own(client, server, trained_run):
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.UnprocessableEntityError, match="max_tokens"):
        client.completions.create(model="small", prompt="x", max_tokens=10**6)
    with pytest.raises(openai.UnprocessableEntityError, match="vocabulary ends at 255"):
        client.completions.create(model="small", prompt=[1, 256])
    with in_thread(trained_run, key="right") as locked:
        http = httpx.Client(trust_env=False, verify=False)
        with openai.OpenAI(base_url=f"{locked.address}/v1", api_key="wrong", max_retries=0, http_client=http) as wrong:
            with pytest.raises(openai.AuthenticationError):
                wrong.completions.create(model="small", prompt="x")
            right = wrong.with_options(api_key="right")
            assert right.completions.create(model="small", prompt="x").choices[0].text
    with in_thread(trained_run, limits=Limits(admitted=1)) as narrow:
        http = httpx.Client(trust_env=False, verify=False)
        with (
            openai.OpenAI(base_url=f"{narrow.address}/v1", api_key="none", max_retries=0, http_client=http) as one,
            one.completions.create(model="small", prompt="x", max_tokens=16_000, stream=True) as stream,
        ):
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as refused:
                one.completions.create(model="small", prompt="x")
            assert int(refused.value.response.headers["retry-after"]) >= 1


def test_models_are_listed_with_what_there_is_to_know(client):
    (model,) = client.models.list().data
    assert model.id == "small"
    facts = model.transformer_xl
    assert (facts["layers"], facts["heads"], facts["memory"], facts["segment"]) == (2, 2, 12, 12)
    assert (facts["unit"], facts["attention"], facts["recurrent"]) == ("byte", True, False)
    assert facts["terms"] == ["a", "b", "c", "d"]


def test_models_without_memory_are_served_too(byte_store, tmp_path):
    config = replace(
        SMALL,
        model=replace(SMALL.model, memory=0, encoding="absolute"),
        evaluation=EvaluationConfig(segment=12),
        training=replace(SMALL.training, steps=2),
    )
    train(config, store=byte_store, folder=tmp_path / "vanilla", command="txl train vanilla")
    with in_thread(tmp_path / "vanilla") as server:
        text = server.complete(PROMPT, max_tokens=10, seed=3, top_k=30)
        assert text == txl.load(tmp_path / "vanilla").generate(PROMPT, tokens=10, seed=3, top_k=30)
        assert server.post("/v1/sessions", model="vanilla").status_code == 409
        scored = server.post("/v1/score", model="vanilla", text=PROMPT).json()
        assert len(scored["tokens"]) == len(PROMPT)
        seen = server.post("/v1/attention", model="vanilla", text=PROMPT, position=5, layer=0, head=1).json()
        assert sorted(seen["terms"]) == server.get("/v1/models").json()["data"][0]["transformer_xl"]["terms"] == ["a"]


def test_a_fixed_seed_gives_the_same_text_alone_and_among_64_others(trained_run):
    if not native.usable(torch.zeros(1)):
        pytest.skip("torch's own products differ in their last bit with the number of lanes")
    with in_thread(trained_run, limits=Limits(admitted=128)) as server:
        asked = {"max_tokens": 48, "seed": 11, "temperature": 1.0}
        alone = [server.complete(PROMPT[:length], **asked) for length in (3, 17, 40)]
        others = [server.post for _ in range(64)]
        with ThreadPoolExecutor(67) as pool:
            body = {"model": "small", "max_tokens": 200}
            running = [
                pool.submit(post, "/v1/completions", **body, prompt=f"x{i}" * i) for i, post in enumerate(others)
            ]
            while server.metric("under_way") < 40:
                assert not all(one.done() for one in running)
            before = server.metric("steps_total"), server.metric("tokens_written_total")
            among = [pool.submit(server.complete, PROMPT[:length], **asked) for length in (3, 17, 40)]
            assert [one.result() for one in among] == alone
            steps = server.metric("steps_total") - before[0]
            assert server.metric("tokens_written_total") - before[1] > 20 * steps, "they were not written together"
            assert all(one.result().status_code == 200 for one in running)


def test_memory_off_forgets_at_every_segment(server, trained_run):
    """Greedy, so that the text is a function of what the model still knows."""
    asked = {"max_tokens": 10, "temperature": 0.0, "memory": "off"}
    prompt = list(range(40, 40 + 30))  # two segments of 12, and 6 tokens of the next
    text = server.complete(prompt, **asked)
    assert text[:6] == server.complete(prompt[24:], **asked)[:6]
    loaded = txl.load(trained_run)
    segment, written = prompt[24:], []
    for _ in range(10):
        engine = loaded.engine()
        written.append(int(engine.feed(torch.tensor([segment])).argmax()))
        segment = [*segment, written[-1]] if len(segment) < 12 else [written[-1]]
    assert text == loaded.tokenizer.decode(written)


def test_recurrent_models_are_served_too(recurrent_run):
    run = recurrent_run
    with in_thread(run) as server:
        text = server.complete(PROMPT, max_tokens=20, seed=3, top_k=30)
        assert text == txl.load(run).generate(PROMPT, tokens=20, seed=3, top_k=30)
        stream = server.post("/v1/completions", model=run.name, prompt=PROMPT, max_tokens=5, stream=True)
        assert len(events(stream.text)) == 6
        refused = server.post("/v1/attention", model=run.name, text="abc", position=1, layer=0, head=0)
        assert refused.status_code == 409
