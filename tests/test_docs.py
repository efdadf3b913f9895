"""README and docs tell the truth: their Python runs, their commands run, one after the other, as a reader would run them; only trainings are shorter."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from transformer_xl.cli import COMMANDS, main
from transformer_xl.errors import MissingPackage

ROOT = Path(__file__).parents[1]
ENWIK8 = ROOT.parent / "shared" / "data" / "enwik8" / "enwik8.gz"
STEPS, MINUTES = "6", "0.02"
"""At most, where a page says more."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("txl ")]


def shorter(words: list[str]) -> list[str]:
    """Whether a command works does not depend on how much was learned."""
    most = {"--training.steps": STEPS, "--minutes": MINUTES}
    return [min(word, most[before], key=float) if before in most else word for before, word in pairwise(["", *words])]


@pytest.mark.timeout(900)  # what a reader does in minutes, on a machine that may be busy
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run_as_a_reader_would_run_them(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "novel.txt").write_text(
        "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 400
    )
    mail = ('{"from": {"name": "Ann"}, "text": "hello"}', '{"from": {"name": "Bob"}, "text": "well?"}')
    (tmp_path / "mail.jsonl").write_text("".join(f"{line}\n" for line in mail))
    for language, text in blocks(page):
        if language == "python":
            try:
                exec(compile(re.sub(r"minutes=\d+", f"minutes={MINUTES}", text), page.name, "exec"), {})
            except MissingPackage as error:
                pytest.skip(str(error))
        for words in commands(text) if language == "bash" else []:
            if "enwik8.gz" in words:
                if not ENWIK8.exists():
                    print(f"not run, for {ENWIK8.name} is not here: {' '.join(words)}")
                    continue
                if not (tmp_path / "enwik8.gz").exists():
                    (tmp_path / "enwik8.gz").symlink_to(ENWIK8)
            assert main(shorter(words)) == 0, words
            assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_exist(page):
    for name in re.findall(r"`txl (\w[\w-]*)", page.read_text()):
        assert name in COMMANDS, name


def test_the_readme_has_examples_to_run():
    languages = [language for language, _ in blocks(ROOT / "README.md")]
    assert languages.count("python") >= 2
    assert sum(len(commands(text)) for language, text in blocks(ROOT / "README.md") if language == "bash") >= 6


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`?make (\w+)", (ROOT / "README.md").read_text())
    assert {"demo", "test", "check"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
