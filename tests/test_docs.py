"""README and docs tell the truth: their Python runs, their commands run, one after the other, as a reader would run them; only trainings are shorter."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import transformer_xl as txl
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
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (page.parent / target).exists(), target


def apply(change: str, root: Path) -> None:
    """A diff whose parts say by their own lines where they belong: each must stand there exactly once."""
    for part in re.split(r"^--- .*\n", change, flags=re.MULTILINE)[1:]:
        name, *hunks = re.split(r"^@@\n", part, flags=re.MULTILINE)
        path = root / name.removeprefix("+++ b/").strip()
        text = path.read_text()
        for hunk in hunks:
            lines = [(line[:1], line[1:]) for line in hunk.splitlines(keepends=True)]
            old, new = ("".join(line for sign, line in lines if sign not in left_out) for left_out in "+-")
            assert text.count(old) == 1, f"{path.name} has {text.count(old)} times:\n{old}"
            text = text.replace(old, new)
        path.write_text(text)


@pytest.mark.processes
def test_what_the_page_about_extending_changes_works(tmp_path):
    page = blocks(ROOT / "docs" / "extending.md")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for change in [text for language, text in page if language == "diff"]:
        apply(change, tmp_path)
    programs = [text for language, text in page if language == "py"]
    assert len(programs) == 2
    for program in programs:
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)


@pytest.mark.processes
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra `site` is not installed")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    pages = {page.name: page.read_text() for page in tmp_path.glob("*.html")}
    assert {"index.html", "reference.html"} | {page.with_suffix(".html").name for page in PAGES[1:]} <= set(pages)
    for name, text in pages.items():
        assert not re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(?:https?:)?//[^"]+', text), name
    for name in txl.__all__:
        assert name == "Output" or f">{name}<" in pages["reference.html"], f"{name} is public and not in the reference"
