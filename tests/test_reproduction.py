"""docs/reproduction.md leaves nothing of the paper out: every table, figure and appendix has rows, every row a verdict, and every command exists.

That its figures are those of the result files is in test_results.py.
"""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from test_results import figures_of
from transformer_xl.benchmarks.workloads import PAPER_RATIOS
from transformer_xl.cli import Parser, module_of
from transformer_xl.data.corpora.recipes import RECIPES
from transformer_xl.presets import PRESETS, find_preset
from transformer_xl.studies.catalogue import STUDIES
from transformer_xl.studies.scales import find_scale
from transformer_xl.studies.tables import ENCODING, FRAGMENTATION, MEMORY_MATCHED, Ablation

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
VERDICTS = ("appears", "does not appear", "cannot tell yet", "holds", "not run here")
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]


def tables() -> list[tuple[list[str], list[list[str]]]]:
    """(header, rows) of each."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
        found.append((header, rows))
    return found


def test_nothing_of_the_paper_is_left_out():
    heads = " ".join(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    for kind, numbers in (("Tables?", range(1, 14)), ("Figures?", range(1, 8))):
        listed = re.findall(rf"{kind} (\d+(?:(?:, | and | to )\d+)*)", heads)
        assert {int(number) for names in listed for number in re.findall(r"\d+", names)} == set(numbers), kind
    assert re.findall(r"Appendix (\w)", heads) == list("ABCDE")


def test_no_row_is_empty_and_every_row_has_a_verdict():
    for header, rows in tables():
        assert rows
        for row in rows:
            assert len(row) == len(header)
            assert all(row), row
            if header[-1] in ("verdict", "memory is faster"):
                assert re.match(r"\*\*(.*?)\*\*", row[-1])[1] in VERDICTS, row
    shown = [header for header, _ in tables() if header[-1] not in ("verdict", "memory is faster")]
    assert len(shown) == 1  # Table 6's figures, whose claims follow


def test_what_was_not_run_says_what_it_needs():
    for section in PAGE.split("\n## ")[1:]:
        if "**not run here**" in section:
            assert re.search(r"\bneeds\b|hours|Needs", section), section[:40]
        assert "```sh" in section or "Table 8's" in section, section[:40]


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_exist(line):
    words = shlex.split(line)
    if words[0] == "pytest":
        assert all((ROOT / path).exists() for path in words[1:])
        return
    if words[0] == "torchrun":
        words = ["txl", *words[words.index("transformer_xl") + 1 :]]
    parser, command = Parser(), module_of(words[1])
    command.configure(parser)
    arguments = parser.parse_all(words[2:])
    match words[1]:
        case "train":
            find_preset(arguments.start)
        case "study":
            assert arguments.name in STUDIES
            find_scale(arguments.scale)
        case "prepare":
            assert {*arguments.what} <= {*RECIPES}


def told(study: Ablation) -> list[float]:
    rows = [(row.paper_init, row.paper_best, row.paper_attention) for row in study.rows if row.paper_best is not None]
    return [figure for row in rows for figure in row if figure is not None]


def test_what_the_software_says_of_the_paper_is_the_same():
    """The page's figures of the paper, those beside the presets, and those of studies and benchmarks."""
    figures = figures_of(ROOT / "docs" / "results" / "paper.json")

    def of(table: int) -> list[float]:
        return [value for name, value in figures.items() if name.startswith(f"table_{table}_")]

    for table, study in ((6, ENCODING), (7, FRAGMENTATION), (10, MEMORY_MATCHED)):
        assert {*told(study)} <= {*of(table)}
    assert {figures[f"table_9_at_{length}"] for length in PAPER_RATIOS} == {*PAPER_RATIOS.values()}
    for preset in PRESETS:
        if preset.table and not preset.paper_result.startswith("RECL"):
            assert float(preset.paper_result.split()[0]) in of(int(preset.table.split()[1])), preset.name


def test_a_model_is_trained_before_it_is_read():
    made = {after for line in COMMANDS for before, after in pairwise(line.split()) if before in ("--run", "--out")}
    read = {line.split()[2] for line in COMMANDS if line.startswith(("txl evaluate", "txl attention", "txl generate"))}
    assert read <= made
