"""Gaussian noise from two sources: exact integers from a stream cipher, or floating point for experiments.

`SecureNoise` samples a Gaussian of standard deviation 2²⁰, rounded to integers, in three moves that trust floating
point nowhere (docs/noise.md has the proof):

1. the cell |x| ∈ [k·h, (k+1)·h), h = 2⁻¹⁰ standard deviations, from a table of 128-bit cumulative probabilities;
2. the place u inside the cell by rejection: the density falls by at most 1.3 % across a cell, so a uniform u is kept
   with probability exp(−E), E = k·h²·u + h²·u²/2. In the rare case that float64 cannot decide, exact arithmetic does;
3. a sign, and the nearest integer.
"""

import bisect
import hashlib
from functools import lru_cache
from typing import ClassVar, Protocol

import mpmath
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmerge.client.privacy.keystream import Keystream
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.mechanism import GRID_STEPS_PER_SIGMA, NoiseMode

CELLS_PER_SIGMA = 2**10
NUM_CELLS = 13 * CELLS_PER_SIGMA
"""Cells of |x|: beyond 13 standard deviations lies a mass below 2⁻¹²⁵, which the last cell takes."""

_CELL_STEPS = GRID_STEPS_PER_SIGMA // CELLS_PER_SIGMA
_PLACE_BITS = 63  # of a word's 64: the last is the sign
_UNSURE = 2.0**-50  # float64 decides a rejection to within 2⁻⁵⁵; closer calls than this are decided exactly


class NoiseSource(Protocol):
    """What a privatiser needs of noise.

    `sample` returns values of standard deviation `steps_per_sigma`: integers if that is the secure grid, else floats.
    """

    mode: ClassVar[NoiseMode]
    steps_per_sigma: ClassVar[int]

    def sample(self, num_values: int) -> Tensor:
        """Return fresh, independent noise for one query ([num_values], CPU)."""
        ...

    def state(self) -> bytes:
        """Return what a checkpoint needs to continue."""
        ...

    def erase(self) -> None:
        """Destroy the state that could tell earlier noise; secure noise then refuses every further use."""
        ...


