"""`txl runs` and `txl compare`: what stands in folders, told; figures of one text under one rule, or not at all."""

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest

import transformer_xl as txl
from mutations import mutated
from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.cli import main
from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text
from transformer_xl.evaluation import evaluate, make_rule
from transformer_xl.training import train
from transformer_xl.training.run_summary import curves_of, find_runs, summarise

TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    pass\n" * 60


@pytest.fixture(scope="module")
def runs(trained_run, byte_store, tmp_path_factory):
    """Two runs on one store, and one on other tokens."""
    place = tmp_path_factory.mktemp("compared")
    shutil.copytree(trained_run, place / "a")
    shorter = replace(SMALL, training=replace(SMALL.training, steps=6, seed=2))
    train(shorter, store=byte_store, folder=place / "deeper" / "b", command="txl train b")
    (place / "text.py").write_text(TEXT * 4)
    settings = OwnText(tokenizer="bpe", vocabulary_size=280)
    pairs = prepare_own_text([place / "text.py"], out=place / "pairs", settings=settings)
    other = replace(shorter, model=replace(shorter.model, vocabulary=pairs.manifest.vocabulary_size))
    train(other, store=pairs, folder=place / "c", command="txl train c")
    return place


def told(capsys, *words):
    code = main([str(word) for word in words])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown


