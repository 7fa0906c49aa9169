"""Linear methods: weighted sums of weight changes, exact in the factors.

None of them ever adds factors of different parties to each other, (Σ B)(Σ A), which would bring in cross terms B_t A_s.
"""

from collections.abc import Sequence
from dataclasses import replace

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import LowRankDelta, Modules
from dpmerge.server.merging.low_rank.algebra import scaled, stack, truncate, weighted_sum
from dpmerge.server.merging.methods.parameter import COEFFICIENT, RANK
from dpmerge.server.merging.methods.recipe import REQUIRED, Combined, MergeMethod, Recipe, per_module


def average(modules: Modules, recipe: Recipe) -> Combined:
    """Return Σ w_t τ_t / Σ w_t.

    Raises:
        DpmergeError: DPM-103 when a weight is negative or all are 0.
    """
    return weighted(modules, shares(recipe.weights), recipe.rank, 1.0)


AVERAGE = MergeMethod(
    name="average",
    summary="Weighted mean of the weight changes.",
    source="2212.04089",
    function=average,
    laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
    takes={RANK: None},
    is_weighted_sum=True,
)


def task_arithmetic(modules: Modules, recipe: Recipe) -> Combined:
    """Return coefficient · Σ w_t τ_t.

    References: arXiv 2212.04089, section 2. Deviations: none.
    """
    return weighted(modules, recipe.weights, recipe.rank, recipe.factor)


TASK_ARITHMETIC = MergeMethod(
    name="task-arithmetic",
    summary="Stated coefficient times the weighted sum.",
    source="2212.04089",
    function=task_arithmetic,
    laws=frozenset({"identity", "additive", "cancels", "rotation-free", "factor-free"}),
    takes={COEFFICIENT: REQUIRED, RANK: None},
    is_weighted_sum=True,
)


def concat(modules: Modules, recipe: Recipe) -> Combined:
    """Return coefficient · Σ w_t τ_t as stacked factors, of rank Σ r_t unless another is asked for."""
    weights = [recipe.factor * weight for weight in recipe.weights]

    def rule(_: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        pieces = ((item.a, scaled(item.b, w * item.scaling)) for item, w in zip(factors, weights, strict=True))
        stacked = stack(pieces, *factors[0].shape, sum(item.rank for item in factors))
        return truncate(stacked, recipe.rank or stacked.rank)

    return replace(per_module(modules, rule, recipe.factor), weights=tuple(weights))


CONCAT = MergeMethod(
    name="concat",
    summary="The weighted sum as stacked factors, without any decomposition.",
    source="-",
    function=concat,
    laws=frozenset({"identity", "additive", "cancels", "rotation-free", "factor-free"}),
    takes={COEFFICIENT: 1.0, RANK: None},
    is_weighted_sum=True,
)


def weighted(modules: Modules, weights: Sequence[float], rank: int | None, coefficient: float) -> Combined:
    """Return coefficient · Σ weights_t τ_t at a rank, or at the lowest exact one that needs no decomposition.

    Args:
        modules: What to merge.
        weights: One number per party.
        rank: Of the result, or None for the lowest exact one.
        coefficient: Factor on the sum.
    """
    total = [coefficient * weight for weight in weights]

    def rule(_: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        return weighted_module(factors, total, rank)

    return replace(per_module(modules, rule, coefficient), weights=tuple(total))


def weighted_module(
    factors: Sequence[LowRankDelta], weights: Sequence[float], rank: int | None
) -> tuple[LowRankDelta, float]:
    """Return one module's Σ weights_t τ_t at a rank or the lowest exact one, and the norm of what is left out.

    Args:
        factors: Every party's change of one module.
        weights: One number per party.
        rank: Of the result, or None for the lowest exact one.
    """
    total = weighted_sum(factors, weights)
    return truncate(total, rank or total.rank)


def shares(weights: Sequence[float]) -> list[float]:
    """Scale weights of at least 0 to sum 1.

    >>> shares([1, 3])
    [0.25, 0.75]
    """
    total = sum(weights)
    if min(weights) < 0 or not 0 < total < float("inf"):
        problem = f"weights {list(weights)} are no shares of an average"
        raise DpmergeError("DPM-103", problem, "give weights of at least 0, not all 0; task-arithmetic takes any")
    return [weight / total for weight in weights]


METHODS = (AVERAGE, TASK_ARITHMETIC, CONCAT)
