"""What composed queries lose: the tail of a distribution, the bound of its error, and the ε that it gives.

The distribution is composed tilted, w(x) = p(x)·e^(λx)/M(λ) with K = Σ T·log M, so that

    δ(ε) = m∞ + Σ_{x>ε} w^{*T}(x)·e^(K − λx)·(1 − e^(ε−x)).

An error of E in the tilted distribution (L1) then changes δ by at most E·e^(K−λε)·λ^λ/(1+λ)^(1+λ), which for λ near the
saddle point is E times a small multiple of δ. That is charged to δ; how E is bounded is `composition`'s.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from dpmerge.common.errors import DpmergeError

Floats = NDArray[np.float64]

LOG_HUGE = 700.0  # e⁷⁰⁰ is a finite float
_LARGEST_SHARE = 0.1  # of δ, that rounding may be worth before a claim is refused


@dataclass(frozen=True)
class Composed:
    """The tail of a composed distribution, and the bounds of its errors.

    Attributes:
        losses: Cells' losses [n], ascending.
        masses: Mass of the cells [n], no longer tilted, not negative.
        tilt: λ.
        log_mass: K, the logarithm of what the tilt divided by.
        infinite: Mass of the infinite loss.
        error: E, bound on the tilted distribution's error (L1).
        relative: Bound on the relative error of every computed mass.
    """

    losses: Floats
    masses: Floats
    tilt: float
    log_mass: float
    infinite: float
    error: float
    relative: float

    def charge(self, epsilon: float) -> float:
        """Return what the transform's error may be worth in δ at this ε."""
        return self.error * math.exp(min(self.log_mass - self.tilt * epsilon + log_weight(self.tilt), LOG_HUGE))

    def delta(self, epsilon: float, *, pessimistic: bool) -> float:
        """Return δ at ε with every error added (pessimistic) or taken off.

        Args:
            epsilon: ε.
            pessimistic: Whether errors are added or taken off.
        """
        start = int(np.searchsorted(self.losses, epsilon, side="right"))
        sign = 1 if pessimistic else -1
        lost = self.masses[start:] * -np.expm1(epsilon - self.losses[start:])
        finite = float(np.sum(lost)) * (1 + sign * self.relative)
        return self.infinite + finite + sign * self.charge(epsilon)


@dataclass(frozen=True)
class Loss:
    """What several queries together lose, for both directions of add/remove."""

    directions: tuple[Composed, ...]
    pessimistic: bool

    def epsilon(self, delta: float) -> float:
        """Return the least ε ≥ 0 whose δ is at most `delta`; infinite if there is none.

        Raises:
            DpmergeError: DPM-501 if the error set aside exceeds a tenth of δ.
        """
        return max(_epsilon(one, delta, pessimistic=self.pessimistic) for one in self.directions)


def _epsilon(one: Composed, delta: float, *, pessimistic: bool) -> float:
    def excess(epsilon: float) -> float:
        return math.log(max(one.delta(epsilon, pessimistic=pessimistic), 1e-300) / delta)

    if not len(one.losses) or excess(0.0) <= 0:
        return 0.0
    highest = float(one.losses[-1])
    if excess(highest) > 0:
        return math.inf
    epsilon = float(brentq(excess, 0.0, highest, xtol=1e-12, rtol=1e-13))
    while pessimistic and excess(epsilon) > 0:  # brentq may stop on the wrong side of the root
        epsilon += 1e-12 * max(1.0, epsilon)
    charge = one.charge(epsilon)
    if charge > _LARGEST_SHARE * delta:
        problem = f"rounding may be worth {charge:.1e} of delta = {delta:.1e}"
        raise DpmergeError("DPM-501", problem, "raise delta, or train fewer steps")
    return epsilon


def log_weight(tilt: float) -> float:
    """Return the logarithm of the largest e^(−λy)·(1 − e^(−y)) over y > 0."""
    return tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt)
