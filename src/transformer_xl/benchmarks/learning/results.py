"""What came out, as it comes: one JSON line a run, so that a comparison of hours can be stopped and goes on without repeating a run."""

import json
import os
from pathlib import Path
from typing import Any

from transformer_xl.benchmarks.children import BenchmarkError

Line = dict[str, Any]


class Results:
    """`identity` says everything that a run depends on; two runs with the same are the same run."""

    def __init__(self, path: Path | None) -> None:
        """None: nothing is kept beyond this process."""
        self.path = path
        self._found: dict[str, Line] = {}
        if path is None or not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            try:
                value = json.loads(line)
                self._found[key_of(value["identity"])] = value["result"]
            except (ValueError, KeyError, TypeError):
                # A process killed while it wrote leaves half a line, and only ever the last.
                if line.endswith("\n"):
                    raise BenchmarkError(
                        f"`results={path}`: line {number} is no result of this command; name another file"
                    ) from None
                path.write_text(text[: len(text) - len(line)], encoding="utf-8")

    def find(self, identity: Line) -> Line | None:
        return self._found.get(key_of(identity))

    def add(self, identity: Line, result: Line) -> None:
        self._found[key_of(identity)] = result
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"identity": identity, "result": result}) + "\n")
                file.flush()
                os.fsync(file.fileno())


def key_of(identity: Line) -> str:
    return json.dumps(identity, sort_keys=True)
