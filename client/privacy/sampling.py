"""Poisson sampling: every unit enters a step's sample by its own coin, as the accountant assumes.

Fixed-size or shuffled batches accounted as Poisson would understate ε by a factor; there is no such option.

>>> sampler = PoissonSampler(1.0, 4)
>>> sampler.sample()
tensor([0, 1, 2, 3])
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from dpmerge.client.privacy.keystream import Keystream


class PoissonSampler:
    """Draws independent Poisson samples of a party's units, from a key that the noise never shares.

    Guarantees:
        Each unit is chosen independently with probability floor(q·2⁶⁴)/2⁶⁴, never above the q that is accounted.
        A sample may be empty, and nothing about its size is reported.

    Args:
        sampling_prob: q in (0, 1].
        num_units: Number of units (records, or users) this party holds; private, and not what q is computed from.
        seed: For tests only; None takes a key from the operating system.

    Raises:
        ValueError: If q or the number of units is out of range.
    """

    def __init__(self, sampling_prob: float, num_units: int, seed: int | None = None) -> None:
        if not 0 < sampling_prob <= 1:
            raise ValueError(f"Expected sampling_prob={sampling_prob} in (0, 1].")
        if num_units < 0:
            raise ValueError(f"Expected num_units={num_units} to be at least 0.")
        self._threshold = int(math.ldexp(sampling_prob, 64))  # exact: scaling by a power of two does not round
        self._num_units = num_units
        key = None if seed is None else hashlib.sha256(f"sampling|{seed}".encode()).digest()
        self._keystream = Keystream(key)

    @classmethod
    def from_state(cls, sampling_prob: float, num_units: int, state: bytes) -> "PoissonSampler":
        """Continue a sampler from `state()`."""
        sampler = cls(sampling_prob, num_units)
        sampler._keystream = Keystream(state)
        return sampler

    def sample(self) -> Tensor:
        """Return the sorted indices of the next sample (int64, possibly none), and forget the coins."""
        words = self._keystream.words(self._num_units)
        self._keystream.ratchet()
        # words < threshold, written so that q = 1 (threshold 2⁶⁴, no 64-bit word) needs no case of its own
        chosen = np.flatnonzero(words <= np.uint64(self._threshold - 1)) if self._threshold else np.empty(0, np.int64)
        return torch.from_numpy(chosen)

    def state(self) -> bytes:
        """Return what a checkpoint needs to continue with fresh samples; earlier ones cannot be recomputed from it."""
        return self._keystream.state()

    def erase(self) -> None:
        """Destroy the key; the sampler refuses every further use."""
        self._keystream.erase()
