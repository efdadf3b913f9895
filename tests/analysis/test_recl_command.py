"""`txl recl` as people type it: runs, files of losses, both together, and what is refused."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from small_run import SMALL
from transformer_xl.cli import main
from transformer_xl.training import train

GRID = ["--step", "4", "--longest", "20", "--tokens", "60"]


@pytest.fixture(scope="session")
def vanilla_run(byte_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "vanilla"
    config = replace(
        SMALL,
        model=replace(SMALL.model, memory=0, encoding="absolute"),
        evaluation=replace(SMALL.evaluation, memory=0),
    )
    train(config, store=byte_store, folder=folder, command="txl train vanilla")
    return folder


@pytest.fixture(scope="session")
def word_run(word_config, word_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "words"
    train(word_config, store=word_store, folder=folder, command="txl train words")
    return folder


def losses(path, *, lengths=(10, 20, 30), positions=40, gain=0.2):
    np.savez(path, **{f"c{length}": np.full(positions, 5 - gain * place) for place, length in enumerate(lengths)})
    return str(path)


def answer(capsys, *words):
    assert main(["recl", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_are_compared_and_their_losses_kept(trained_run, vanilla_run, capsys):
    result = answer(capsys, trained_run, vanilla_run, *GRID, "--ratio", "0.10,1")
    assert set(result["recl"]) == {"small", "vanilla"}
    assert set(result["recl"]["small"]) == {"0.10", "1"}
    assert result["lengths"] == [4, 8, 12, 16, 20]
    assert result["tokens"] == 60
    assert result["recl"]["vanilla"]["1"] in result["lengths"]
    assert result["models"]["vanilla"]["sees_at_most"] == 12
    assert set(result["perplexity"]["small"]) == {"4", "8", "12", "16", "20"}
    with np.load(trained_run / "evaluations" / "recl-test.npz", allow_pickle=False) as arrays:
        assert arrays["c20"].shape == (60,)
        mean = arrays["c20"].mean(dtype=np.float64)
    assert result["perplexity"]["small"]["20"] == pytest.approx(np.exp(mean))
    folder = trained_run / "evaluations" / "recl"
    assert json.loads((folder / "recl.json").read_text()) == result
    assert sorted(path.name for path in folder.glob("*.png")) == ["gain-pairs.png", "gain.png", "perplexity.png"]


def test_people_get_a_table(trained_run, vanilla_run, tmp_path, capsys):
    assert (
        main(["recl", str(trained_run), str(vanilla_run), *GRID, "--threshold", "1e-12", "--out", str(tmp_path)]) == 0
    )
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["model", "r=0.1", "r=0.5", "r=1.0"]
    assert shown[1].startswith("small")
    assert "vanilla sees at most 12 tokens: longer contexts change nothing for it" in shown
    assert (tmp_path / "recl.json").exists()


def test_one_run_alone_with_another_memory(trained_run, capsys):
    result = answer(capsys, trained_run, *GRID, "--memory", "5")
    assert result["models"]["small"]["memory"] == 5
    assert result["models"]["small"]["sees_at_most"] == 11


def test_files_of_losses_say_their_own_lengths_and_leave_nothing_behind(tmp_path, capsys):
    a, b = losses(tmp_path / "A.npz", gain=0.5), losses(tmp_path / "B.npz", gain=0.0)
    before = sorted(tmp_path.iterdir())
    result = answer(capsys, "--losses", a, b, "--ratio", "0.1")
    assert result["recl"] == {"A": {"0.1": 30}, "B": {"0.1": 10}}
    assert result["at_least"] == {"A": ["0.1"]}
    assert sorted(tmp_path.iterdir()) == before
    assert main(["recl", "--losses", a, b, "--start", "20", "--out", str(tmp_path / "out")]) == 0
    assert ">=30" in capsys.readouterr().out
    assert (tmp_path / "out" / "gain.png").exists()


def test_losses_alone_never_load_torch(tmp_path):
    words = ["recl", "--losses", losses(tmp_path / "A.npz")]
    code = f"import sys; from transformer_xl.cli import main; assert main({words!r}) == 0; assert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_without_matplotlib_the_rest_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformer_xl.analysis.recl_pictures.can_draw", lambda: False)
    assert main(["recl", "--losses", losses(tmp_path / "A.npz"), "--out", str(tmp_path / "out")]) == 0
    assert "no figures: matplotlib is not installed" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["recl.json"]


def test_a_file_joins_runs_and_a_runs_own_losses_are_such_a_file(trained_run, tmp_path, capsys):
    perfect = losses(tmp_path / "oracle.npz", lengths=(4, 8, 12, 16, 20), positions=60, gain=1.0)
    grid = ["--step", "4", "--longest", "20"]
    mixed = answer(capsys, trained_run, *grid, "--losses", perfect)
    assert mixed["tokens"] == 60
    assert mixed["recl"]["oracle"]["1.0"] == 20
    copy = tmp_path / "copy.npz"
    copy.write_bytes((trained_run / "evaluations" / "recl-test.npz").read_bytes())
    both = answer(capsys, trained_run, *grid, "--losses", copy)
    assert both["recl"]["copy"] == both["recl"]["small"]


def refused(capsys, *words):
    assert main(["recl", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("txl: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no model is named"),
        (["--losses", "A.npz", "--ratio", "0"], "--ratio: 0 is not a share"),
        (["--losses", "A.npz", "--ratio", "0.5,1.5"], "--ratio: 1.5 is not a share"),
        (["--losses", "A.npz", "--ratio", "some"], "--ratio: 'some' is no number"),
        (["--losses", "A.npz", "--threshold", "0"], "--threshold: 0.0"),
        (["--losses", "A.npz", "--threshold", "nan"], "--threshold: nan"),
        (["--losses", "A.npz", "--longest", "10"], "a gain needs two"),
        (["--losses", "A.npz", "--longest", "40"], "A has no losses for context 40 (it has 10, 20, 30)"),
        (["--losses", "A.npz", "--step", "0"], "--step: 0 is no length"),
        (["--losses", "A.npz", "--start", "-5"], "--start"),
        (["--losses", "A.npz", "short.npz"], "A (context 10) has 40 positions and short (context 10) has 7"),
        (["--losses", "A.npz", "fewer.npz"], "fewer has no losses for context 30"),
        (["--losses", "A.npz", "other/A.npz"], "would both be called A"),
        (["--losses", "A.npz", "--tokens", "5"], "--tokens is for runs"),
        (["--losses", "none.npz"], "none.npz does not exist"),
        (["--losses", "text.npz"], "text.npz cannot be read as losses"),
        (["--losses", "array.npy"], "array.npy cannot be read as losses (it holds a single array)"),
        (["--losses", "pickled.npz"], "pickled.npz cannot be read as losses (it is damaged, or holds Python objects)"),
        (["--losses", "unnamed.npz"], "unnamed.npz has losses for no context length (its arrays: losses)"),
        (["--losses", "nan.npz"], "nan (context 20) holds nan at position 1"),
        (["--losses", "other"], "other is a folder"),
    ],
)
def test_files_that_cannot_be_compared_are_one_sentence(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    losses(tmp_path / "A.npz")
    losses(tmp_path / "other" / "A.npz")
    losses(tmp_path / "short.npz", positions=7)
    losses(tmp_path / "fewer.npz", lengths=(10, 20))
    (tmp_path / "text.npz").write_text("words")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "pickled.npz", c10=np.array([{}], dtype=object), c20=np.zeros(1))
    np.savez(tmp_path / "unnamed.npz", losses=np.zeros(3))
    np.savez(tmp_path / "nan.npz", c10=np.ones(3), c20=np.array([1.0, np.nan, 1.0]))
    assert said in refused(capsys, *words)


def test_runs_that_cannot_be_compared_are_one_sentence(trained_run, vanilla_run, word_run, tmp_path, capsys):
    assert "have different tokenizers" in refused(capsys, trained_run, word_run, *GRID)
    assert "would both be called small" in refused(capsys, trained_run, trained_run, *GRID)
    assert "is longer than test allows" in refused(capsys, trained_run, "--step", "100000")
    assert "cannot be scored" in refused(capsys, trained_run, "--step", "4", "--longest", "20", "--tokens", "999999")
    assert "sees nothing" in refused(capsys, trained_run, "--start", "0")
    assert "no run reads with a memory" in refused(capsys, vanilla_run, *GRID, "--memory", "5")
    assert "--memory: -1 is negative" in refused(capsys, trained_run, *GRID, "--memory", "-1")
    other = losses(tmp_path / "other.npz", lengths=(4, 8, 12, 16, 20), positions=30)
    assert "60 positions and other (context 4) has 30" in refused(
        capsys, trained_run, *GRID, "--device", "cpu", "--losses", other
    )
    assert main(["recl", str(vanilla_run), *GRID, "--split", "valid", "--json"]) == 0
    capsys.readouterr()
    valid = vanilla_run / "evaluations" / "recl-valid.npz"
    assert "were scored on different tokens" in refused(
        capsys, trained_run, *GRID, "--device", "cpu", "--losses", valid
    )
