"""Learning while reading as a study: every way, tuned on valid and told on test, and only once; beside it a text of another kind."""

import numpy as np
import pytest
from small_scale import MINIMAL

from transformer_xl.cli import main
from transformer_xl.data.store import open_store
from transformer_xl.errors import InputError
from transformer_xl.presets import find_preset
from transformer_xl.studies import adaptation
from transformer_xl.studies.catalogue import run_study


@pytest.fixture
def other_store(tmp_path):
    text = tmp_path / "other.txt"
    text.write_bytes(b"def f(x):\n    return x ** 2  # \xff\xfe\x80\n" * 60)
    assert main(["prepare", str(text), "--binary", "keep", "--out", str(tmp_path / "other")]) == 0
    return open_store(tmp_path / "other")


def test_every_way_stands_beside_the_static_one(byte_store, other_store, tmp_path, monkeypatch):
    monkeypatch.setattr(adaptation, "VALID_TOKENS", 60)
    monkeypatch.setattr(adaptation, "SEGMENTS", 4)
    study = {"scale": MINIMAL, "data": byte_store.folder, "shift": other_store.folder, "out": tmp_path / "out"}
    page, value = run_study("adaptation", **study, seeds=2)
    text = page.read_text()
    for read in ("test", "shift"):
        for way in adaptation.WAYS:
            for found in value["texts"][read][way]:
                assert found["nats"] > 0
                assert np.mean(found["blocks"]) == pytest.approx(found["nats"], rel=0.05)
            assert f"| {read} | {way} |" in text
    assert value["texts"]["test"]["static"][0]["how"] == ""
    assert "a cache of the last" in value["texts"]["test"]["rms and cache"][0]["how"]
    assert value["pictures"] == ["adaptation-minimal.png", "adaptation-minimal-shift.png"]
    monkeypatch.setattr(adaptation, "_compared", None)  # not asked again
    assert run_study("adaptation", **study, seeds=2)[1]["texts"] == value["texts"]


def test_another_text_is_read_in_the_tokens_of_the_first(other_store, tmp_path):
    """What the first text never had has no token, and is left out."""
    (tmp_path / "letters.txt").write_text("return fox def hen\n" * 100)
    words = ["prepare", str(tmp_path / "letters.txt"), "--tokenizer", "char", "--out", str(tmp_path / "letters")]
    assert main(words) == 0
    letters = open_store(tmp_path / "letters")
    read = adaptation.shifted(other_store, letters, tokens=30)
    assert letters.tokenizer.decode(read.tokens) == "def fx\n    return x     \ndef f"
    assert (len(read), read.bytes) == (30, 30)


def test_a_gain_is_that_of_perplexity_or_of_bits():
    blocks = {"static": [2.0, 4.0], "rms": [1.0, 3.0]}
    found = [{"test": {way: {"blocks": each} for way, each in blocks.items()}}]
    assert adaptation.gain(found, "test", "rms", unit="bits_per_byte").value == pytest.approx(100 / 3)
    assert adaptation.gain(found, "test", "rms", unit="perplexity_per_word").value == pytest.approx(
        100 * (1 - np.exp(-1))
    )


def test_other_studies_read_no_second_text(byte_store, tmp_path, capsys):
    words = ["study", "recl", "--data", str(byte_store.folder), "--shift", str(byte_store.folder)]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "txl: --shift is for the study adaptation; leave it out\n"
    with pytest.raises(InputError, match="there is no folder"):
        run_study("adaptation", scale=MINIMAL, data=byte_store.folder, shift="nowhere", out=tmp_path)


def test_a_way_whose_weights_stray_has_a_figure(byte_store, monkeypatch):
    """And does not end a study of hours."""
    from small_models import build
    from transformer_xl.config import AdaptationConfig
    from transformer_xl.evaluation import make_rule

    net = build(vocabulary=256).float()
    split = byte_store.split("test").first(200)
    rule = make_rule(net, find_preset("tiny-byte").run.evaluation, tokens=200, lanes=1)
    how = AdaptationConfig(rate=1e6, segment=20)
    found = adaptation._told(net, split, how, rule=rule, statistics=None)
    assert found["nats"] == pytest.approx(np.log(256))
    assert found["how"].endswith("; its weights strayed, and every token counts as a guess among all")
