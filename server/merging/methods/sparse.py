"""Element-wise methods on the full weight change: TIES in its three published forms, DARE, DELLA and Breadcrumbs.

A module's matrices are built a few rows at a time, of all parties, and dropped again: memory is the merged matrix and
the factors of one module, and what is worked on stays in the processor's cache. The merged matrix goes back to factors;
what the rank leaves out is reported.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from dpmerge.server.merging.adapters.deltas import Factors, Modules
from dpmerge.server.merging.low_rank.algebra import factorise
from dpmerge.server.merging.methods.recipe import Combined, Recipe, per_module, refuse_unequal_weights

Cut = Callable[[Tensor], Tensor]
"""Rows of a party's full matrix → the same with entries dropped; is given all rows once, in order."""

Sparsify = Callable[[str, int, Factors], Cut]
"""(module, index of the party, its factors) → what drops entries there."""

STRIP = 1 << 17
"""Entries of a full matrix that are built at a time."""


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
        thresholds = _thresholds(modules, len(recipe.weights), recipe.density)
        return _elementwise(modules, recipe, lambda _, t, __: _at_least(thresholds[t]))

    def rule(_: str, factors: tuple[Factors, ...]) -> tuple[Factors, float]:
        return factorise(trimmed_mean(factors, recipe).mul_(recipe.factor), result_rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


def dare(modules: Modules, recipe: Recipe) -> Combined:
    """Drop entries at random, rescale the rest by 1/density, and sum: coefficient · Σ w_t τ̂_t, unbiased.

    References: arXiv 2311.03099, section 3.1. Deviations: none.
    """
    return _summed(modules, recipe, lambda name, t, _: _sampled(name, t, lambda __: recipe.density, recipe))


def dare_ties(modules: Modules, recipe: Recipe) -> Combined:
    """Drop and rescale as `dare`, then elect signs and average as `ties`.

    References: arXiv 2311.03099, section 4.1. Deviations: none.
    """
    return _elementwise(modules, recipe, lambda name, t, _: _sampled(name, t, lambda __: recipe.density, recipe))


def della(modules: Modules, recipe: Recipe) -> Combined:
    """Drop entries at random, small ones more often, rescale by 1/probability, then elect signs and average.

    References: arXiv 2406.11617, section 3 (MAGPRUNE, elect, fuse). Deviations: the range of the probabilities is
    stated as a share of the room around the density, so that none can leave [0, 1]; see `keep_probabilities`.
    """

    def chances(rows: Tensor) -> Tensor:
        return keep_probabilities(rows, recipe.density, recipe.spread)

    return _elementwise(modules, recipe, lambda name, t, _: _sampled(name, t, chances, recipe))


def breadcrumbs(modules: Modules, recipe: Recipe) -> Combined:
    """Drop each module's largest entries as outliers and its small ones as noise, and sum: coefficient · Σ w_t τ̂_t.

    References: arXiv 2312.06795, section 3.2; mergekit's `magnitude_outliers`. Deviations: at least one entry is kept,
    and where no outlier is dropped none of the others is either (mergekit returns zeros when int(outliers · n) = 0).
    """

    def sparsify(_: str, __: int, item: Factors) -> Cut:
        rows = iter(torch.split(middle(item.delta(), recipe.density, recipe.outliers), rows_at_once(item)))
        return lambda _: next(rows)

    return _summed(modules, recipe, sparsify)


def elected_mean(matrices: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """Elect a sign per entry and average the entries that agree with it.

    Args:
        matrices: Every party's sparse matrix, or the same rows of it.
        recipe: Weights and semantics, as in `ties`.
    """
    weights = _weights(recipe)
    votes = weights if recipe.semantics == "mergekit" else [1.0] * len(weights)
    worth = weights if recipe.semantics == "peft" else [1.0] * len(weights)
    elected = total_of(vote * matrix for vote, matrix in zip(votes, matrices, strict=True)).sign_()
    if recipe.semantics != "paper":
        elected.add_(0.5).sign_()  # a tied election is positive
    total, divisor = torch.zeros_like(elected), torch.zeros_like(elected)
    for vote, alpha, matrix in zip(votes, worth, matrices, strict=True):
        agreeing = (vote * matrix).mul_(elected).clamp_(min=0)  # a few times faster than masks
        total.add_(agreeing, alpha=alpha)
        divisor.add_(agreeing.sign_(), alpha=vote)
    return total.mul_(elected).div_(divisor.add_(divisor == 0))


def trimmed_mean(factors: Sequence[Factors], recipe: Recipe) -> Tensor:
    """Trim every party's matrix by itself, elect signs and average what agrees: TIES of one module, [out, in].

    Entries equal to the last that is kept are kept too; so at least one is.

    >>> item = Factors(torch.eye(2), torch.tensor([[1.0, -3.0], [2.0, 0.5]]))
    >>> trimmed_mean([item], Recipe(parties=("shop",), weights=(1.0,), density=0.5))
    tensor([[ 0., -3.],
            [ 2.,  0.]])
    """
    cuts = [_at_least(*_thresholds({"": (item,)}, 1, recipe.density)) for item in factors]
    return _by_strips(factors, cuts, lambda parts: elected_mean(parts, recipe))


def middle(matrix: Tensor, density: float, outliers: float) -> Tensor:
    """Drop the share `outliers` of the largest entries, then keep the share `density`, and at least one.

    Fewer outliers are dropped where the density asks for their places.

    >>> middle(torch.tensor([[1.0, -3.0], [2.0, 0.5]]), 0.5, 0.25)
    tensor([[1., 0.],
            [2., 0.]])
    """
    size = matrix.numel()
    kept = max(1, int(density * size))
    dropped = min(int(outliers * size), size - kept)
    places = matrix.abs().flatten().topk(kept + dropped).indices[dropped:]
    return torch.zeros_like(matrix).flatten().index_copy_(0, places, matrix.flatten()[places]).view_as(matrix)


def keep_probabilities(matrix: Tensor, density: float, spread: float) -> Tensor:
    """Return a probability per entry that rises evenly with the entry's rank by magnitude within its row.

    It runs from density - h to density + h with h = spread · min(density, 1 - density), so its mean is the density.

    >>> keep_probabilities(torch.tensor([[1.0, -3.0, 2.0]]), 0.5, 0.5).tolist()
    [[0.25, 0.75, 0.5]]
    """
    width = matrix.shape[1]
    half = spread * min(density, 1 - density)
    order = matrix.abs().argsort(dim=1, stable=True)
    steps = torch.linspace(density - half, density + half, width) if width > 1 else torch.tensor([density])
    return torch.empty_like(matrix).scatter_(1, order, steps.expand_as(matrix))


def strips(item: Factors) -> Iterator[Tensor]:
    """Yield the full weight change in fp32, a few rows at a time: the same rows, so the same bits, each time."""
    a, b = item.a.float(), item.b.float() * item.scaling
    return (rows @ a for rows in torch.split(b, rows_at_once(item)))


def rows_at_once(item: Factors) -> int:
    """Return how many rows a strip has."""
    return max(1, STRIP // item.shape[1])


def _summed(modules: Modules, recipe: Recipe, sparsify: Sparsify) -> Combined:
    def combine(parts: list[Tensor]) -> Tensor:
        return total_of(recipe.factor * weight * part for weight, part in zip(recipe.weights, parts, strict=True))

    def rule(name: str, factors: tuple[Factors, ...]) -> tuple[Factors, float]:
        cuts = [sparsify(name, t, item) for t, item in enumerate(factors)]
        return factorise(_by_strips(factors, cuts, combine), result_rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


def _elementwise(modules: Modules, recipe: Recipe, sparsify: Sparsify) -> Combined:
    def rule(name: str, factors: tuple[Factors, ...]) -> tuple[Factors, float]:
        cuts = [sparsify(name, t, item) for t, item in enumerate(factors)]
        merged = _by_strips(factors, cuts, lambda parts: recipe.factor * elected_mean(parts, recipe))
        return factorise(merged, result_rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


def _by_strips(factors: Sequence[Factors], cuts: Sequence[Cut], combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Return the merged matrix: of a few rows of every party's, with entries dropped, the same rows merged."""
    merged = torch.empty(factors[0].shape, device=factors[0].device)
    rows = torch.split(merged, rows_at_once(factors[0]))
    for target, parts in zip(rows, zip(*map(strips, factors), strict=True), strict=True):
        target.copy_(combine([cut(part) for cut, part in zip(cuts, parts, strict=True)]))
    return merged


def result_rank(factors: tuple[Factors, ...], recipe: Recipe) -> int:
    """Return the rank asked for, or else the sum of the inputs' ranks, as far as the matrix goes."""
    full = min(factors[0].shape)
    return min(recipe.rank or sum(item.rank for item in factors), full)


def _weights(recipe: Recipe) -> tuple[float, ...]:
    if recipe.semantics != "paper":
        return recipe.weights
    fix = "leave weights out, or choose semantics peft or mergekit"
    refuse_unequal_weights(recipe, "TIES as published has none", fix)
    return (1.0,) * len(recipe.weights)


def total_of(matrices: Iterable[Tensor]) -> Tensor:
    """Return the sum of matrices that are never held together."""
    iterator = iter(matrices)
    total = next(iterator).clone()
    for matrix in iterator:
        total += matrix
    return total


def _thresholds(modules: Modules, num_parties: int, density: float) -> list[float]:
    """Return, per party, the magnitude that the share `density` of its entries over all modules reach.

    Non-negative floats order as their bit patterns do, so two counting passes (upper, then lower 16 bits) select the
    k-th largest exactly, without holding more than one module's matrix.
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


def _at_least(threshold: float) -> Cut:
    below = torch.nextafter(torch.tensor(threshold), torch.tensor(0.0)).item()
    return lambda rows: torch.nn.functional.hardshrink(rows, below)  # keeps what is larger; faster than torch.where


def _bits(rows: Tensor) -> Tensor:
    return rows.abs().view(torch.int32).flatten()


def _kth_largest(counts: Tensor, k: int) -> tuple[int, int]:
    """Return the bin of the k-th largest item, and its place among that bin's items, counted from the largest."""
    above = counts.flip(0).cumsum(0)
    index = int(torch.searchsorted(above, k))
    return len(counts) - 1 - index, k - int(above[index] - counts.flip(0)[index])


def _sampled(name: str, party: int, keep: Callable[[Tensor], Tensor | float], recipe: Recipe) -> Cut:
    """Keep entries with a probability, rescaled; the mask depends on seed, module and party's name only."""
    word = hashlib.sha256(f"{recipe.seed}|{name}|{recipe.parties[party]}".encode()).digest()[:8]
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(word, "little") >> 1)

    def cut(rows: Tensor) -> Tensor:
        chance = torch.rand(rows.shape, generator=generator, device="cpu").to(rows.device)  # one mask on every device
        kept = keep(rows)
        return (rows / kept).mul_(chance < kept)

    return cut
