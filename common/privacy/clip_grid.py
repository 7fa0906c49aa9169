"""A public grid of clip norms, and which of them a noisy histogram over it names.

>>> grid = ClipGrid(middle=1.0, num_bins=4)
>>> [round(edge, 3) for edge in grid.edges]
[0.5, 0.707, 1.0, 1.414]
>>> grid.quantile([3.2, 60.9, 40.1, -0.4], noise_std=1.5, share=0.5)
0.7071067811865476
>>> grid.quantile([3.2, -2.9, 1.1, 0.4], noise_std=1.5, share=0.5)  # nothing but noise
1.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpmerge.common.privacy.mechanism import CLIP_NORM_RANGE

MAX_BINS = 32
"""So many reach from 1/256 to 181 times the middle; each has noise of its own, which more of them would add up."""

_LEAST_TOTAL = 2.0  # standard deviations of its noise: a smaller count of units says nothing


@dataclass(frozen=True)
class ClipGrid:
    """Rising clip norms around a middle, each √2 times the one below: bin j holds what is at most as long as edge j.

    What is longer than all edges belongs to the last bin. Edges that no mechanism accepts are left out.

    Attributes:
        middle: The plan's own clip norm, which is one of the edges.
        num_bins: Bins asked for; those below the middle come first.
    """

    middle: float
    num_bins: int

    @classmethod
    def around(cls, middle: float, num_coordinates: int) -> ClipGrid:
        """Return the grid of a training: no more bins than coordinates, so that no query has more than the steps.

        Args:
            middle: Upper end of the middle bin.
            num_coordinates: Length of the noised vector.
        """
        return cls(middle, min(num_coordinates, MAX_BINS))

    @property
    def edges(self) -> tuple[float, ...]:
        """Upper ends of the bins, to the same last bit on every machine: products with powers of 2 and with √2."""
        low, high = CLIP_NORM_RANGE
        halves = range(-(self.num_bins // 2), self.num_bins - self.num_bins // 2)
        found = (math.ldexp(self.middle, half // 2) * (math.sqrt(2) if half % 2 else 1.0) for half in halves)
        return tuple(edge for edge in found if low <= edge <= high)

    def quantile(self, counts: Sequence[float], *, noise_std: float, share: float) -> float:
        """Return the least edge below which a share of the units lies, or the middle where noise is all there is.

        Args:
            counts: Noisy numbers of units per bin; what is below zero counts as zero.
            noise_std: Standard deviation of the noise of each.
            share: In (0, 1).

        Raises:
            ValueError: If there is not one count per bin.
        """
        if len(counts) != len(self.edges):
            raise ValueError(f"Expected {len(self.edges)} counts, not {len(counts)}.")
        if not sum(counts) > _LEAST_TOTAL * noise_std * math.sqrt(len(counts)):
            return self.middle
        possible = [max(0.0, count) for count in counts]
        wanted, seen = share * sum(possible), 0.0
        for edge, count in zip(self.edges, possible, strict=True):
            seen += count
            if seen >= wanted:
                return edge
        return self.edges[-1]  # all of them, less the rounding of a sum
