"""What a study leaves: one Markdown page for people, one JSON file for programs. Knows no model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_xl.files import write_json, write_text
from transformer_xl.studies.runs import Setting
from transformer_xl.studies.verdicts import Told


@dataclass(frozen=True, kw_only=True)
class Report:
    title: str
    """With the paper's own table."""
    corpus: str
    """What was read, and by which rule."""
    caveat: str = ""
    """Where it is not the scale's own."""
    rows: Sequence[Mapping[str, str]] = ()
    """By column."""
    claims: Sequence[Told] = ()
    digits: int = 3
    """Of the effects."""
    notes: Sequence[str]
    """How the figures were made."""
    commands: Sequence[tuple[str, Sequence[str]]]
    """For each row, what makes it."""
    pictures: Sequence[Path] = ()
    seconds: float
    """Spent on the models: training and evaluation, also where they were found done."""
    text: str = ""
    """What is no table."""
    values: dict[str, Any] = field(default_factory=dict)
    """All figures, for the JSON."""


def write_report(report: Report, *, setting: Setting) -> tuple[Path, dict[str, Any]]:
    """The page's place, and what stands in the JSON beside it."""
    value = {
        "study": setting.study,
        "scale": setting.scale.name,
        "title": report.title,
        "corpus": report.corpus,
        "seeds": setting.seeds,
        "command": setting.command,
        **report.values,
        "claims": [told.as_json() for told in report.claims],
        "notes": list(report.notes),
        "pictures": [picture.name for picture in report.pictures],
        "seconds": report.seconds,
    }
    write_json(setting.place(".json"), value)
    write_text(setting.place(".md"), page(report, setting=setting))
    return setting.place(".md"), value


def page(report: Report, *, setting: Setting) -> str:
    parts = [
        f"# {report.title}",
        f"Scale {setting.scale.name}. {report.corpus}",
        f"*{report.caveat or setting.scale.caveat}*",
    ]
    if report.rows:
        parts.append(markdown_table(list(report.rows[0]), [list(row.values()) for row in report.rows]))
    parts += [f"![{picture.stem}]({picture.name})" for picture in report.pictures]
    if report.claims:
        claims = [
            (told.claim, "" if told.effect is None else told.effect.shown(report.digits), told.verdict)
            for told in report.claims
        ]
        parts += ["## What the paper claims", markdown_table(("claim", "effect", "here"), claims)]
    if report.text:
        parts.append(report.text)
    parts += ["## How the figures were made", "\n".join(f"- {note}" for note in report.notes)]
    parts += ["## To make it again", f"All of it:\n\n```bash\n{setting.command}\n```"]
    for title, commands in report.commands:
        lines = "\n".join(commands)
        parts.append(f"{title}:\n\n```bash\n{lines}\n```")
    parts.append(f"Total time of training and evaluation: {duration(report.seconds)}.")
    return "\n\n".join(parts) + "\n"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mean_and_spread(values: Sequence[float], *, digits: int) -> str:
    """The mean, and with several seeds how far the farthest lies from it."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {max(abs(value - mean) for value in values):.{digits}f}"


def several(values: Sequence[float]) -> str:
    """Lengths of several seeds: one where they agree, else the shortest and the longest."""
    low, high = min(values), max(values)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
