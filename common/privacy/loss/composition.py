"""Privacy-loss distributions composed with an error that is bounded against δ, however many queries there are.

dp-accounting discretises one query's loss (pessimistic: connect-the-dots). Its own composition raises an FFT to the
T-th power; rounding then adds an absolute error of about T·2⁻⁵³ to δ, which for large T and small δ is more than what
the discretisation gives. Here the cells are tilted before the transform: with w(x) = p(x)·e^(λx)/M(λ) and
K = Σ T·log M,

    δ(ε) = m∞ + Σ_{x>ε} w^{*T}(x)·e^(K − λx)·(1 − e^(ε−x)).

An error of E in the tilted distribution (L1) then changes δ by at most E·e^(K−λε)·λ^λ/(1+λ)^(1+λ), which for λ near the
saddle point is E times a small multiple of δ. E is bounded from the transform itself and charged (docs/accounting.md).

References:
    PLD: arXiv 1807.02130. Connect-the-dots: arXiv 2207.04380. Tilting at the saddle point: arXiv 2209.15621.

Deviations:
    The tilt serves accuracy only; the distribution is still composed by FFT, not approximated at the saddle point.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import minimize_scalar

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.loss.loss_distribution import LOG_HUGE, Composed, Floats, Loss, log_weight
from dpmerge.common.privacy.loss.query_loss import discretised

MAX_CELLS = 2**21
"""Of a composed distribution: enough for ε = 100 at the ordinary width, and some 300 MB with all transforms."""

MAX_QUERIES = 10**11
"""Beyond it rounding is never small against δ, so nothing needs to be computed to know it."""

_UNIT_ROUNDOFF = 2.0**-53
_LOG_ALIASED = 42.0  # e⁻⁴² = 6e-19 of the tilted mass lies beyond either end of the window
_FFT_ROUNDINGS = 8.0  # per halving of the length: a twiddle, a complex product and a sum, for any radix up to 11
_NO_MODULUS = 1e-150
_LEAST_TILT = 1e-3
_MOST_WIDENINGS = 4
_SQRT_TWO = math.sqrt(2.0)  # half of a real signal's spectrum is stored
_ORDERS = np.geomspace(4.0, 14.0, 4)  # of the window's Chernoff bounds, in standard deviations


@dataclass(frozen=True)
class Query:
    """One query's discretised loss and how often it is answered.

    Attributes:
        lower: The first cell's loss in units of the interval.
        probs: Mass of the cells [n].
        infinite: Mass of the infinite loss.
        count: Number of queries.
    """

    lower: int
    probs: Floats
    infinite: float
    count: int


def compose(
    parts: Sequence[tuple[float, float, int]], *, interval: float, delta: float, pessimistic: bool = True
) -> Loss:
    """Return the composed loss of (σ, q, count) queries, most accurate near `delta` and valid at every δ.

    Args:
        parts: Noise multiplier, sampling probability and number of queries of each kind.
        interval: Width of a cell of loss; wider where the composition would need more than `MAX_CELLS`.
        delta: Where the tilt puts the accuracy.
        pessimistic: Round losses up (a bound from above) or down.

    Raises:
        DpmergeError: DPM-501 if no width of a cell is enough, or for more than `MAX_QUERIES`.

    >>> abs(compose([(5.0, 1.0, 1)], interval=1e-4, delta=1e-12).epsilon(1e-12) - 1.324111) < 1e-5  # the closed form
    True
    """
    if sum(count for *_, count in parts) > MAX_QUERIES:
        raise DpmergeError("DPM-501", f"more than {MAX_QUERIES:.0e} queries cannot be accounted", "train fewer steps")
    for _ in range(_MOST_WIDENINGS):
        spectra = [_Tilted(queries, interval, delta) for queries in _queries(parts, interval, pessimistic)]
        most = max(spectrum.num_cells for spectrum in spectra)
        if most <= MAX_CELLS:
            return Loss(tuple(spectrum.composed() for spectrum in spectra), pessimistic)
        interval *= 1.1 * most / MAX_CELLS
    raise DpmergeError("DPM-501", "the loss is spread too widely to account", "add noise, or train fewer steps")


def _queries(
    parts: Sequence[tuple[float, float, int]], interval: float, pessimistic: bool
) -> tuple[tuple[Query, ...], ...]:
    """Return the queries' discretised losses for each direction; both are the same if nothing is sampled."""
    directions = (True,) if all(q == 1 for _, q, _ in parts) else (True, False)
    return tuple(
        tuple(
            Query(*discretised(sigma, q, interval=interval, pessimistic=pessimistic, removed=removed), count)
            for sigma, q, count in parts
        )
        for removed in directions
    )


