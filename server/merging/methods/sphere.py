"""Means of directions: each module's weight changes as points of a sphere, their lengths apart; and Model Stock.

Model Stock reads off the angles between the changes how far to trust their average.

Everything happens in Gram space: a point of the sphere is Σ c_t u_t with u_t = τ_t / ‖τ_t‖, and products of thin
factors give ⟨u_t, u_s⟩ exactly. So a merge is T coefficients per module and one weighted sum.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import LowRankDelta, Modules
from dpmerge.server.merging.low_rank.algebra import gram
from dpmerge.server.merging.methods.geometry import cosines
from dpmerge.server.merging.methods.linear import shares, weighted_module
from dpmerge.server.merging.methods.parameter import RANK
from dpmerge.server.merging.methods.recipe import Combined, MergeMethod, Recipe, per_module, refuse_unequal_weights

MAX_STEPS = 100
TOLERANCE = 1e-7  # radians; products of nearly equal directions tell no smaller angle apart
Mean = Callable[[Tensor, Tensor], Tensor | None]
"""(cosines [T, T], weights that sum to 1 [T]) → coefficients of the unit vectors, or None if there is no mean."""

FLAT = 1e-7  # length of a mean of unit vectors below which it has no direction


def slerp(modules: Modules, recipe: Recipe) -> Combined:
    """Walk along the great circle between two parties' directions; per module, with weights as the way's shares.

    At most two parties, so that no order of theirs matters; `karcher` is the same mean for any number. One party is
    itself. The length is the weighted mean of the lengths. Opposed directions have no one circle: the straight mean.

    References: Shoemake, "Animating rotation with quaternion curves", 1985, section 3.3. Deviations: a direction and a
    length apart, where other tools interpolate vectors of different lengths with the weights of unit ones.

    Raises:
        DpmergeError: DPM-103 for more than two parties or weights below 0.
    """
    if len(recipe.weights) > 2:
        problem = f"slerp joins two parties, not {len(recipe.weights)}"
        raise DpmergeError("DPM-103", problem, "choose method karcher, the same mean for any number")
    return _on_sphere(modules, recipe, _great_circle)


SLERP = MergeMethod(
    name="slerp",
    summary="Great circle between the directions of two parties, lengths averaged.",
    source="-",
    function=slerp,
    laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
    takes={RANK: None},
    most=2,
)


def karcher(modules: Modules, recipe: Recipe) -> Combined:
    """Return, per module, the point of the sphere nearest to the parties' directions in squared angle, times a length.

    The fixed point of x → exp_x(Σ w_t log_x u_t), from the direction of the weighted mean. The length is the weighted
    mean of the lengths. A party that did not move has no direction, and shortens the result. Directions that cancel
    out have no mean: the straight one, of length 0 or nearly so, is returned.

    References: Karcher, "Riemannian center of mass and mollifier smoothing", 1977; mergekit's `karcher`. Deviations:
    on weight changes; mergekit averages weights.

    Raises:
        DpmergeError: DPM-103 for weights below 0.
    """
    return _on_sphere(modules, recipe, karcher_mean)


KARCHER = MergeMethod(
    name="karcher",
    summary="Nearest direction to the parties' in angle, lengths averaged.",
    source="-",
    function=karcher,
    laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
    takes={RANK: None},
)


def model_stock(modules: Modules, recipe: Recipe) -> Combined:
    """Return t · (1/T) Σ τ_t with t = T cos θ / (1 + (T - 1) cos θ), per module.

    cos θ is the mean cosine over all pairs. Identical adapters give themselves; orthogonal ones give t = 0, which
    sends the module to the base: the method is made for models of *one* task, whose differences are noise.

    References: arXiv 2403.19522, equation 6 and appendix for T > 2. Deviations: t is at least 0, where opposed changes
    would make it negative or divide by 0; one adapter is itself. It has no weights, so unequal ones are refused.

    Raises:
        DpmergeError: DPM-103 for unequal weights.
    """
    fix = "leave weights out, or choose karcher or average"
    refuse_unequal_weights(recipe, "model-stock as published has none", fix)

    def rule(_: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        ratio = interpolation_ratio(cosines(gram(factors)))
        return weighted_module(factors, [ratio / len(factors)] * len(factors), recipe.rank)

    return per_module(modules, rule, recipe.factor)


MODEL_STOCK = MergeMethod(
    name="model-stock",
    summary="The average, shortened by how much the parties disagree.",
    source="2403.19522",
    function=model_stock,
    laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
    takes={RANK: None},
)


def karcher_mean(inner: Tensor, weights: Tensor) -> Tensor | None:
    """Return the coefficients c of the Karcher mean Σ c_t u_t of unit vectors, or None if they cancel out.

    Args:
        inner: ⟨u_t, u_s⟩, float64 [T, T].
        weights: At least 0, summing to 1, [T].

    >>> karcher_mean(torch.eye(2, dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)).tolist()
    [0.707..., 0.707...]
    """
    length = _length(weights, inner)
    if length < FLAT:
        return None
    point = weights / length
    for _ in range(MAX_STEPS):
        cosine = (inner @ point).clamp(-1, 1)
        pull = weights * _angle_over_sine(cosine)
        tangent = pull - (pull @ cosine) * point
        step = _length(tangent, inner)
        if step < TOLERANCE:
            break
        moved = torch.cos(step) * point + torch.sin(step) / step * tangent
        point = moved / _length(moved, inner)
    return point


def interpolation_ratio(cosine: Tensor) -> float:
    """Return t in [0, 1] from the matrix of cosines [T, T].

    >>> interpolation_ratio(Tensor([[1.0, 0.5], [0.5, 1.0]]))
    0.6666666666666666
    """
    parties = len(cosine)
    if parties == 1:
        return 1.0
    mean = max(float(cosine.sum() - cosine.diagonal().sum()) / (parties * (parties - 1)), 0.0)
    return parties * mean / (1 + (parties - 1) * mean)


def _great_circle(inner: Tensor, weights: Tensor) -> Tensor | None:
    angle = torch.acos(inner[0, -1].clamp(-1, 1))
    if angle < FLAT:
        return weights
    if torch.pi - angle < FLAT:
        return None
    return torch.sin(weights * angle) / torch.sin(angle)


def _on_sphere(modules: Modules, recipe: Recipe, mean: Mean) -> Combined:
    given = shares(recipe.weights)

    def rule(_: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        inner = gram(factors)
        weights = inner.new_tensor(given)
        lengths = inner.diagonal().clamp(min=0).sqrt()
        moved = (lengths > 0) & (weights > 0)
        coefficients = weights.clone()
        if moved.any():
            kept = weights[moved] / weights[moved].sum()
            point = mean(cosines(inner[moved][:, moved]), kept)
            if point is not None:
                coefficients[moved] = (weights @ lengths) * point / lengths[moved]
        return weighted_module(factors, coefficients.tolist(), recipe.rank)

    return per_module(modules, rule, recipe.factor)


def _length(coefficients: Tensor, inner: Tensor) -> Tensor:
    return (coefficients @ inner @ coefficients).clamp(min=0).sqrt()


def _angle_over_sine(cosine: Tensor) -> Tensor:
    """Return θ / sin θ: 1 where θ is 0; 0 opposite to the point, from where no direction is the shortest."""
    sine = (1 - cosine.square()).clamp(min=0).sqrt()
    ratio = torch.acos(cosine) / sine.clamp(min=TOLERANCE)
    return torch.where(sine > FLAT, ratio, torch.where(cosine > 0, 1.0, 0.0))


METHODS = (SLERP, KARCHER, MODEL_STOCK)
