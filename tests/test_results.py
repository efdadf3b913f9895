"""A figure stands in one place: docs/results/*.json, written down once with its command and rule. Pages quote it by a link, and here each quotation is compared.

    [39.8 times](docs/results/generation.json#times_as_fast_41M)      the number of the words in brackets is that figure, rounded as it is shown
    [31.0](docs/results/generation.json#times_as_fast_41M_least)     the least of its range; _most is the most, and #minutes how long it took
    ([what it printed](docs/results/first-try.json#printed))         blocks of a terminal after it show these lines

In README, the first try and the page about reproduction every number of the prose is such a link, or the name of a table of the paper, or is listed here
as none that anybody measured. The paper's own figures stand in a file, too.
"""

import json
import re
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WHOLLY = [page for page in PAGES if page.name in ("README.md", "first-try.md", "reproduction.md")]
"""Where nothing is quoted but by a link."""
FIELDS = {"what": str, "command": list, "rule": str, "seeds": list, "minutes": float, "date": str, "machine": str}
NO_FIGURES = {
    "2019": "the year of the paper",
    "3.11": "of Python",
    "3.12": "of Python",
    "2.29": "of glibc",
}
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]*results/[\w-]+\.json)(?:#([\w.-]+))?\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
SIGNED = re.compile(rf"(?<![\w-])-?{NUMBER.pattern}")
NAMED = re.compile(r"\b(?:Tables?|Figures?) \d+(?:(?:, | and | to )\d+)*\b")
"""Of the paper."""
SHORTENED = "…"
"""A line of a terminal may be cut here, and one that is only this stands for any number of lines."""


@cache
def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def figures_of(path: Path) -> dict[str, float]:
    """By the names that links have."""
    result = read(path)
    figures = dict(result["figures"])
    for name, (least, most) in result.get("ranges", {}).items():
        figures |= {f"{name}_least": least, f"{name}_most": most}
    return figures if result["minutes"] is None else {**figures, "minutes": result["minutes"]}


def numbers(text: str) -> list[str]:
    """Words that are a number, with a sign or a unit at most: no x86-64, no float32."""
    words = [word.strip("()[].,;:!?*`\"'") for word in text.split()]
    return [found[1] for word in words if (found := re.fullmatch(rf"[-+~±<>]?({NUMBER.pattern})(%|x|[kKMG]B?)?", word))]


def is_rounded(shown: str, figure: float) -> bool:
    quoted = Decimal(shown.replace(",", ""))
    return Decimal(str(figure)).quantize(quoted, ROUND_HALF_UP) == quoted


def quotations(page: Path) -> list[str]:
    """What is wrong with the figures that a page quotes."""
    wrong = []
    for words, file, name in LINK.findall(page.read_text(encoding="utf-8")):
        path = page.parent / file
        if not path.exists():
            wrong.append(f"{file} does not exist")
        elif name == "printed" or not name:
            continue
        elif name not in (figures := figures_of(path)):
            wrong.append(f"{file} has no figure {name}")
        elif len(found := SIGNED.findall(words)) != 1 or not is_rounded(found[0], figures[name]):
            wrong.append(f"[{words}]: {path.name} has {figures[name]} for {name}")
    return wrong


def unlinked(page: Path) -> list[str]:
    """Numbers in the prose that are quoted from nowhere."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    prose = NAMED.sub("", re.sub(r"`[^`]*`|!\[[^\]]*\]\([^)]*\)", "", LINK.sub("", prose)))
    return [number for number in numbers(re.sub(r"\]\([^)]*\)", "]", prose)) if number not in NO_FIGURES]


def fits(shown: list[str], printed: list[str]) -> bool:
    """Whether the lines that are shown are those that were printed, but for what they say they leave out."""
    if not shown:
        return not printed
    first, *rest = shown
    if first.strip() == SHORTENED:
        return any(fits(rest, printed[count:]) for count in range(len(printed) + 1))
    if not printed:
        return False
    whole = printed[0].startswith(first[:-1]) if first.endswith(SHORTENED) else printed[0] == first
    return whole and fits(rest, printed[1:])


def terminals(page: Path) -> list[tuple[str, str, list[str]]]:
    """(file, command, lines) of each block that begins with a prompt; the file is the one that was linked last before it as what was printed."""
    text, found = page.read_text(encoding="utf-8"), []
    for block in re.finditer(r"^```\n\$ (.*?)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        before = [file for _, file, name in LINK.findall(text[: block.start()]) if name == "printed"]
        found.append((before[-1] if before else "no link before this block", block[1], block[2].splitlines()))
    return found


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_how_it_was_made(path):
    result = read(path)
    for name, kind in FIELDS.items():
        # Nothing was trained, or nothing is drawn: then null says so.
        assert isinstance(result[name], kind | int if kind is float else kind) or result[name] is None, name
    assert result.keys() <= {*FIELDS, "figures", "ranges", "printed", "remark"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert all(
        re.fullmatch(r"\w[\w.-]*", name) and isinstance(value, int | float) for name, value in result["figures"].items()
    )
    for name, (least, most) in result.get("ranges", {}).items():
        assert least <= result["figures"][name] <= most, name


def test_every_result_is_quoted_somewhere():
    quoted = {Path(file).name for page in PAGES for _, file, _ in LINK.findall(page.read_text(encoding="utf-8"))}
    assert {path.name for path in RESULTS} == quoted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_results(page):
    assert quotations(page) == []


@pytest.mark.parametrize("page", WHOLLY, ids=lambda page: page.name)
def test_every_figure_is_quoted_from_a_result(page):
    assert unlinked(page) == []
    for file, command, shown in terminals(page):
        assert fits(shown, read(page.parent / file)["printed"][command]), command


@pytest.mark.parametrize("name", ["README.md", "docs/reproduction.md"])
def test_a_figure_that_is_changed_by_hand_is_noticed(name, tmp_path):
    """On a copy of the page itself: the last digit of a figure or of a line of a terminal is another one, or a link is taken away."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results").symlink_to(ROOT / "docs" / "results")
    page, text = tmp_path / name, (ROOT / name).read_text(encoding="utf-8")
    linked = [found for found in LINK.finditer(text) if found[3] not in (None, "printed")]
    assert len(linked) >= 8
    for found in linked:
        shown = NUMBER.search(found[1])[0]
        page.write_text(text[: found.start()] + found[0].replace(shown, changed(shown), 1) + text[found.end() :])
        assert len(quotations(page)) == 1, found[0]
        page.write_text(text[: found.start()] + found[1] + text[found.end() :])
        assert unlinked(page) == [shown], found[0]
    for file, command, shown in terminals(ROOT / name):
        for at, line in enumerate(shown):
            if re.search(r"\d", line):
                lines = [*shown[:at], changed(line), *shown[at + 1 :]]
                assert not fits(lines, read((ROOT / name).parent / file)["printed"][command]), line


def changed(text: str) -> str:
    return re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), text)