class FastNoise:
    """Floating-point standard normal noise from torch's generator: for experiments, and marked so in the statement.

    Args:
        seed: For tests only; None seeds from the operating system.
    """

    mode: ClassVar[NoiseMode] = "fast"
    steps_per_sigma: ClassVar[int] = 1

    def __init__(self, seed: int | None = None) -> None:
        start = Keystream().words(1).tobytes() if seed is None else hashlib.sha256(f"noise|{seed}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(start[:8], "little"))

    @classmethod
    def from_state(cls, state: bytes) -> "FastNoise":
        """Continue from `state()`."""
        source = cls()
        source._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return source

    def sample(self, num_values: int) -> Tensor:
        """Return standard normal fp32 values, [num_values]."""
        return torch.randn(num_values, generator=self._generator)

    def state(self) -> bytes:
        """Return the generator's state."""
        return self._generator.get_state().numpy().tobytes()

    def erase(self) -> None:
        """Reseed from the operating system: the state that produced earlier noise is gone. Later use is not refused."""
        self._generator.seed()


class SecureNoise:
    """Integers distributed as round(N(0, 2⁴⁰)), from ChaCha20.

    Guarantees:
        Each value's total-variation distance from that distribution is at most `SAMPLER_TV_PER_VALUE`, given uniform
        words. Every query ends with a ratchet: noise once drawn cannot be recomputed from any later state.

    Args:
        seed: Refused: replayed noise is a second release under the same noise, which subtraction removes.

    Raises:
        DpmergeError: DPM-103 if a seed is given.

    References:
        Rejection inside a table cell is Karney's and the ziggurat's idea (arXiv 1303.6257); the need for a grid is
        Mironov's (CCS 2012).
    """

    mode: ClassVar[NoiseMode] = "secure"
    steps_per_sigma: ClassVar[int] = GRID_STEPS_PER_SIGMA

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None:
            raise DpmergeError("DPM-103", "noise_seed is set with noise = secure", 'remove it, or test with "fast"')
        self._keystream = Keystream()

    @classmethod
    def from_state(cls, state: bytes) -> "SecureNoise":
        """Continue from `state()`, with noise that was never drawn before."""
        source = cls()
        source._keystream = Keystream(state)
        return source

    def sample(self, num_values: int) -> Tensor:
        """Return int64 noise, [num_values], of standard deviation 2²⁰."""
        cells = _cells(self._keystream, num_values)
        places = _places(self._keystream, cells)
        self._keystream.ratchet()
        offsets = ((places >> np.uint64(1)) + np.uint64(2 ** (_PLACE_BITS - 11))) >> np.uint64(_PLACE_BITS - 10)
        magnitudes = cells * _CELL_STEPS + offsets.astype(np.int64)  # offsets: u·2¹⁰ to the nearest integer
        return torch.from_numpy(np.where(places & np.uint64(1), -magnitudes, magnitudes))

    def state(self) -> bytes:
        """Return the ratcheted key: it continues the stream and reveals nothing of what came before."""
        return self._keystream.state()

    def erase(self) -> None:
        """Destroy the key, at release: a stored key would let its finder subtract noise."""
        self._keystream.erase()


@lru_cache(maxsize=1)
def cell_thresholds() -> tuple[int, ...]:
    """Return floor(2¹²⁸·P(|x| < k·h)) for k = 1 … NUM_CELLS − 1: a cell's index counts the thresholds at or below r.

    >>> thresholds = cell_thresholds()
    >>> round(thresholds[1023] / 2**128, 6)  # within one standard deviation
    0.682689
    """
    with mpmath.workprec(200):
        to_root = mpmath.sqrt(2) * CELLS_PER_SIGMA
        return tuple(int(mpmath.floor(mpmath.erf(k / to_root) * 2**128)) for k in range(1, NUM_CELLS))


@lru_cache(maxsize=1)
def _high_words() -> NDArray[np.uint64]:
    return np.array([threshold >> 64 for threshold in cell_thresholds()], dtype=np.uint64)


def _cells(stream: Keystream, num_values: int) -> NDArray[np.int64]:
    """Return cell indices. One word decides, unless it equals a threshold's high word: a second one completes it."""
    high = stream.words(num_values)
    cells = np.searchsorted(_high_words(), high, side="right")
    tied = np.flatnonzero(np.searchsorted(_high_words(), high, side="left") != cells)
    for place, low in zip(tied, stream.words(len(tied)), strict=True):
        cells[place] = bisect.bisect_right(cell_thresholds(), (int(high[place]) << 64) | int(low))
    return cells


def _places(stream: Keystream, cells: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return one word per cell: a place u (63 bits) with density ∝ exp(−E) inside it, and a sign (the last bit)."""
    places = np.empty(len(cells), dtype=np.uint64)
    open_ = np.arange(len(cells))
    while len(open_):
        places[open_] = stream.words(len(open_))
        coins = stream.words(len(open_))
        rejects = _rejection_probs(cells[open_], places[open_] >> np.uint64(1))
        margin = coins * 2.0**-64 - rejects
        kept = margin >= 0
        for doubtful in np.flatnonzero(np.abs(margin) < _UNSURE):
            coin = (int(coins[doubtful]) << 64) | int(stream.words(1)[0])
            index = open_[doubtful]
            kept[doubtful] = is_kept_exactly(int(cells[index]), int(places[index]) >> 1, coin)
        open_ = open_[~kept]
    return places


def _rejection_probs(cells: NDArray[np.int64], places: NDArray[np.uint64]) -> NDArray[np.float64]:
    u = places * 2.0**-_PLACE_BITS
    return -np.expm1(-(cells * u + u * u / 2) / CELLS_PER_SIGMA**2)


def is_kept_exactly(cell: int, place: int, coin: int) -> bool:
    """Decide a rejection in exact arithmetic: keep if coin/2¹²⁸ ≥ 1 − exp(−E) with u = place/2⁶³.

    >>> is_kept_exactly(cell=0, place=0, coin=0)  # E = 0: always kept
    True
    >>> is_kept_exactly(cell=12288, place=2**63 - 1, coin=0)
    False
    """
    with mpmath.workprec(256):
        u = mpmath.mpf(place) / 2**_PLACE_BITS
        energy = (cell * u + u * u / 2) / CELLS_PER_SIGMA**2
        return bool(mpmath.mpf(coin) / 2**128 >= -mpmath.expm1(-energy))
