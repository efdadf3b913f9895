"""Sinusoids of distances that are the same bits on every machine, where `torch.sin` and C's libraries are not.

Sums, differences, products and quotients of single numbers in double precision, which IEEE 754 rounds in one way only: NumPy computes each by itself, and
fuses none. Accurate to a few units in the last place of a double, and then rounded to float32.
"""

import numpy as np
from numpy.typing import NDArray

LOG2_OF_10000 = 13.287712379549449
LOG_OF_2 = 0.6931471805599453
TWO_OVER_PI = 0.6366197723675814
PI_HALVES = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624871116645580e-21)
"""Half of pi in parts of 33 bits: whole numbers up to MOST_TURNS times a part are exact."""
MOST_TURNS = 1 << 20
SINE = (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800, 1 / 6227020800, -1 / 1307674368000)
COSINE = (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800, 1 / 479001600, -1 / 87178291200, 1 / 20922789888000)
POWER = tuple(1 / float(np.prod(np.arange(1, n + 1, dtype=np.float64))) for n in range(16))
"""Taylor's coefficients, each one quotient of whole numbers that a double holds."""

Doubles = NDArray[np.float64]


def _polynomial(coefficients: tuple[float, ...], x: Doubles) -> Doubles:
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def frequencies(width: int, *, rounded: str) -> NDArray[np.float32]:
    """10000 to the power of -2i/width, [width/2]: the roundings of `model.encodings.frequencies`, around a power that is exact."""
    exponents_E = (np.arange(0, width, 2).astype(np.float32) / np.float32(width)).astype(np.float64)
    scaled_E = exponents_E * LOG2_OF_10000
    whole_E = np.rint(scaled_E)
    powers_E = np.ldexp(_polynomial(POWER, (scaled_E - whole_E) * LOG_OF_2), whole_E.astype(np.int32))
    found_E = np.float32(1) / powers_E.astype(np.float32)
    return found_E.astype(np.float16).astype(np.float32) if rounded == "float16" else found_E


def sinusoid(distances_S: NDArray[np.int64], *, width: int, rounded: str) -> NDArray[np.float32]:
    """[S, width]: the sines of all frequencies, then the cosines."""
    angle_SE = distances_S[:, None].astype(np.float64) * frequencies(width, rounded=rounded).astype(np.float64)
    turns_SE = np.rint(angle_SE * TWO_OVER_PI)
    for part in PI_HALVES:
        angle_SE = angle_SE - turns_SE * part
    square_SE = angle_SE * angle_SE
    sine_SE, cosine_SE = angle_SE * _polynomial(SINE, square_SE), _polynomial(COSINE, square_SE)
    quarter_SE = turns_SE.astype(np.int64) % 4
    odd_SE = quarter_SE % 2 == 1
    sines_SE = np.where(odd_SE, cosine_SE, sine_SE) * np.where(quarter_SE >= 2, -1.0, 1.0)
    cosines_SE = np.where(odd_SE, sine_SE, cosine_SE) * np.where((quarter_SE == 1) | (quarter_SE == 2), -1.0, 1.0)
    return np.concatenate([sines_SE, cosines_SE], axis=1).astype(np.float32)
