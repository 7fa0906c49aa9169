"""ε against the closed form: without sampling, T Gaussians of σ are one of σ/√T, whose δ(ε) is known exactly.

`benchmarks/claim.py` shows `worst_shortfall(...)` as `epsilon_below_closed_form_max`.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

import mpmath

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.mechanism import Mechanism

Case = tuple[tuple[tuple[float, int], ...], float]
"""Queries as (σ, count), and δ."""


def exact_epsilon(total_sigma: float, delta: float) -> float:
    """ε of one Gaussian at δ, from Balle and Wang's δ(ε) (arXiv 1805.06530, theorem 8) at 40 digits."""
    with mpmath.workdps(40):
        mu = 1 / mpmath.mpf(total_sigma)

        def delta_at(epsilon: mpmath.mpf) -> mpmath.mpf:
            return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)

        if delta_at(mpmath.mpf(0)) <= delta:
            return 0.0
        low, high = mpmath.mpf(0), mu * (mu / 2 + 10)
        for _ in range(70):
            middle = (low + high) / 2
            low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
        return float(low)


def cases(*, full: bool) -> Iterator[Case]:
    """Single kinds of query up to the configuration's limits, and several kinds composed."""
    totals = (0.3, 1.0, 5.0, 50.0) if full else (5.0,)
    counts = (1, 40, 3000, 100_000, 10**6) if full else (40, 3000, 10**6)
    deltas = (1e-12, 1e-9, 1e-5, 1e-3) if full else (1e-12, 1e-9)
    for total, count, delta in itertools.product(totals, counts, deltas):
        yield ((total * math.sqrt(count), count),), delta
    for delta in deltas:  # shares of the precision 1/5²: 1/2, 1/4, 1/4
        yield ((5 * math.sqrt(2 * 40), 40), (5 * math.sqrt(4 * 3000), 3000), (5 * math.sqrt(4 * 1000), 1000)), delta


def claimed_epsilon(case: Case) -> float | None:
    """ε as it would be claimed (before witnesses); None where it is refused."""
    from dpmerge.common.privacy import accounting

    queries, delta = case
    mechanisms = [
        Mechanism(
            noise_multiplier=sigma,
            l2_clip_norm=1.0,
            population=1,
            expected_batch_size=1,
            num_steps=count,
            target_delta=delta,
            noise="fast",
        )
        for sigma, count in queries
    ]
    try:
        return accounting._epsilon(mechanisms, delta)
    except DpmergeError as error:
        if error.code != "DPM-501":
            raise
        return None


def shortfalls(some: Iterable[Case]) -> dict[Case, float | None]:
    """Closed form less claim, per case; None where the claim is refused."""
    found: dict[Case, float | None] = {}
    for case in some:
        claimed, (queries, delta) = claimed_epsilon(case), case
        exact = exact_epsilon(math.fsum(count / sigma**2 for sigma, count in queries) ** -0.5, delta)
        found[case] = None if claimed is None else exact - claimed
    return found


def worst_shortfall(*, full: bool) -> float:
    """The largest closed form less claim: the figure `epsilon_below_closed_form_max`; at most 0 if none is below."""
    return max(value for value in shortfalls(cases(full=full)).values() if value is not None)
