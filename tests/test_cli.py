"""The command line: quick to answer, one sentence and exit code 2 when it cannot."""

import subprocess
import sys

from transformer_xl.cli import main


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


def test_demo_shows_memory_at_work(capsys):
    assert main(["demo"]) == 0
    assert "with memory" in capsys.readouterr().out


def test_wrong_options_are_one_sentence(capsys):
    assert main(["presets", "--jsn"]) == 2
    assert capsys.readouterr().err == "txl: unrecognized arguments: --jsn; see: txl presets --help\n"
