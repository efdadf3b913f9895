"""A token as people see it in a figure. Knows no tokenizer."""

MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def visible(name: str) -> str:
    """A token's text with its white space shown, and characters that would show nothing, or move others, by their number."""
    return "".join(
        MARKS.get(character) or (character if character.isprintable() else ascii(character)[1:-1]) for character in name
    )
