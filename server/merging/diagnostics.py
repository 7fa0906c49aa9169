"""The account of a merge: how far the parties moved, how much they overlap, and what the rank left out.

It is reported, and no method reads it, so fp32 products are exact enough: they are most of what a sum of many parties
costs, and take a third of the time. A sum's own norm is read off the parties' inner products where these tell it.
Beyond 64 parties nothing is measured that costs T² products, so that the account stays linear where the merge is.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpmerge.server.merging.adapters.deltas import LARGEST, LowRankDelta, Modules
from dpmerge.server.merging.low_rank.algebra import gram, is_short, overflow, squared_norm, total_norm
from dpmerge.server.merging.methods.geometry import cosines
from dpmerge.server.merging.methods.recipe import Combined

MAX_OVERLAP_PARTIES = 64  # the matrix costs T² products, which only the methods that need it should pay beyond this
FP32_RANGE = (1e-15, 1e15)  # of the norms of factors whose products fp32 can hold
CANCELLED = 1e-2  # share that is left of a sum of squares, below which fp32 products do not tell its norm


def measures(modules: Modules, combined: Combined) -> dict[str, Any]:
    """Return the part of `Merged.info` that is measured.

    Args:
        modules: What was merged.
        combined: What came out.

    Raises:
        DpmergeError: DPM-103 for a merged change with numbers beyond fp32.
    """
    inner = _inner_products(modules)
    lost = math.hypot(*combined.lost.values())
    norm = _norm(inner, combined)
    if norm is not None and not norm <= LARGEST:
        raise overflow()
    uncut_norm = math.hypot(norm or 0.0, lost)  # what is lost is orthogonal to what is kept
    return {
        "coefficient": combined.coefficient,
        "norms": _norms(modules) if inner is None else inner.diagonal().clamp(min=0).sqrt().tolist(),
        "overlap": None if inner is None else cosines(inner).tolist(),
        "norm": norm,
        "rank": max(factors.rank for factors in combined.modules.values()),
        "truncation_error": lost / uncut_norm if uncut_norm else 0.0,
    }


def _inner_products(modules: Modules) -> Tensor | None:
    """Return ⟨τ_t, τ_s⟩ over all modules, float64 [T, T], or None for too many parties."""
    if max(map(len, modules.values())) > MAX_OVERLAP_PARTIES:
        return None
    return torch.stack([gram(factors, _precision(factors)) for factors in modules.values()]).sum(0).cpu()


def _norms(modules: Modules) -> list[float]:
    squares = [[squared_norm(item, _precision([item])) for item in factors] for factors in modules.values()]
    return [math.sqrt(math.fsum(column)) for column in zip(*squares, strict=True)]


def _norm(inner: Tensor | None, combined: Combined) -> float | None:
    """Return the norm of what came out, or None for an exact sum of many parties, where it costs more than the sum."""
    items = combined.modules.values()
    if inner is None:
        bound = math.hypot(*(item.bound() for item in items))
        left_out = bound <= LARGEST and not any(combined.lost.values()) and not all(map(is_short, items))
        return None if left_out else total_norm(items)
    return _norm_of_sum(inner, combined) or total_norm(items)


def _norm_of_sum(inner: Tensor, combined: Combined) -> float | None:
    """Return ‖Σ c_t τ_t‖ = √(cᵀ G c) for a sum of which nothing is lost, and None where that does not tell it."""
    if combined.weights is None or any(combined.lost.values()):
        return None
    weights = torch.tensor(combined.weights, dtype=torch.float64)
    terms = torch.outer(weights, weights) * inner
    total = float(terms.sum())
    return math.sqrt(total) if total > CANCELLED * float(terms.abs().sum()) else None


def _precision(factors: Sequence[LowRankDelta]) -> torch.dtype:
    low, high = FP32_RANGE
    inside = all(norm == 0 or low <= norm <= high for item in factors for norm in item.norms())
    return torch.float32 if inside else torch.float64