def refused(capsys, *words):
    assert main([str(word) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    return shown.err


# --- runs


def test_runs_are_listed_with_what_they_came_to(runs, capsys):
    found = {one["folder"]: one for one in json.loads(told(capsys, "runs", runs, "--json").out)}
    assert sorted(found) == [str(runs / "a"), str(runs / "c"), str(runs / "deeper" / "b")]
    a = found[str(runs / "a")]
    loaded = txl.load(runs / "a")
    assert a["parameters"] == sum(tensor.numel() for tensor in loaded.model.state_dict().values())
    assert (a["step"], a["steps"], a["unit"]) == (SMALL.training.steps, SMALL.training.steps, "bits_per_byte")
    lines = [json.loads(line) for line in (runs / "a" / "metrics.jsonl").read_text().splitlines()]
    assert a["best"] == min(line["bits_per_byte"] for line in lines if line["kind"] == "validation")
    assert a["minutes"] == [line["seconds"] for line in lines if line["kind"] == "train"][-1] / 60
    assert a["data"] == loaded.checkpoint.about.corpus
    assert a["problem"] is None
    table = told(capsys, "runs", runs).out
    assert "deeper/b" in table
    assert f"{a['best']:.4f} bits per byte" in table
    assert a["changed"] in table


def test_a_run_is_its_own_folder_and_hidden_ones_are_left_out(runs, tmp_path, capsys):
    assert list(find_runs(runs / "a")) == [runs / "a"]
    shutil.copytree(runs / "a", tmp_path / ".hidden")
    assert "holds no run" in refused(capsys, "runs", tmp_path)
    assert "there is no folder" in refused(capsys, "runs", tmp_path / "gone")
    assert json.loads(told(capsys, "runs", tmp_path, "--json").out) == []


def test_a_damaged_run_says_so_and_hides_no_other(runs, tmp_path, capsys):
    for name in ("sound", "torn", "empty", "garbled"):
        shutil.copytree(runs / "a", tmp_path / name)
    (checkpoint,) = (tmp_path / "torn" / "checkpoints").glob(f"step-{SMALL.training.steps:08d}")
    (checkpoint / "config.json").write_text("{")
    (tmp_path / "torn" / "checkpoints" / "best.json").unlink()
    shutil.rmtree(tmp_path / "empty" / "checkpoints")
    (tmp_path / "empty" / "checkpoints").mkdir()
    lines = ["[]", "7", '{"kind": "train"}', '{"kind": "validation", "step": true, "loss_nats": 1}', "{", '"x"']
    lines += ['{"kind": "validation", "step": 3, "loss_nats": NaN, "bits_per_byte": "x"}', '{"kind": 3, "step": 1}']
    (tmp_path / "garbled" / "metrics.jsonl").write_text("\n".join(lines))
    shown = told(capsys, "runs", tmp_path).out
    assert "sound" in shown
    assert "config.json is not JSON" in shown
    assert "empty holds no checkpoint" in shown.replace(str(tmp_path) + "/", "")
    assert summarise(tmp_path / "garbled").best is None


def test_mutated_runs_are_told_or_refused(runs, tmp_path):
    chance = random.Random(21)
    folder = tmp_path / "run"
    shutil.copytree(runs / "a", folder)
    chosen = folder / "checkpoints" / f"step-{SMALL.training.steps:08d}"
    (folder / "checkpoints" / "best.json").unlink()
    for file in (folder / "metrics.jsonl", chosen / "config.json", chosen / "about.json", chosen / "model.safetensors"):
        sound = file.read_bytes()
        for _ in range(40):
            file.write_bytes(mutated(sound, chance))
            assert summarise(folder).folder == str(folder)
        file.write_bytes(sound)
    assert summarise(folder).problem is None


# --- compare


def test_figures_of_one_split_are_those_of_evaluate(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = json.loads(told(capsys, "compare", runs / "a", runs / "deeper" / "b", "--json").out)
    for name, row in zip(("a", "deeper/b"), answer["runs"], strict=True):
        loaded = txl.load(runs / name)
        expected = loaded.evaluate()
        assert row["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-9)
        assert row["rule_in_words"] == expected.rule.sentence()
    assert answer["warnings"] == []
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    shown = told(capsys, "compare", runs / "a", runs / "deeper" / "b", "--tokens", "500", "--plot", "mine.png").out
    assert "best" in shown
    assert "plot: mine.png" in shown
    assert "rule exact: every token after the first scored once" in shown


def test_two_rules_are_told_and_can_be_made_one(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "a", tmp_path / "longer")
    loaded = txl.load(runs / "a")
    from transformer_xl.checkpoint.folder import write_checkpoint

    config = replace(loaded.config, evaluation=replace(loaded.config.evaluation, memory=30))
    (folder,) = (tmp_path / "longer" / "checkpoints").glob(f"step-{loaded.checkpoint.about.step:08d}")
    write_checkpoint(
        folder,
        config=config,
        about=loaded.checkpoint.about,
        weights=loaded.model.state_dict(),
        tokenizer=loaded.tokenizer,
    )
    shown = told(capsys, "compare", runs / "a", "longer")
    assert "careful: these figures were made by 2 rules" in shown.err
    assert "memory 30" in shown.err
    shown = told(capsys, "compare", runs / "a", "longer", "--memory", "20")
    assert "careful" not in shown.err
    assert "with memory 20" in shown.out


def test_other_tokens_are_compared_on_the_bytes_of_a_text(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text(TEXT)
    assert "cannot be compared; give one with --text FILE" in refused(capsys, "compare", runs / "a", runs / "c")
    assert "another vocabulary" in refused(capsys, "compare", runs / "a", runs / "c", "--data", runs / "pairs")
    answer = json.loads(told(capsys, "compare", runs / "a", runs / "c", "--text", "text.py", "--json").out)
    for name, row in zip("ac", answer["runs"], strict=True):
        loaded = txl.load(runs / name)
        settings = OwnText(existing=loaded.tokenizer, shares=(1.0,))
        split = prepare_own_text(["text.py"], out=tmp_path / name, settings=settings).split("train")
        rule = make_rule(loaded.model, loaded.config.evaluation, tokens=len(split))
        assert row["bits_per_byte"] == pytest.approx(evaluate(loaded.model, split, rule=rule).bits_per_byte)
    assert answer["runs"][1]["tokens"] < answer["runs"][0]["tokens"]


def test_a_word_models_bits_are_warned_of(runs, word_store, word_config, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text(TEXT)
    train(word_config, store=word_store, folder=tmp_path / "words", command="txl train words")
    shown = told(capsys, "compare", runs / "a", "words", "--text", "text.py")
    assert "words reads words, of which those it does not know are all one" in shown.err


def test_a_text_of_records_is_told_its_field(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"note": "no", "subject": f"def f_{n}(x): return x"}) for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    words = ["compare", runs / "a", runs / "c", "--text", "a.jsonl", "--json"]
    one, other = (
        json.loads(told(capsys, *words, "--field", field).out)["runs"][0]["tokens"] for field in ("note", "subject")
    )
    assert one < other
    words = ["evaluate", runs / "a", "--text", "a.jsonl", "--field", "subject", "--json"]
    assert json.loads(told(capsys, *words).out)["tokens"] == other


def test_what_cannot_be_compared_is_one_sentence(runs, tmp_path, capsys):
    assert "name two or more" in refused(capsys, "compare", runs / "a")
    assert "name two or more" in refused(capsys, "compare", runs / "a", runs / "a")
    assert "two texts" in refused(capsys, "compare", runs / "a", runs / "c", "--text", "x", "--data", "y")
    assert "shorter --text" in refused(capsys, "compare", runs / "a", runs / "c", "--text", "x", "--tokens", "9")
    assert "at least 2" in refused(capsys, "compare", runs / "a", runs / "c", "--tokens", "1")
    assert "there is no run" in refused(capsys, "compare", runs / "a", tmp_path / "gone")
    assert "must end in .png" in refused(
        capsys, "compare", runs / "a", runs / "deeper" / "b", "--plot", tmp_path / "a.bmp"
    )
    assert "standard input can be read once; give a file" in refused(
        capsys, "compare", runs / "a", runs / "c", "--text", "-"
    )
    assert "is for a --text of records" in refused(capsys, "compare", runs / "a", runs / "c", "--field", "x")
    assert "--plot: there is no folder nowhere" in refused(
        capsys, "compare", runs / "a", runs / "c", "--plot", "nowhere/x.png"
    )


def test_curves_have_a_point_for_each_line(runs):
    for name, per_byte in (("a", True), ("c", False)):
        curves = curves_of(RunFolder(runs / name))
        lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        expected = [(line["step"], line["bits_per_byte"]) for line in lines if line["kind"] == "validation"]
        found = curves["validation"]
        assert list(zip(found.steps.tolist(), found.bits.tolist(), strict=True)) == expected
        train_nats = [line["loss_nats"] for line in lines if line["kind"] == "train"]
        bits_per_token = np.array(train_nats) / np.log(2)
        assert np.allclose(curves["train"].bits, bits_per_token, rtol=0.01) == per_byte
        assert (np.diff(curves["train"].minutes) >= 0).all()
    (runs / "a" / "metrics.jsonl").rename(runs / "a" / "away")
    assert not len(curves_of(RunFolder(runs / "a"))["train"].bits)
    (runs / "a" / "away").rename(runs / "a" / "metrics.jsonl")
