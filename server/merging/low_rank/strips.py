"""A low-rank change's full matrix a few rows at a time, and the magnitude that a share of its entries reach.

Nothing here holds more than one strip, or the counts, so what is worked on stays in the processor's cache.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dpmerge.server.merging.adapters.deltas import LowRankDelta, Modules

STRIP = 1 << 17
"""Entries of a full matrix that are built at a time."""

Cut = Callable[[Tensor], Tensor]
"""Rows of a party's full matrix → the same with entries dropped; is given all rows once, in order."""


def strips(item: LowRankDelta) -> Iterator[Tensor]:
    """Yield the full weight change in fp32, a few rows at a time: the same rows, so the same bits, each time."""
    a, b = item.a.float(), item.b.float() * item.scaling
    return (rows @ a for rows in torch.split(b, rows_at_once(item)))


def rows_at_once(item: LowRankDelta) -> int:
    """Return how many rows a strip has."""
    return max(1, STRIP // item.shape[1])


def by_strips(
    factors: Sequence[LowRankDelta], cuts: Sequence[Cut], combine: Callable[[list[Tensor]], Tensor]
) -> Tensor:
    """Return the merged matrix: of a few rows of every party's, with entries dropped, the same rows merged."""
    merged = torch.empty(factors[0].shape, device=factors[0].device)
    rows = torch.split(merged, rows_at_once(factors[0]))
    for target, parts in zip(rows, zip(*map(strips, factors), strict=True), strict=True):
        target.copy_(combine([cut(part) for cut, part in zip(cuts, parts, strict=True)]))
    return merged


def thresholds(modules: Modules, num_parties: int, density: float) -> list[float]:
    """Return, per party, the magnitude that the share `density` of its entries over all modules reach.

    Non-negative floats order as their bit patterns do, so two counting passes (upper, then lower 16 bits) select the
    k-th largest exactly, without holding more than one module's matrix.

    Args:
        modules: Module → every party's change.
        num_parties: T.
        density: Share of entries, in (0, 1].
    """
    size = sum(math.prod(factors[0].shape) for factors in modules.values())
    upper, lower = torch.zeros(2, num_parties, 1 << 16, dtype=torch.int64, device="cpu")
    for factors in modules.values():
        for counts, item in zip(upper, factors, strict=True):
            for rows in strips(item):
                counts += torch.bincount(_bits(rows) >> 16, minlength=1 << 16).cpu()
    buckets = [_kth_largest(counts, max(1, int(density * size))) for counts in upper]
    for factors in modules.values():
        for counts, item, (bucket, _) in zip(lower, factors, buckets, strict=True):
            for rows in strips(item):
                inside = _bits(rows).sub_(bucket << 16).clamp_(-1, 1 << 16).add_(1)
                counts += torch.bincount(inside, minlength=(1 << 16) + 2)[1:-1].cpu()
    words = [
        (bucket << 16) | _kth_largest(counts, place)[0] for counts, (bucket, place) in zip(lower, buckets, strict=True)
    ]
    return torch.tensor(words, dtype=torch.int32).view(torch.float32).tolist()


def _bits(rows: Tensor) -> Tensor:
    return rows.abs().view(torch.int32).flatten()


def _kth_largest(counts: Tensor, k: int) -> tuple[int, int]:
    """Return the bin of the k-th largest item, and its place among that bin's items, counted from the largest."""
    above = counts.flip(0).cumsum(0)
    index = int(torch.searchsorted(above, k))
    return len(counts) - 1 - index, k - int(above[index] - counts.flip(0)[index])