class _Tilted:
    """Queries of one direction with the tilt that suits δ, and the window that holds their tilted sum."""

    def __init__(self, queries: Sequence[Query], interval: float, delta: float) -> None:
        self._queries, self._interval = queries, interval
        self._grids = [_losses(one.lower, len(one.probs), interval) for one in queries]
        with np.errstate(divide="ignore"):  # empty cells stay empty
            self._logs = [np.log(one.probs) for one in queries]
        self._tilt = self._best_tilt(delta)
        self._total = self._log_mass(self._tilt)
        self._masses = [self._tilted(grid, log) for grid, log in zip(self._grids, self._logs, strict=True)]
        self._first, self.num_cells = self._window()

    def _log_mass(self, tilt: float) -> float:
        """Return K(λ)."""
        pairs = zip(self._queries, self._grids, self._logs, strict=True)
        return math.fsum(one.count * _log_sum(tilt * grid + log) for one, grid, log in pairs)

    def _best_tilt(self, delta: float) -> float:
        """Return about the λ of the Rényi bound on ε at δ, which is the saddle point.

        Any λ > 0 would be valid, so this one is sought with cells thrown together.
        """
        rough = [
            (one.count, *_thrown_together(grid, one.probs))
            for one, grid in zip(self._queries, self._grids, strict=True)
        ]
        variance = math.fsum(count * _variance(grid, mass) for count, grid, mass in rough)
        highest = max(30.0 / math.sqrt(max(variance, 1e-300)), 1.0)
        with np.errstate(divide="ignore"):
            logs = [(count, grid, np.log(mass)) for count, grid, mass in rough]

        def bound(log_tilt: float) -> float:
            tilt = math.exp(log_tilt)
            log_mass = math.fsum(count * _log_sum(tilt * grid + log) for count, grid, log in logs)
            return (log_mass + log_weight(tilt) - math.log(delta)) / tilt

        limits = (math.log(_LEAST_TILT), math.log(highest))
        found = minimize_scalar(bound, bounds=limits, method="bounded", options={"xatol": 0.03})
        return math.exp(float(found.x))

    def _tilted(self, grid: Floats, log: Floats) -> Floats:
        exponents = self._tilt * grid + log
        return np.asarray(np.exp(exponents - _log_sum(exponents)))

    def _window(self) -> tuple[int, int]:
        """Return first cell and number of cells outside of which Chernoff leaves `_LOG_ALIASED` at either end."""
        triples = zip(self._queries, self._grids, self._masses, strict=True)
        variance = math.fsum(one.count * _variance(grid, mass) for one, grid, mass in triples)
        orders = _ORDERS / math.sqrt(max(variance, self._interval**2))
        tilt, total = self._tilt, self._total
        high = min((self._log_mass(tilt + order) - total + _LOG_ALIASED) / order for order in orders)
        falling = (*orders, tilt, tilt + 1)  # the last two leave K(0) and K(−1), which are never large
        low = max((total - self._log_mass(tilt - order) - _LOG_ALIASED) / order for order in falling)
        least = sum(one.count * one.lower for one in self._queries)
        most = sum(one.count * (one.lower + len(one.probs) - 1) for one in self._queries)
        first = max(math.floor(low / self._interval) - 1, least)
        last = min(math.ceil(high / self._interval) + 1, most)
        return first, next_fast_len(last - first + 1, real=True)

    def composed(self) -> Composed:
        """Compose by FFT, and bound what that may have done to the masses."""
        cells, error = self._convolve()
        counts = [one.count for one in self._queries]
        largest = max(
            float(np.max(np.abs(log[np.isfinite(log)])) + self._tilt * np.max(np.abs(grid)))
            for grid, log in zip(self._grids, self._logs, strict=True)
        )
        roundings = (16 + 4 * largest) * sum(counts) + 8 * abs(self._total) + 64
        infinite = math.fsum(
            count * math.log1p(-one.infinite) for one, count in zip(self._queries, counts, strict=True)
        )
        losses = _losses(self._first, self.num_cells, self._interval)
        keep = int(np.searchsorted(losses, 0.0))  # ε is never negative
        losses = losses[keep:]
        return Composed(
            losses=losses,
            masses=cells[keep:] * np.exp(np.minimum(self._total - self._tilt * losses, LOG_HUGE)),
            tilt=self._tilt,
            log_mass=self._total,
            infinite=-math.expm1(infinite),
            error=error,
            relative=math.expm1(min(roundings * _UNIT_ROUNDOFF, 1.0)),
        )

    def _convolve(self) -> tuple[Floats, float]:
        """Return the tilted sum's cells in the window, and the bound E on their error (L1).

        Each output of an FFT errs by at most γ times the inputs' L1 norm. A product of T such factors of modulus |f|
        errs by at most T·(γ + 3u|f|)·(|f| + 2γ)^(T−1). By Parseval the L2 norm of these errors bounds the cells' L1
        norm.
        """
        gamma = _FFT_ROUNDINGS * _UNIT_ROUNDOFF * math.log2(self.num_cells)
        product = np.ones(self.num_cells // 2 + 1, dtype=np.complex128)
        log_bound = np.zeros(len(product))
        factors = np.zeros(len(product))
        for one, mass in zip(self._queries, self._masses, strict=True):
            folded = np.zeros(self.num_cells)
            np.add.at(folded, (one.lower + np.arange(len(mass))) % self.num_cells, mass)
            spectrum = rfft(folded)
            modulus = np.abs(spectrum)
            product *= _power(spectrum, one.count)
            log_bound += one.count * np.log(modulus + 2 * gamma)
            factors += one.count * (gamma + 3 * _UNIT_ROUNDOFF * modulus) / (modulus + 2 * gamma)
        cells = np.roll(irfft(product, self.num_cells), -(self._first % self.num_cells))
        errors = np.exp(np.minimum(log_bound, LOG_HUGE)) * factors
        transform = _SQRT_TWO * (float(np.linalg.norm(errors)) + gamma * float(np.linalg.norm(product)))
        return np.maximum(cells, 0.0), transform + 4 * math.exp(-_LOG_ALIASED)


def _power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """Return base^exponent by repeated squaring, whose rounding adds up to no more than `exponent` multiplications."""
    result = np.ones_like(base)
    square = base.copy()
    while exponent:
        square[np.abs(square) < _NO_MODULUS] = 0.0  # an underflow is slow, and its value is inside the charge
        if exponent & 1:
            result *= square
        exponent >>= 1
        if exponent:
            square *= square
    return result


def _thrown_together(grid: Floats, mass: Floats) -> tuple[Floats, Floats]:
    """Return cells several times as wide, at least 64 of them where there are as many."""
    starts = np.arange(0, len(mass), min(16, max(1, len(mass) // 64)))
    return grid[starts], np.asarray(np.add.reduceat(mass, starts), dtype=np.float64)


def _variance(values: Floats, mass: Floats) -> float:
    total = float(np.sum(mass))
    mean = float(np.dot(values, mass)) / total
    return float(np.dot((values - mean) ** 2, mass)) / total


def _losses(first: int, num_cells: int, interval: float) -> Floats:
    return np.arange(first, first + num_cells, dtype=np.float64) * np.float64(interval)


def _log_sum(exponents: Floats) -> float:
    """Return log Σ e^x; scipy's takes several times as long."""
    largest = float(np.max(exponents))
    return largest + math.log(float(np.sum(np.exp(exponents - largest))))
