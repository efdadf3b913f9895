"""What stands around the code and is run by nobody here: pages for contributors, workflows, templates, versions. It parses, names what exists, and agrees."""

import re
import tomllib
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLAIN = {
    *("torch", "numpy", "safetensors", "tokenizers", "tqdm", "backports-zstd", "pathspec"),
    *("huggingface-hub", "hf-xet", "httpx2", "httpcore2", "anyio", "h11", "idna", "sniffio", "truststore", "certifi"),
    *("click", "filelock", "fsspec", "packaging", "pyyaml", "typing-extensions"),  # what tokenizers brings
}
"""What `pip install transformer-xl` may install beside what torch itself brings: 38.4 MB to load in November 2026, our wheel with it, 16.9 of them numpy's and 9.5 the model in the box."""


def loaded(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def steps() -> list[str]:
    """What the workflows run."""
    return [
        step["run"]
        for path in WORKFLOWS
        for job in loaded(path)["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]


def test_workflows_run_what_everybody_runs():
    assert {"make check", "make test", "make wheel"} <= set(steps())
    for path in WORKFLOWS:
        workflow = loaded(path)
        assert True in workflow, path  # `on`, which YAML takes for a truth
        assert workflow["permissions"] == {"contents": "read"}
        assert all(job["timeout-minutes"] for job in workflow["jobs"].values())


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    texts = [*steps(), *(page.read_text() for page in PAGES)]
    named = {name for text in texts for name in re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE)}
    assert {"quick", "check", "test", "wheel", "test-faults", "test-soak", "test-sanitizers"} <= named
    for name in named:
        assert re.search(rf"^([\w-]+ )*{name}\b.*:", makefile, re.MULTILINE), name


def test_ci_is_the_same_commands():
    run = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make .*", run, re.MULTILINE) == [
        step for step in steps() if step in ("make check", "make test")
    ]


def test_templates_ask_something():
    assert len(TEMPLATES) == 2
    for path in TEMPLATES:
        template = loaded(path)
        assert template["name"]
        assert template["description"]
        assert all(field["id"] and field["attributes"]["label"] for field in template["body"])


def test_hooks_before_a_commit_are_tools_of_the_environment():
    (repository,) = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    tools = {Requirement(line).name for line in PROJECT["optional-dependencies"]["dev"]}
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].removeprefix(".venv/bin/").split()[0] in tools


def test_one_version_everywhere():
    released = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    numbers = [name for name in released if name[0].isdigit()]
    assert numbers[0] == PROJECT["version"] == loaded(ROOT / "CITATION.cff")["version"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", number) for number in numbers)
    assert numbers == sorted(numbers, key=lambda number: [int(part) for part in number.split(".")], reverse=True)
    assert loaded(ROOT / "CITATION.cff")["license"] == PROJECT["license"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    for place in re.findall(r"`((?:tests|src|docs)/[\w./-]+|hatch_build\.py|model/[\w.]+|native/[\w.]+)`", text):
        assert (ROOT / place).exists() or (ROOT / "src" / "transformer_xl" / place).exists(), place


def closure(name: str) -> set[str]:
    """A package and all that it needs here, without extras."""
    found, open_ = set[str](), [name]
    while open_:
        here = re.sub(r"[-_.]+", "-", open_.pop()).lower()
        if here in found:
            continue
        found.add(here)
        needed = [Requirement(line) for line in requires(here) or []]
        open_ += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def test_a_plain_install_stays_small():
    """By name: each that comes new is to be looked at, and argued for in pyproject.toml."""
    assert distribution("torch")
    more = {each for line in PROJECT["dependencies"] for each in closure(Requirement(line).name)} - closure("torch")
    assert more <= PLAIN, sorted(more - PLAIN)


def test_packages_whose_insides_are_used_have_an_upper_bound():
    extras = [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]
    bounded = {each.name for each in extras if any(part.operator == "<" for part in each.specifier)}
    assert {"uvicorn", "starlette", "transformers", "lm-eval"} <= bounded
    constraints = (ROOT / "constraints.txt").read_text()
    for each in extras:  # and the version that is tested lies below it
        tested = re.search(rf"^{each.name.replace('-', '[-_]')}==(\S+)", constraints, re.MULTILINE | re.IGNORECASE)
        assert tested is None or tested[1] in each.specifier, each
