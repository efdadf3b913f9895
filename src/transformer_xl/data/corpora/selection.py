"""What to take of what is given, as it is asked for: names of files, what .gitignore files say, fields of records. Knows names, no contents."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Literal

from pathspec import GitIgnoreSpec

from transformer_xl.data.corpora.unpacking import said
from transformer_xl.errors import DataError, shown

GITIGNORE = ".gitignore"
LARGEST_GITIGNORE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What to take of what is given."""

    field: tuple[str, ...] = ()
    """Of records, what holds the text: `text`, nested `user.name`, several one after the other. Found out where it is plain."""
    include: tuple[str, ...] = ()
    """Only files of such names: patterns as .gitignore has them."""
    exclude: tuple[str, ...] = ()
    """Neither files nor folders of such names."""
    gitignore: bool = False
    """Leave out what .gitignore files leave out."""
    binary: Literal["skip", "keep"] = "skip"

    def __post_init__(self) -> None:
        for name, words in {"field": self.field, "include": self.include, "exclude": self.exclude}.items():
            if not isinstance(words, tuple | list) or not all(isinstance(word, str) for word in words):
                raise DataError(f"`{name}=` {shown(words)} must be a list of words, even where it is one")
        for name, patterns in {"include": self.include, "exclude": self.exclude}.items():
            for pattern in patterns:
                if not pattern.strip() or pattern.startswith(("#", "!")):
                    raise DataError(f"`{name}=` {pattern!r} is no pattern; write one such as *.py or node_modules")
        for one in self.field:
            if not all(one.split(".")) or self.field.count(one) > 1:
                raise DataError(f"`field=` {one!r} must be a name, such as text or user.name, once each")
        if self.binary not in ("skip", "keep"):
            raise DataError(f"`binary={self.binary}` must be skip or keep")

    @cached_property
    def _patterns(self) -> tuple[GitIgnoreSpec, GitIgnoreSpec]:
        return GitIgnoreSpec.from_lines(self.include), GitIgnoreSpec.from_lines(self.exclude)

    def leaves_out(self, name: PurePosixPath, *, folder: bool = False) -> bool:
        """Whether a pattern says that a file of this name is not wanted, or that a folder is not worth looking into."""
        include, exclude = self._patterns
        text = f"{name}/" if folder else str(name)
        return exclude.match_file(text) or bool(self.include and not folder and not include.match_file(text))

    @property
    def in_words(self) -> str:
        """What leaves out files, as it was asked for."""
        patterns = [f"`{name}={one}`" for name in ("include", "exclude") for one in getattr(self, name)]
        return " and ".join([*patterns, *["what .gitignore says"] * self.gitignore])


class Ignored:
    """What the .gitignore files of a folder, of those in it and of its repository leave out."""

    def __init__(self, folder: Path) -> None:
        self._specs: dict[tuple[Path, bool], GitIgnoreSpec] = {}
        top = folder.resolve()
        above = next((place for place in (top, *top.parents) if (place / ".git").exists()), top)
        self._folder, self._top, self._above = folder, top, above

    def leaves_out(self, path: Path, *, folder: bool) -> bool:
        """The deepest file that speaks of it decides, as git has it."""
        path = self._top / path.relative_to(self._folder)
        for place in path.parents:
            told = self._spec(place, folder).check_file(path.relative_to(place).as_posix() + "/" * folder).include
            if told is not None:
                return told
            if place == self._above:
                break
        return False

    def _spec(self, place: Path, folder: bool) -> GitIgnoreSpec:
        if (place, folder) not in self._specs:
            lines, file = list[str](), place / GITIGNORE
            if file.is_file():
                with said(str(file)), file.open("rb") as text:
                    lines = text.read(LARGEST_GITIGNORE).decode(errors="surrogateescape").splitlines()
            # `x/**` is all that lies in x and not x itself, in which a file of its own may speak again.
            lines = [re.sub(r"/\*\*\s*$", "/*", line) for line in lines] if folder else lines
            self._specs[place, folder] = GitIgnoreSpec.from_lines(lines)
        return self._specs[place, folder]
