"""The discretised privacy loss of one noised query on a Poisson sample, a whole grid of losses at a time.

dp-accounting has the formulas and the proof of both roundings. It inverts the loss cell by cell in Python, which is
three quarters of the time of an ε at the ordinary width. Here the same inverse takes arrays.

References:
    Roundings down, "privacy buckets": arXiv 1807.02130. Roundings up, "connect the dots": arXiv 2207.04380.

Deviations:
    Near a loss of 0 the inverse is computed without cancellation, so masses differ from dp-accounting's by rounding.
"""

import math
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def discretised(
    sigma: float, q: float, *, interval: float, pessimistic: bool, removed: bool
) -> tuple[int, Floats, float]:
    """Return the first cell, the mass of every cell [n], and the mass of the infinite loss.

    Args:
        sigma: Noise multiplier.
        q: Sampling probability, in (0, 1].
        interval: Width of a cell of loss; cell k is the loss k·interval.
        pessimistic: Round losses up (a bound from above) or down.
        removed: The direction: the record is removed from the data, or added to them.
    """
    adjacency = AdjacencyType.REMOVE if removed else AdjacencyType.ADD
    query = _SampledGaussian(
        sigma, sensitivity=1, pessimistic_estimate=pessimistic, sampling_prob=q, adjacency_type=adjacency
    )
    return _rounded_up(query, interval) if pessimistic else _rounded_down(query, interval)


class _SampledGaussian(GaussianPrivacyLoss):  # type: ignore[misc]  # dp_accounting states no types
    """dp-accounting's Gaussian on a Poisson sample, with an inverse that takes arrays."""

    def outputs_at(self, losses: Floats) -> Floats:
        """Return the output at which the loss is each of these, [n] → [n]; losses fall as outputs grow."""
        q = self.sampling_prob
        if self.adjacency_type == AdjacencyType.REMOVE:
            outputs = self._inverse_privacy_loss_without_subsampling_remove(_unsampled(losses, q))
        else:
            outputs = self._inverse_privacy_loss_without_subsampling_add(-_unsampled(-losses, q))
        return np.asarray(outputs, dtype=np.float64)

    def deltas(self, losses: Floats) -> Floats:
        """Return the hockey-stick divergence at each loss, [n] → [n] in [0, 1]; see `get_delta_for_epsilon`."""
        found = np.zeros_like(losses)
        bound = -math.inf if self.sampling_prob == 1 else math.log1p(-self.sampling_prob)
        if self.adjacency_type == AdjacencyType.REMOVE:
            inside = losses > bound
            found[~inside] = -np.expm1(losses[~inside])
        else:
            inside = losses < -bound
        outputs = self.outputs_at(losses[inside])
        found[inside] = self.mu_upper_cdf(outputs) - np.exp(losses[inside] + self.mu_lower_log_cdf(outputs))
        return np.clip(found, 0.0, 1.0)


def _unsampled(losses: Floats, q: float) -> Floats:
    """Return log(1 + (e^loss − 1)/q): the loss of a query on all data whose loss on a sample is this one."""
    if q == 1:
        return losses
    with np.errstate(over="ignore"):  # of what the other branch computes
        near = np.log1p(np.expm1(losses) / q)
    far = losses - math.log(q) + np.log1p(-(1 - q) * np.exp(-np.maximum(losses, 1.0)))
    return np.where(losses < 1, near, far)


def _rounded_up(query: _SampledGaussian, interval: float) -> tuple[int, Floats, float]:
    bounds = query.connect_dots_bounds()
    lower, upper = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    deltas = query.deltas(np.arange(lower, upper + 1) * interval)
    found: Any = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, lower, upper, deltas).to_dense_pmf()
    return int(found._lower_loss), np.asarray(found._probs, dtype=np.float64), float(found._infinity_mass)


def _rounded_down(query: _SampledGaussian, interval: float) -> tuple[int, Floats, float]:
    tail = query.privacy_loss_tail()
    first, last = tail.lower_x_truncation, tail.upper_x_truncation
    highest = math.floor(query.privacy_loss(first) / interval)
    lowest = min(math.floor(query.privacy_loss(last) / interval), highest)
    ends = query.outputs_at(np.arange(highest, lowest, -1) * interval)  # of all cells but the lowest
    outputs = np.maximum.accumulate(np.concatenate([[first], np.minimum(ends, last), [last]]))
    masses = np.diff(query.mu_upper_cdf(outputs))
    masses[0] += float(query.mu_upper_cdf(first))  # beyond the first output losses are higher, and rounded down
    return lowest, masses[::-1].copy(), 0.0
