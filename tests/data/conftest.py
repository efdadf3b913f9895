"""What the data room's tests share: the real corpora where they are at hand, and the command as a user types it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from transformer_xl.cli import main

CORPORA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def corpora() -> Path:
    if not CORPORA.is_dir():
        pytest.skip("the real corpora are not here: no ../shared/data beside the project")
    return CORPORA


@pytest.fixture
def txl(capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: exit code, what it printed, what it said on stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
