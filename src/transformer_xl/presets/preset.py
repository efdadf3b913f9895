"""What a preset is."""

from dataclasses import dataclass, replace
from typing import Literal

from transformer_xl.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    name: str
    aliases: tuple[str, ...] = ()
    """Names that it had, or goes by elsewhere."""
    purpose: str = ""
    """For whom, where a person may choose it by that."""
    corpus: str
    table: str = ""
    """Where the paper reports it."""
    paper_parameters: str = ""
    paper_result: str = ""
    """With its unit; of the test set, in Tables 6 and 7 of the valid set."""
    provenance: Literal["script", "author", "cited", "fitted", "own"]
    """Where its sizes come from: a script released with the paper, an author, a paper that it cites, fitted here to the paper's count, or made here."""
    note: str = ""
    run: RunConfig


def sized(run: RunConfig, **sizes: object) -> RunConfig:
    return replace(run, model=replace(run.model, **sizes))  # type: ignore[arg-type]
