"""Element-wise methods on the full weight change: TIES in its three published forms, DARE, and both together.

A module's matrices are built one at a time and dropped again, so memory is a few matrices of one module however many
parties and modules there are. The merged matrix goes back to factors; what the rank leaves out is reported.
"""

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.deltas import Factors, Modules
from dpmerge.server.merging.lowrank import factorise
from dpmerge.server.merging.recipe import Combined, Recipe, per_module

Sparsify = Callable[[str, int, Tensor], Tensor]
"""(module, index of the party, its full matrix) → the matrix with entries dropped."""


def ties(modules: Modules, recipe: Recipe) -> Combined:
    """Trim small entries, elect a sign per entry, average the entries that agree with it; times the coefficient.

    | semantics  | trims over      | elects by      | divides by          | tied election |
    |------------|-----------------|----------------|---------------------|---------------|
    | `paper`    | the whole model | Σ τ            | count of agreeing   | 0             |
    | `peft`     | each module     | Σ τ            | count of agreeing   | positive      |
    | `mergekit` | each module     | Σ w τ          | Σ w of agreeing     | positive      |

    References: arXiv 2306.01708, algorithm 1; PEFT 0.21 `merge_utils.ties`; mergekit 0.1.5's task arithmetic.

    Deviations: at least one entry is kept (PEFT keeps none when density · n < 1). The paper has no weights, so unequal
    ones are refused under its name. Entries equal to its threshold are all kept, so that their order does not matter.
    """
    if recipe.semantics == "paper":
        thresholds = [_threshold(modules, party, recipe.density) for party in range(len(recipe.weights))]
        return _elementwise(modules, recipe, lambda _, t, delta: torch.where(delta.abs() >= thresholds[t], delta, 0.0))
    return _elementwise(modules, recipe, lambda _, t, delta: trim(delta, recipe.density))


def dare(modules: Modules, recipe: Recipe) -> Combined:
    """Drop entries at random, rescale the rest by 1/density, and sum: coefficient · Σ w_t τ̂_t, unbiased.

    References: arXiv 2311.03099, section 3.1. Deviations: none.
    """

    def rule(name: str, factors: tuple[Factors, ...]) -> tuple[Factors, float]:
        total = torch.zeros(len(factors[0].b), factors[0].a.shape[1])
        for t, item in enumerate(factors):
            total += recipe.factor * recipe.weights[t] * _drop(name, t, item.delta(), recipe)
        return factorise(total, _rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


def dare_ties(modules: Modules, recipe: Recipe) -> Combined:
    """Drop and rescale as `dare`, then elect signs and average as `ties`.

    References: arXiv 2311.03099, section 4.1. Deviations: none.
    """
    return _elementwise(modules, recipe, lambda name, t, delta: _drop(name, t, delta, recipe))


def elected_mean(matrices: Callable[[], Iterable[Tensor]], recipe: Recipe) -> Tensor:
    """Elect a sign per entry and average the entries that agree with it.

    Args:
        matrices: Yields every party's sparse matrix, in order; called twice, so that one matrix at a time is enough.
        recipe: Weights and semantics, as in `ties`.
    """
    weights = _weights(recipe)
    votes = weights if recipe.semantics == "mergekit" else [1.0] * len(weights)
    ballot = _total(vote * matrix for vote, matrix in zip(votes, matrices(), strict=True))
    elected = torch.sign(ballot) if recipe.semantics == "paper" else torch.where(ballot >= 0, 1.0, -1.0)
    total, divisor = torch.zeros_like(ballot), torch.zeros_like(ballot)
    for weight, vote, matrix in zip(weights, votes, matrices(), strict=True):
        agrees = (torch.sign(vote * matrix) == elected) & (matrix != 0)
        total += torch.where(agrees, weight * matrix, 0.0)
        divisor += torch.where(agrees, vote, 0.0)
    return total / torch.where(divisor == 0, 1.0, divisor)


def trim(matrix: Tensor, density: float) -> Tensor:
    """Keep the share `density` of the entries, largest magnitudes first, and at least one.

    >>> trim(torch.tensor([[1.0, -3.0], [2.0, 0.5]]), 0.5)
    tensor([[ 0., -3.],
            [ 2.,  0.]])
    """
    count = max(1, int(density * matrix.numel()))
    kept = matrix.abs().flatten().topk(count).indices
    return torch.zeros_like(matrix).flatten().index_copy_(0, kept, matrix.flatten()[kept]).view_as(matrix)


def _elementwise(modules: Modules, recipe: Recipe, sparsify: Sparsify) -> Combined:
    def rule(name: str, factors: tuple[Factors, ...]) -> tuple[Factors, float]:
        def matrices() -> Iterable[Tensor]:
            return (sparsify(name, t, item.delta()) for t, item in enumerate(factors))

        return factorise(recipe.factor * elected_mean(matrices, recipe), _rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


def _rank(factors: tuple[Factors, ...], recipe: Recipe) -> int:
    full = min(len(factors[0].b), factors[0].a.shape[1])
    return min(recipe.rank or sum(item.rank for item in factors), full)


def _weights(recipe: Recipe) -> tuple[float, ...]:
    if recipe.semantics != "paper":
        return recipe.weights
    if len(set(recipe.weights)) > 1:
        problem = f"weights {list(recipe.weights)} differ, and TIES as published has none"
        raise DpmergeError("DPM-103", problem, "leave weights out, or choose semantics peft or mergekit")
    return (1.0,) * len(recipe.weights)


def _total(matrices: Iterable[Tensor]) -> Tensor:
    iterator = iter(matrices)
    total = next(iterator).clone()
    for matrix in iterator:
        total += matrix
    return total


def _threshold(modules: Modules, party: int, density: float) -> float:
    """Return the magnitude that the share `density` of a party's entries over all modules reach.

    Non-negative floats order as their bit patterns do, so two counting passes (upper, then lower 16 bits) select the
    k-th largest exactly, without holding more than one module's matrix.
    """
    size = sum(len(factors[0].b) * factors[0].a.shape[1] for factors in modules.values())
    remaining = max(1, int(density * size))
    upper = torch.zeros(1 << 16, dtype=torch.int64)
    for factors in modules.values():
        upper += torch.bincount(_bits(factors[party]) >> 16, minlength=1 << 16)
    bucket, remaining = _kth_largest(upper, remaining)
    lower = torch.zeros(1 << 16, dtype=torch.int64)
    for factors in modules.values():
        bits = _bits(factors[party])
        lower += torch.bincount(bits[bits >> 16 == bucket] & 0xFFFF, minlength=1 << 16)
    word, _ = _kth_largest(lower, remaining)
    return float(torch.tensor((bucket << 16) | word, dtype=torch.int32).view(torch.float32))


def _bits(factors: Factors) -> Tensor:
    return factors.delta().abs().view(torch.int32).flatten()


def _kth_largest(counts: Tensor, k: int) -> tuple[int, int]:
    """Return the bin of the k-th largest item, and its place among that bin's items, counted from the largest."""
    above = counts.flip(0).cumsum(0)
    index = int(torch.searchsorted(above, k))
    return len(counts) - 1 - index, k - int(above[index] - counts.flip(0)[index])


def _drop(name: str, party: int, delta: Tensor, recipe: Recipe) -> Tensor:
    """Keep entries with probability `density`, rescaled; the mask depends on seed, module and party's name only."""
    word = hashlib.sha256(f"{recipe.seed}|{name}|{recipe.parties[party]}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(word, "little") >> 1)
    kept = torch.rand(delta.shape, generator=generator) < recipe.density
    return torch.where(kept, delta / recipe.density, 0.0)
