"""The geometry of a merge, and a sum whose length is chosen from it without any data.

Norms ‖τ_t‖ and inner products ⟨τ_t, τ_s⟩ over all modules say how far the parties moved and how much their ways
overlap. Averages win where parties move together; where they are nearly orthogonal an average shortens every τ_t to
1/T, and sums with a coefficient of .5 to .7 do better.
"""

import math

import torch
from torch import Tensor

from dpmerge.server.merging.deltas import Modules
from dpmerge.server.merging.linear import shares, weighted
from dpmerge.server.merging.lowrank import gram
from dpmerge.server.merging.recipe import Combined, Recipe


def geometry(modules: Modules, recipe: Recipe) -> Combined:
    """Return c · Σ u_t τ_t with c = mean_t ‖u_t τ_t‖ / ‖Σ_t u_t τ_t‖, u = T · w / Σ w, and c at most 1.

    One coefficient for the whole model, such that the merged change is as long as the parties' changes are on average:
    identical adapters give 1/T, the average; orthogonal ones of equal length 1/√T; opposed ones at most 1, the plain
    sum.

    A stated coefficient takes the place of c.

    Limits: norms count noise as signal. Independent noise of T parties is orthogonal, so very private adapters look
    orthogonal and draw c towards 1/√T whatever their signals do. Nothing is shrunk or denoised, and a long adapter
    outweighs a short one.
    """
    scale = [len(recipe.weights) * share for share in shares(recipe.weights)]
    coefficient = recipe.coefficient
    if coefficient is None:
        coefficient = norm_preserving(overlaps(modules), scale)
    return weighted(modules, scale, recipe.rank, coefficient)


def norm_preserving(inner: Tensor, scale: list[float]) -> float:
    """Return mean_t ‖u_t τ_t‖ / ‖Σ u_t τ_t‖, at most 1; by the triangle inequality it is at least 1/T.

    Args:
        inner: ⟨τ_t, τ_s⟩, [T, T].
        scale: u_t, at least 0, summing to T.

    >>> norm_preserving(torch.eye(4, dtype=torch.float64), [1.0] * 4)
    0.5
    """
    u = torch.tensor(scale, dtype=torch.float64)
    lengths = inner.diagonal().clamp(min=0).sqrt() * u
    total = math.sqrt(max(float(u @ inner @ u), 0.0))
    mean = float(lengths.mean())
    if mean == 0:
        return 1 / len(scale)  # nobody moved: any coefficient gives 0
    return min(mean / total, 1.0) if total > 0 else 1.0


def overlaps(modules: Modules) -> Tensor:
    """Return ⟨τ_t, τ_s⟩ summed over all modules, float64 [T, T]."""
    return torch.stack([gram(factors) for factors in modules.values()]).sum(0)


def cosines(inner: Tensor) -> Tensor:
    """Turn inner products into cosines; a party that did not move has 0 with all others and 1 with itself.

    >>> cosines(torch.tensor([[4.0, 0.0], [0.0, 0.0]])).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    lengths = inner.diagonal().clamp(min=0).sqrt()
    unit = torch.where(lengths > 0, 1 / lengths, 0.0)
    result = (inner * unit[:, None] * unit).clamp(-1, 1)
    return result.fill_diagonal_(1.0)
