"""Checkpoints that other implementations wrote, with what those compute from them: one of each kind in fixtures/, many in ../shared, where that is here."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent / "fixtures"
MANY = Path(__file__).parents[2] / "shared" / "fixtures"
FIXTURES = MANY if MANY.exists() else HERE
needs_many = pytest.mark.skipif(FIXTURES is HERE, reason="../shared/fixtures is not here")
ORIGINAL, HUGGINGFACE = FIXTURES / "original" / "a-plain", FIXTURES / "hf" / "div1-tied-r"
TENSORFLOW, NVIDIA = FIXTURES / "tensorflow" / "keras_txl_div_1", FIXTURES / "nvidia" / "n1-plain"


def found(*patterns: str) -> list[Path]:
    """Those that are here, in the order of the patterns; none is a mistake in a pattern."""
    paths = [path for pattern in patterns for path in sorted(FIXTURES.glob(pattern))]
    assert paths, patterns
    return paths


def name_of(path: Path) -> str:
    return str(path.relative_to(FIXTURES))
