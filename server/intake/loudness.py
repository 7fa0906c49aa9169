"""Whether one party's weight change is far larger than the others'.

A bound that all must keep, such as 250, is no help where the others have norms of 5 to 7: methods that weigh by norm,
or restore one, follow the loudest. The median and the median absolute deviation of the accepted norms say what is
usual, and no minority can move them far.

>>> norms = {"a": 3.0, "b": 3.2, "c": 2.9, "d": 3.1, "e": 249.0}
>>> {party: round(bound, 2) for party, bound in loud(norms).items()}
{'e': 9.15}
>>> loud({"a": 1.0, "b": 249.0})  # of two, nobody can say which is usual
{}
"""

import statistics
from collections.abc import Collection, Mapping

MIN_OTHERS = 3
MAD_TO_STD = 1.4826
"""Of a normal distribution: its standard deviation over its median absolute deviation."""
NUM_STDS = 6.0
LEAST_FACTOR = 3.0
"""A norm within this factor of the median is never called loud, however alike the others are."""


def usual_bound(norms: Collection[float]) -> float | None:
    """Return max(3 m, m + 6 · 1.4826 · MAD) with the median m of these norms; None of fewer than three."""
    if len(norms) < MIN_OTHERS:
        return None
    middle = statistics.median(norms)
    spread = MAD_TO_STD * statistics.median([abs(norm - middle) for norm in norms])
    return max(LEAST_FACTOR * middle, middle + NUM_STDS * spread)


def loud(norms: Mapping[str, float]) -> dict[str, float]:
    """Return party → the bound of all the others, of those whose norm is above it."""
    found = {}
    for party, norm in norms.items():
        bound = usual_bound([other for name, other in norms.items() if name != party])
        if bound is not None and norm > bound:
            found[party] = bound
    return found


def loud_warnings(norms: Mapping[str, float]) -> list[str]:
    """Return a sentence per loud party."""
    return [words(party, norms[party], bound) for party, bound in loud(norms).items()]


def words(party: str, norm: float, bound: float) -> str:
    """Return the warning."""
    return (
        f"{party}: weight change of norm {norm:.4g}, where the others' median and spread put the usual at up to "
        f"{bound:.4g}; merge with robust = clip or median, or without it"
    )
