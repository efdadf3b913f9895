"""How surprising a text is and where a head looks, over HTTP: the library's own figures."""

import numpy as np
import pytest
import torch
from serving_helpers import in_thread

import transformer_xl as txl
from transformer_xl.analysis.attention import TOP_SHARE, attention_maps
from transformer_xl.config import EvaluationConfig
from transformer_xl.training import train

TEXT = "def é(s):\n    return '日本'\n"


def test_scores_are_the_librarys_and_lie_where_their_text_lies(server, trained_run):
    answer = server.post("/v1/score", model="small", text=TEXT).json()
    losses = txl.load(trained_run).score(TEXT).nats[1:]
    tokens = answer["tokens"]
    assert tokens[0]["logprob"] is None
    assert [one["logprob"] for one in tokens[1:]] == pytest.approx((-losses).tolist(), abs=1e-5)
    assert answer["loss_nats"] == pytest.approx(losses.mean(), abs=1e-5)
    assert answer["memory"] == {"used": 12, "length": 12}
    assert [one["id"] for one in tokens] == list(TEXT.encode())
    for one in tokens:
        inside = TEXT[one["start"] : one["end"]]
        assert len(inside) == 1
        assert one["text"] == inside or (one["text"].startswith("\\x") and not inside.isascii())
    assert server.post("/v1/score", model="small", tokens=list(TEXT.encode())).json() == answer


def test_a_list_is_scored_text_by_text(server):
    texts = [TEXT, "a", "import os\n" * 9, TEXT]
    alone = [server.post("/v1/score", model="small", text=text).json() for text in texts]
    answer = server.post("/v1/score", model="small", text=texts).json()
    assert answer["model"] == "small"
    assert [{"model": "small", **one} for one in answer["data"]] == alone
    assert answer["data"][0] == answer["data"][3]
    known = [one["logprob"] for one in alone[2]["tokens"][1:]]
    assert alone[2]["bits"] == pytest.approx(-sum(known) / np.log(2), rel=1e-6)
    assert (alone[1]["bits"], alone[1]["loss_nats"]) == (0, None)
    tokens = [list(text.encode()) for text in texts]
    assert server.post("/v1/score", model="small", tokens=tokens).json() == answer
    assert server.post("/v1/score", model="small", text=["a"]).json()["data"][0]["bits"] == 0
    off = server.post("/v1/score", model="small", text=texts, memory="off").json()
    assert off["data"][2] == {
        key: value
        for key, value in server.post("/v1/score", model="small", text=texts[2], memory="off").json().items()
        if key != "model"
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"text": []}, "text: "),
        ({"text": ["a"] * 1025}, "text: "),
        ({"text": ["a", 3]}, "text: "),
        ({"text": ["a", ""]}, "the text holds no tokens"),
        ({"tokens": [[1], []]}, "tokens: "),
        ({"tokens": [[1], [256]]}, "tokens: this model's vocabulary ends at 255"),
        ({"tokens": [[1], 2]}, "tokens: "),
        ({"text": ["x" * 40_000] * 2}, "the texts have 80,000 tokens together, and one request may have 65,536"),
        ({"text": ["a"], "tokens": [[1]]}, "give either text or tokens"),
        ({}, "give either text or tokens"),
    ],
)
def test_lists_that_cannot_be_scored(server, body, said):
    answer = server.post("/v1/score", model="small", **body)
    assert answer.status_code == 422
    assert said in answer.json()["error"]["message"]


def test_without_memory_each_segment_is_read_for_itself(server, trained_run):
    tokens = list(b"some text of more than two segments")
    answer = server.post("/v1/score", model="small", tokens=tokens, memory="off").json()
    model = txl.load(trained_run).model
    expected = []
    with torch.no_grad():
        for start in range(0, len(tokens), 12):
            segment, after = tokens[start : start + 12], tokens[start + 1 : start + 13]
            hidden = model(torch.tensor([segment])).hidden_BTD[:, : len(after)]
            expected += (-model.vocabulary.loss(hidden, torch.tensor([after]))[0]).tolist()
    assert [one["logprob"] for one in answer["tokens"][1:]] == pytest.approx(expected, abs=1e-5)
    with_memory = server.post("/v1/score", model="small", tokens=tokens).json()
    assert with_memory["loss_nats"] != pytest.approx(answer["loss_nats"], abs=1e-3)


def test_words_lie_where_they_stand(word_store, word_config, tmp_path):
    train(word_config, store=word_store, folder=tmp_path / "words", command="txl train words")
    with in_thread(tmp_path / "words") as server:
        text = "the  object\nof is"
        answer = server.post("/v1/score", model="words", text=text).json()
        assert [text[one["start"] : one["end"]] for one in answer["tokens"]] == ["the", "object", "\n", "of", "is"]
        by_id = server.post("/v1/score", model="words", tokens=[one["id"] for one in answer["tokens"]]).json()
        joined = "the object\nof is"
        assert [joined[one["start"] : one["end"]] for one in by_id["tokens"]] == ["the", "object", "\n", "of", "is"]


@pytest.mark.parametrize("position", [1, 14, 40])
def test_attention_is_the_analysis(server, trained_run, position):
    tokens = list(range(30, 80))
    answer = server.post("/v1/attention", model="small", tokens=tokens, position=position, layer=1, head=0).json()
    lengths = EvaluationConfig(segment=12, memory=12)
    model = txl.load(trained_run).model
    (found,) = attention_maps(model, np.array(tokens), lengths=lengths, heads=[(1, 0)], positions=[position])
    (row,) = found.rows
    assert answer["first"] == row.first_key
    assert answer["weights"] == pytest.approx(row.probability["total"].tolist(), abs=1e-6)
    assert len(answer["weights"]) == position - answer["first"] + 1
    total = np.sum([answer["terms"][term] for term in "abcd"], axis=0)
    assert np.exp(total - total.max()) / np.exp(total - total.max()).sum() == pytest.approx(answer["weights"], abs=1e-5)
    assert [place for place, marked in enumerate(answer["marked"]) if marked] == row.top()
    assert sum(answer["marked"]) <= np.ceil(TOP_SHARE * len(answer["weights"]))
    assert answer["segment_start"] == position // 12 * 12


@pytest.mark.parametrize(
    "wrong", [{"layer": 2}, {"head": 2}, {"position": 50}, {"position": -1}, {"text": "x", "tokens": None}]
)
def test_what_does_not_exist_cannot_be_looked_at(server, wrong):
    body = {"model": "small", "tokens": list(range(30, 80)), "position": 0, "layer": 0, "head": 0} | wrong
    body = {name: value for name, value in body.items() if value is not None}
    assert server.post("/v1/attention", **body).status_code == 422
