"""Tokens and text for people's eyes, never for scoring."""

import re

from transformer_xl.data.text.tokenizers import Tokenizer

HEADING = re.compile(r"^ *((?:= )+)(.+?)((?: =)+) *$", re.MULTILINE)
JOINED = re.compile(r" @([-,.])@ ")
BEFORE = re.compile(r" +([,.;:!?%)\]}]|'(?:s|re|ve|ll|d|m|t)\b|n't\b)")
AFTER = re.compile(r"([(\[{$£€]) +")
QUOTED = re.compile(r'" ([^"\n]*?) "')
APOSTROPHE = re.compile(r"(?<=\w) ' (?=s\b)")
MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def readable(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token: words and their marks by name, bytes that are no whole character as \\xe2."""
    if tokenizer.kind == "word":
        return tokenizer.token(token)
    return tokenizer.decode_bytes([token]).decode("utf-8", errors="backslashreplace")


def visible(name: str) -> str:
    """A token's text with its white space shown, and characters that would show nothing, or move others, by their number."""
    return "".join(MARKS.get(each) or (each if each.isprintable() else ascii(each)[1:-1]) for each in name)


def detokenize(text: str) -> str:
    """WikiText, Penn Treebank and One Billion Word as people write: headings become Markdown's, `@-@` and its kin their sign, and spaces go where people put them."""
    text = HEADING.sub(lambda match: f"{'#' * match[1].count('=')} {match[2].strip()}", text)
    text = JOINED.sub(r"\1", text)
    text = QUOTED.sub(r'"\1"', text)
    text = APOSTROPHE.sub("'", text)
    text = BEFORE.sub(r"\1", text)
    text = AFTER.sub(r"\1", text)
    lines = (re.sub(r" {2,}", " ", line).strip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
