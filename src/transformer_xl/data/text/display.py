"""Makes WikiText, Penn Treebank and One Billion Word text readable again: for people's eyes, never for scoring."""

import re

HEADING = re.compile(r"^ *((?:= )+)(.+?)((?: =)+) *$", re.MULTILINE)
JOINED = re.compile(r" @([-,.])@ ")
BEFORE = re.compile(r" +([,.;:!?%)\]}]|'(?:s|re|ve|ll|d|m|t)\b|n't\b)")
AFTER = re.compile(r"([(\[{$£€]) +")
QUOTED = re.compile(r'" ([^"\n]*?) "')
APOSTROPHE = re.compile(r"(?<=\w) ' (?=s\b)")


def detokenize(text: str) -> str:
    """Headings become Markdown's, `@-@` and its kin their sign, and spaces go where people put them."""
    text = HEADING.sub(_heading, text)
    text = JOINED.sub(r"\1", text)
    text = QUOTED.sub(r'"\1"', text)
    text = APOSTROPHE.sub("'", text)
    text = BEFORE.sub(r"\1", text)
    text = AFTER.sub(r"\1", text)
    lines = (re.sub(r" {2,}", " ", line).strip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _heading(match: re.Match[str]) -> str:
    return f"{'#' * match[1].count('=')} {match[2].strip()}"
