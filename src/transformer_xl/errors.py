"""The errors a user can cause. Each is one sentence naming the thing, the value and the way out; `txl` prints it and exits with 2.

An argument is named as a program gives it, in backquotes, `data=` or `memory=0`: `txl` prints --data and --memory 0 instead.
"""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST, BEHIND = 2000, 500
"""Characters of a sentence, and how many of them are its end, where the way out stands."""

MOST_BITS = 190
"""Of a whole number that is shown by its digits."""


class TransformerXLError(Exception):
    """Base of every error meant for people: one line that fits a screen, whatever stands in a name that a file gave us."""

    def __str__(self) -> str:
        text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in super().__str__())
        return text if len(text) <= LONGEST else f"{text[: LONGEST - BEHIND]} ... {text[-BEHIND:]}"


class ConfigError(TransformerXLError):
    """A configuration that cannot work."""


class DataError(TransformerXLError):
    """Text or tokens that cannot be read, verified or used."""


class InputError(TransformerXLError):
    """A value handed to the library that it cannot take."""


class CheckpointError(TransformerXLError):
    """A trained model at rest that cannot be read or written."""


class ImportRefused(TransformerXLError):
    """Somebody else's file that is damaged, hostile, or of no kind we know. Nothing in it was run."""


class MissingPackage(TransformerXLError, ImportError):
    """Something that an extra installs and that is not here."""


def shown(value: object) -> str:
    """A value from outside in a sentence: short, whatever it is. Python refuses to write down numbers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"a whole number of {value.bit_length():,} bits"
    try:
        text = repr(value)
    except ValueError:  # such a number within a list or a table
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 60 else text[:57] + "..."


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known name, or the list of known names when none is near."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"
