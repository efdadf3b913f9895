"""The README tells the truth: its Python runs, its commands exist."""

import re
import shlex
from pathlib import Path

import pytest

from transformer_xl.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_examples_run():
    examples = blocks("python")
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


COMMANDS = [
    line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines() if line.startswith("txl ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, capsys):
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_make_targets_exist():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    targets = re.findall(r"\bmake (\w+)", README)
    assert {"demo", "test", "check"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
