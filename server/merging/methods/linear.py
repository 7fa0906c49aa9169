"""Linear methods: weighted sums of weight changes, exact in the factors.

None of them ever adds factors of different parties to each other, (Σ B)(Σ A), which would bring in cross terms B_t A_s.
"""

from collections.abc import Sequence
from dataclasses import replace

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import Factors, Modules
from dpmerge.server.merging.low_rank.algebra import scaled, stack, truncate, weighted_sum
from dpmerge.server.merging.methods.recipe import Combined, Recipe, per_module


def average(modules: Modules, recipe: Recipe) -> Combined:
    """Return Σ w_t τ_t / Σ w_t.

    Raises:
        DpmergeError: DPM-103 when a weight is negative or all are 0.
    """
    return weighted(modules, shares(recipe.weights), recipe.rank, 1.0)


def task_arithmetic(modules: Modules, recipe: Recipe) -> Combined:
    """Return coefficient · Σ w_t τ_t.

    References: arXiv 2212.04089, section 2. Deviations: none.
    """
    return weighted(modules, recipe.weights, recipe.rank, recipe.factor)


def concat(modules: Modules, recipe: Recipe) -> Combined:
    """Return coefficient · Σ w_t τ_t as stacked factors, of rank Σ r_t unless another is asked for."""
    weights = [recipe.factor * weight for weight in recipe.weights]

    def rule(_: str, factors: tuple[Factors, ...]) -> tuple[Factors, float]:
        pieces = ((item.a, scaled(item.b, w * item.scaling)) for item, w in zip(factors, weights, strict=True))
        stacked = stack(pieces, *factors[0].shape, sum(item.rank for item in factors))
        return truncate(stacked, recipe.rank or stacked.rank)

    return replace(per_module(modules, rule, recipe.factor), weights=tuple(weights))


def weighted(modules: Modules, weights: Sequence[float], rank: int | None, coefficient: float) -> Combined:
    """Return coefficient · Σ weights_t τ_t at a rank, or at the lowest exact one that needs no decomposition."""
    total = [coefficient * weight for weight in weights]

    def rule(_: str, factors: tuple[Factors, ...]) -> tuple[Factors, float]:
        return weighted_module(factors, total, rank)

    return replace(per_module(modules, rule, coefficient), weights=tuple(total))


def weighted_module(factors: Sequence[Factors], weights: Sequence[float], rank: int | None) -> tuple[Factors, float]:
    """Return one module's Σ weights_t τ_t at a rank or the lowest exact one, and the norm of what is left out."""
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
