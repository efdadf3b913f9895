"""`txl attention`: every file is there, says the same, runs nothing; what cannot be done is one sentence."""

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import transformer_xl as txl
from small_run import SMALL, prepare
from transformer_xl.analysis.attention import average_attention
from transformer_xl.cli import main
from transformer_xl.config import EvaluationConfig
from transformer_xl.data.text.display import visible
from transformer_xl.training import train

FILES = ["attention.json", "average.png", "heads.png", "report.html", "terms.png"]
VOID = {"meta", "img", "br", "wbr"}
TEXT = 'def naïve(x):\n\treturn "音" + x <script>alert(1)</script> & "\'$x^2$ \u202e\u0301\x00 end\n' * 3


class Page(HTMLParser):
    """Fails on a tag that is not closed in order; keeps what was seen."""

    def __init__(self, html):
        super().__init__()
        self.open, self.seen, self.attributes, self.data = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.attributes.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.data.append(data)

    def tokens(self):
        return [attributes["title"] for tag, attributes in self.attributes if tag == "span"]


@pytest.fixture
def own_run(trained_run, tmp_path):
    shutil.copytree(trained_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module", params=["char", "word", "bpe"])
def other_run(request, tmp_path_factory):
    """A run of two steps for each other tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    source = Path(json.__file__).parent / "__init__.py"
    (folder / "text.txt").write_text(TEXT * 20 + source.read_text())
    store = prepare(folder / "text.txt", folder / "store", request.param, "--binary", "keep")  # it has a zero byte
    model = replace(SMALL.model, vocabulary=store.manifest.vocabulary_size)
    config = replace(SMALL, model=model, training=replace(SMALL.training, steps=2, lanes=1))
    train(config, store=store, folder=folder / "run", command="txl train small")
    return folder / "run"


def result_of(capsys, *words):
    assert main(["attention", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_split_is_shown_and_written_down(own_run, byte_store, capsys):
    assert main(["attention", str(own_run), "--tokens", "300"]) == 0
    shown = capsys.readouterr().out
    folder = own_run / "figures" / "attention-valid"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in FILES if name.endswith("png"))
    result = json.loads((folder / "attention.json").read_text())
    assert (result["tokens"], result["span"], result["queries"], result["split"]) == (300, 12, 289, "valid")
    assert "300 tokens, each seeing its last 12, itself among them; averaged over the 289 that see so many" in shown
    assert "(the widest of different layers) at token " in shown
    assert "(drawn with seed 0 from those that see so many; --position chooses)" in shown
    assert f"report: {folder / 'report.html'}" in shown

    averages = average_attention(
        txl.load(own_run).model, byte_store.split("valid").tokens[:300], lengths=EvaluationConfig(segment=12, memory=12)
    )
    assert list(result["terms"]) == ["a", "b", "c", "d"]
    for term, values_NHR in averages.average.items():
        found_NHR = np.array(result["average_by_layer_head_distance"][term])
        np.testing.assert_allclose(found_NHR, values_NHR, rtol=1e-8, atol=0)
        np.testing.assert_allclose(found_NHR.sum(-1), 1, rtol=0, atol=1e-6)
    best = result["ranking"][0]
    assert best["mean_distance"] == averages.mean_distance.max()
    assert f"{best['layer']}.{best['head']}  " in shown.splitlines()[2]
    assert {one["layer"] for one in result["maps"]} == {1, 2}


def test_json_is_what_is_written_and_nothing_else_is_printed(own_run, tmp_path, capsys):
    result = result_of(capsys, own_run, "--split", "valid", "--tokens", "100", "--out", tmp_path / "deep" / "er")
    assert result == json.loads((tmp_path / "deep" / "er" / "attention.json").read_text())
    assert not (own_run / "figures" / "attention-valid").exists()


def test_heads_and_positions_are_those_asked_for(own_run, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text(TEXT)
    words = ["--head", "2.1", "--head", "1.2", "--position", "40", "--position", "3"]
    result = result_of(capsys, own_run, "--text", tmp_path / "notes.txt", *words)
    asked = [(one["layer"], one["head"], one["position"]) for one in result["maps"]]
    assert asked == [(2, 1, 40), (1, 2, 40), (2, 1, 3), (1, 2, 3)]
    data = TEXT.encode()
    assert result["tokens"] == len(data)
    for one in result["maps"]:
        assert [row["position"] for row in one["rows"]][-1] == one["position"]
        for row in one["rows"]:
            keys = data[row["first_key"] - 1 : row["position"]]
            assert len(keys) == min(12, row["position"])
            assert row["keys"] == [bytes([byte]).decode("utf-8", errors="backslashreplace") for byte in keys]
            assert row["token"] == row["keys"][-1]
            for term, probability in row["probability"].items():
                assert sum(probability) == pytest.approx(1, abs=1e-6)
                best = sorted(probability, reverse=True)[: -(-len(keys) // 5)]
                marked = [probability[place - row["first_key"]] for place in row["top"][term]]
                assert sorted(marked, reverse=True) == best
    assert (own_run / "figures" / "attention-notes.txt" / "report.html").exists()


def test_the_page_is_whole_and_runs_nothing(own_run, tmp_path, capsys):
    (tmp_path / "<img src=x onerror=alert(1)>.txt").write_text(TEXT)
    words = ["--head", "2.1", "--position", str(len(TEXT.encode()) * 2 // 3 - 25)]
    result = result_of(
        capsys, own_run, "--text", tmp_path / "<img src=x onerror=alert(1)>.txt", *words, "--memory", "60"
    )
    html = next((own_run / "figures").glob("attention-*/report.html")).read_text()
    page = Page(html)
    assert "script" not in page.seen
    assert [attributes["src"][:22] for tag, attributes in page.attributes if tag == "img"] == [
        "data:image/png;base64,"
    ] * 3
    assert "://" not in html
    assert not any(name.startswith("on") for _, attributes in page.attributes for name in attributes)
    row = result["maps"][0]["rows"][-1]
    assert "<script>" in "".join(row["keys"])
    expected = [
        f"{visible(key)}: {value:.9g}, "
        for probability in row["probability"].values()
        for key, value in zip(row["keys"], probability, strict=True)
    ]
    assert len(page.tokens()) == len(expected)
    assert all(title.startswith(start) for title, start in zip(page.tokens(), expected, strict=True))
    tops = [attributes for tag, attributes in page.attributes if tag == "span" and "top" in attributes.get("class", "")]
    assert len(tops) == sum(map(len, row["top"].values())) == 5 * 12


def test_every_tokenizer_is_readable(other_run, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    kind = txl.load(other_run).tokenizer.kind
    ids = txl.load(other_run).tokenizer.encode(TEXT)
    result = result_of(capsys, other_run, "--text", tmp_path / "text.txt", "--memory", "20", "--position", len(ids))
    assert result["tokens"] == len(ids)
    page = Page((other_run / "figures" / "attention-text.txt" / "report.html").read_text())
    shown = "".join(page.data)
    assert "the text ends here" in shown
    row = result["maps"][0]["rows"][-1]
    assert len(row["keys"]) == 20
    text = " ".join(row["keys"]) if kind == "word" else "".join(row["keys"])
    assert text.endswith({"char": "\x00 end\n", "word": "end <eos>", "bpe": "end\n"}[kind])
    assert {"char": "\\x00␣end⏎", "word": "end <eos>", "bpe": "end⏎"}[kind] in shown
    assert "\u202e" not in shown


def test_what_would_not_be_seen_is_shown():
    assert visible(" a\n\t") == "␣a⏎⇥"
    assert visible("\x00\u202e\ud800") == "\\x00\\u202e\\ud800"
    assert visible("音é\\xe2") == "音é\\xe2"


def test_without_matplotlib_the_rest_is_written(own_run, capsys, monkeypatch):
    monkeypatch.setattr("transformer_xl.pictures.can_draw", lambda: False)
    assert main(["attention", str(own_run), "--tokens", "100"]) == 0
    assert "no pictures: they need matplotlib" in capsys.readouterr().err
    folder = own_run / "figures" / "attention-valid"
    assert sorted(path.name for path in folder.iterdir()) == ["attention.json", "report.html"]
    assert "img" not in Page((folder / "report.html").read_text()).seen


def test_a_model_without_memory_sees_its_segment(own_run, capsys):
    result = result_of(capsys, own_run, "--memory", "0", "--tokens", "100")
    assert (result["span"], result["queries"], result["memory"]) == (12, 8, 0)
    assert result["maps"][0]["position"] in range(12, 97, 12)
    assert len(result["maps"][0]["rows"][-1]["keys"]) == 12
    assert len(result["maps"][0]["rows"][0]["keys"]) == 5
    assert all(head["memory_share"] == 0 for head in result["ranking"])


def test_positions_are_drawn_from_those_that_see_so_many(own_run, capsys):
    def position(*words):
        return result_of(capsys, own_run, "--tokens", "100", *words)["maps"][0]["position"]

    drawn = [position("--seed", seed) for seed in range(6)]
    assert drawn[0] == position()
    assert len(set(drawn)) > 1
    assert all(12 <= place < 100 for place in drawn)
    assert result_of(capsys, own_run, "--tokens", "12")["maps"][0]["position"] == 11  # none sees twelve and has a next


def test_what_cannot_be_shown_is_one_sentence(own_run, other_run, tmp_path, capsys, recurrent_run):
    def error(*words, run=own_run):
        assert main(["attention", str(run), *map(str, words)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        return shown.err

    for name, text in {"short": "abcde", "one": "a", "empty": "", "odd": "\U0001f600" * 40}.items():
        (tmp_path / name).write_text(text)
    assert "--text and --split are two different sources" in error("--text", tmp_path / "short", "--split", "test")
    assert "--text and --data are two different sources" in error("--text", tmp_path / "short", "--data", tmp_path)
    assert "gone does not exist; name a text file" in error("--text", tmp_path / "gone")
    assert "a text of 0 tokens has nothing to look back at" in error("--text", tmp_path / "empty")
    assert "a text of 1 tokens has nothing to look back at" in error("--text", tmp_path / "one")
    assert "has 5 tokens, and a memory of 12 is full only from token 12 on" in error("--text", tmp_path / "short")
    assert "fewer than one segment of 12" in error("--text", tmp_path / "short", "--memory", "0")
    assert "--seed draws a position, and --position names one" in error("--seed", "1", "--position", "20")
    assert "--seed: -1 is no seed" in error("--seed", "-1")
    assert "'x' is no head; write LAYER.HEAD" in error("--head", "x")
    for head in ("3.1", "1.3", "0.1", "1.0"):
        assert f"no head {head}: this model has layers 1 to 2 with heads 1 to 2" in error("--head", head)
    for position in ("0", "-4", "101"):
        assert f"no token {position} in a text of 100 tokens" in error("--tokens", "100", "--position", position)
    assert "a text of 1 tokens" in error("--tokens", "1")
    assert "--tokens: -1 is no number of tokens" in error("--tokens", "-1")
    assert "memory: -1" in error("--memory", "-1")
    assert "no split tset; did you mean test?" in error("--split", "tset")
    if txl.load(other_run).tokenizer.kind == "char":
        assert "is not among the" in error("--text", tmp_path / "odd", run=other_run)
    (checkpoint,) = list(own_run.glob("checkpoints/step-*20"))
    shutil.copytree(checkpoint, tmp_path / "alone")
    assert "say where to write with --out DIR" in error(run=tmp_path / "alone")
    assert "is a recurrent model, which has no attention to look at" in error(run=recurrent_run)
