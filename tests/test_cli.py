"""The command line: quick to answer, one sentence and exit code 2 when it cannot."""

import os
import signal
import subprocess
import sys
import time

import pytest

from transformer_xl.cli import demo, in_flags, main


def test_help_never_loads_torch():
    code = "import sys; from transformer_xl.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "usage: txl" in answer.stdout


def test_version_is_the_package_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("txl 0.")


def test_unknown_command_is_one_sentence(capsys):
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "trian" in error


def test_demo_goes_from_nothing_to_text(tmp_path, capsys, monkeypatch):
    """The whole demo, only shorter; its figures at full length are in docs/experiments.md."""
    monkeypatch.setattr(demo, "TEST_TOKENS", 3000)
    words = ["demo", "--run", str(tmp_path / "demo"), "--minutes", "0.01", "--paper"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "order-5 Witten-Bell n-gram" in shown
    assert "this model with memory 128" in shown
    assert "the paper's configuration, as long" in shown
    assert shown.count("  txl ") == 3
    assert (tmp_path / "demo" / "figures" / "loss.png").exists()
    assert (tmp_path / "demo" / "figures" / "sweep-test.png").exists()
    assert main(words) == 0  # a finished demo is shown again, not trained again
    assert main(["demo", "--minutes", "0"]) == 2


def test_wrong_options_are_one_sentence(capsys):
    assert main(["presets", "--jsn"]) == 2
    assert capsys.readouterr().err == "txl: no option --jsn; did you mean --json?\n"
    assert main(["presets", "--quantum"]) == 2
    assert capsys.readouterr().err == "txl: no option --quantum; see: txl presets --help\n"
    assert main(["presets", "more"]) == 2
    assert capsys.readouterr().err == "txl: more is one word too many; see: txl presets --help\n"


def test_arguments_are_said_as_they_are_typed(tmp_path, capsys):
    assert in_flags("`seeds=`: 0 is too few; give `split_by=share`") == "--seeds: 0 is too few; give --split-by share"
    (tmp_path / "text").write_text("some text")
    words = ["prepare", str(tmp_path / "text"), "--tokenizer", "word", "--vocab-size", "2"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "txl: --vocab-size 2 leaves no word beside <eos> and <unk>\n"


def test_two_dashes_are_a_value_like_any_other(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\n--\ntwo\n" * 30)
    words = ["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "store"), "--split", "1"]
    assert main([*words, "--documents", "separator", "--separator=--"]) == 0
    assert "240    330         330         31\n" in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("rank", "said"), [({}, b"txl: stopped\n"), ({"RANK": "1"}, b"")])
def test_sigterm_leaves_nothing_half_written(rank, said, tmp_path):
    """A rank is silent: torchrun ends it because another has failed, and names that one."""
    (tmp_path / "in").mkdir()
    command = [sys.executable, "-m", "transformer_xl", "prepare", "-", "--out", str(tmp_path / "in" / "store")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, env=os.environ | rank) as process:
        process.stdin.write(b"some text\n" * 1000)
        process.stdin.flush()
        while not list((tmp_path / "in").iterdir()):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.stderr.read() == said
        assert process.wait() == 128 + signal.SIGTERM
    assert list((tmp_path / "in").iterdir()) == []
