"""Measurements as rows, for people who go on with them: a list of tables of fields, and pandas' table of the same where pandas is installed."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from transformer_xl.errors import MissingPackage


class Rows(list[dict[str, Any]]):
    def __init__(self, rows: Iterable[dict[str, Any]], *, name: str) -> None:
        """`name`: what they are, in a word or two."""
        super().__init__(rows)
        self._name = name

    def to_pandas(self) -> Any:
        """A DataFrame with a column for each field; what a row lacks is NaN there."""
        if find_spec("pandas") is None:
            raise MissingPackage(f"a table of {self._name} needs pandas; install it with: pip install pandas")
        import pandas

        return pandas.DataFrame(list(self))

    def __repr__(self) -> str:
        fields = ", ".join(dict.fromkeys(field for row in self for field in row))
        return f"<{len(self):,} rows of {self._name}: {fields}>" if self else f"<no rows of {self._name}>"
