"""A path walked twice, on the processor and on the card: the same numbers, and only waits that `allowed_waits.py` knows."""

import numpy as np

from allowed_waits import ALLOWED
from card import inserted

used: set[str] = set()
"""Of what is allowed, so far."""


def walked(path, *, bfloat16=False, close=2e-5):
    """Where `path` waits on the card. What it gives must be what it gives on the processor."""
    expected = path("cpu")
    with inserted(bfloat16=bfloat16) as card:
        found = path("cuda")
    compare(found, expected, close=close)
    unexpected = sorted({str(wait) for wait in card.waits if wait.place not in ALLOWED})
    assert not unexpected, "waits for the device that allowed_waits.py does not know:\n" + "\n".join(unexpected)
    used.update(wait.place for wait in card.waits)
    return card.waits


def compare(found, expected, *, close):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            compare(one, other, close=close)
    elif isinstance(expected, float | np.ndarray):
        np.testing.assert_allclose(found, expected, rtol=close, atol=close)
    else:
        assert found == expected
