"""What ε and δ may be, and why δ must be small.

δ lies below 1 over the declared population, or a mechanism that publishes a random record in the clear meets it.

>>> default_delta(3000), default_delta(250_000), is_large(1e-3, 800)
(1e-05, 4e-07, False)
"""

import math

MAX_EPSILON = 100.0
"""Beyond it e^ε is no promise, and loss distributions grow past any memory."""

MIN_DELTA = 1e-12
"""Below it no ε is accounted."""

_LARGEST_DEFAULT = 1e-5
_SHARE = 0.1  # of 1 / population


def default_delta(population: int) -> float:
    """Return δ where none is stated: a tenth of 1 / population, at most 1e-5, rounded down to one digit.

    >>> [default_delta(n) for n in (1, 10_000, 10_001, 10**6, 10**12)]
    [1e-05, 1e-05, 9e-06, 1e-07, 1e-12]
    """
    largest = max(min(_LARGEST_DEFAULT, _SHARE / population), MIN_DELTA)
    exponent = math.floor(math.log10(largest) + 1e-9)
    digit = math.floor(largest / 10.0**exponent + 1e-9)  # 1e-7 / 1e-7 may fall short of 1 by a rounding
    return float(f"{digit}e{exponent}")


def is_large(delta: float, population: int) -> bool:
    """Tell whether a mechanism that publishes one record in the clear could meet this δ.

    Args:
        delta: δ.
        population: Declared number of units.
    """
    return delta * population >= 1
