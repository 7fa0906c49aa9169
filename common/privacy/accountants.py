"""Three accountants of the same queries: privacy-loss distribution, PRV, and Rényi divergence.

They know of queries (σ, q, count) and a δ, and of nothing else. What is claimed of a training, and which of them must
agree, is `accounting.py`'s.

References:
    PLD: arXiv 1807.02130, connect-the-dots 2207.04380. PRV: arXiv 2106.02848. RDP: arXiv 1908.10530.
"""

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from dpmerge.common.privacy.bounds import MAX_EPSILON
from dpmerge.common.privacy.loss.composition import compose
from dpmerge.common.privacy.loss.loss_distribution import Loss
from dpmerge.common.privacy.mechanism import Mechanism

Queries = tuple[tuple[float, float, int], ...]
"""Queries as (σ, q, count)."""

MAX_RDP = 10 * MAX_EPSILON
"""Rényi ε above which no loss distribution is composed: it would outgrow memory, and be refused anyway."""

PRV_RELATIVE_ERROR = 0.01

_INTERVAL = 1e-4
_MAX_LOSS_CELLS = 2**18
_RDP_ORDERS = (*range(2, 64), 128, 256, 512, 1024)  # integers: their closed form converges everywhere


def queries_of(mechanisms: Sequence[Mechanism]) -> Queries:
    """Return the different (σ, q) in the order in which they first appear, each with the number of its queries."""
    counts: dict[tuple[float, float], int] = {}
    for mechanism in mechanisms:
        for sigma, count in mechanism.queries:
            query = (sigma, mechanism.sampling_prob)
            counts[query] = counts.get(query, 0) + count
    return tuple((sigma, q, count) for (sigma, q), count in counts.items())


@lru_cache(maxsize=1024)
def pld_epsilon(queries: Queries, composed_for: float, delta: float, pessimistic: bool, coarseness: int) -> float:
    """Return ε at δ of the distribution that is composed to be most accurate at another δ.

    Remembered by its numbers, whoever has them: of two hundred parties many have the same, whatever else differs, and
    every one is checked several times.

    Args:
        queries: What is answered.
        composed_for: δ at which the composition is most accurate.
        delta: δ.
        pessimistic: Whether ε is a bound from above, or from below.
        coarseness: Width of a cell, in those of the claim.
    """
    return _composed(queries, composed_for, pessimistic, coarseness).epsilon(delta)


@lru_cache(maxsize=2)  # both ends of one bracket: each is some ten million bytes
def _composed(queries: Queries, delta: float, pessimistic: bool, coarseness: int) -> Loss:
    """Return the loss distribution of all queries, cells `coarseness` times as wide as the claim's."""
    return compose(queries, interval=coarseness * _interval(queries), delta=delta, pessimistic=pessimistic)


def _interval(queries: Queries) -> float:
    """Return a loss cell's width: 1e-4; less where one query's loss, about q/σ, is as small; more where it is huge."""
    smallest_loss = min(q / sigma for sigma, q, _ in queries)
    smallest_sigma = min(sigma for sigma, _, _ in queries)
    largest_loss = 0.5 / smallest_sigma**2 + 10 / smallest_sigma
    return max(min(_INTERVAL, smallest_loss / 40), largest_loss / _MAX_LOSS_CELLS)


@lru_cache(maxsize=256)
def prv_epsilon(queries: Queries, delta: float, epsilon: float) -> float:
    """Return the upper end of Opacus's PRV bracket of ε at δ.

    Args:
        queries: What is answered.
        delta: δ.
        epsilon: About the result: how fine PRV's grid must be.
    """
    from opacus.accountants import PRVAccountant  # seconds to import, and only a cross-check needs it

    accountant = PRVAccountant()
    accountant.history = list(queries)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # log(0) at q = 1 and the range of its internal RDP orders; the result is checked
        error = PRV_RELATIVE_ERROR * max(1.0, epsilon)
        return float(accountant.get_epsilon(delta, eps_error=error))


def may_be_hopeless(queries: Queries) -> bool:
    """Whether the Rényi divergence of order 2, a sum of logarithms, leaves it open that ε is hopelessly large."""
    squares = (n * math.log1p(q * q * math.expm1(min(sigma**-2, 700.0))) for sigma, q, n in queries)
    return math.fsum(squares) > MAX_RDP / 2


@lru_cache(maxsize=1024)
def rdp_epsilon(queries: Queries, delta: float) -> float:
    """Return ε at δ by Rényi divergence at integer orders.

    Args:
        queries: What is answered.
        delta: δ.
    """
    accountant = RdpAccountant(orders=_RDP_ORDERS)
    for sigma, q, count in queries:
        accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), count)
    return float(accountant.get_epsilon(delta))
