"""Element-wise methods on the full weight change: TIES in its three published forms, DARE, DELLA and Breadcrumbs.

A module's matrices are built a few rows at a time, of all parties, and dropped again: memory is the merged matrix and
the factors of one module, and what is worked on stays in the processor's cache. The merged matrix goes back to factors;
what the rank leaves out is reported.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpmerge.server.merging.adapters.deltas import LowRankDelta, Modules
from dpmerge.server.merging.low_rank.algebra import factorise
from dpmerge.server.merging.low_rank.strips import Cut, by_strips, rows_at_once, thresholds
from dpmerge.server.merging.methods.parameter import COEFFICIENT, DENSITY, RANK, SEMANTICS, Parameter, Range
from dpmerge.server.merging.methods.recipe import (
    Combined,
    MergeMethod,
    Recipe,
    per_module,
    refuse_unequal_weights,
    result_rank,
    total_of,
)

Sparsify = Callable[[str, int, LowRankDelta], Cut]
"""(module, index of the party, its factors) → what drops entries there."""

SPREAD = Parameter(
    name="spread",
    kind=float,
    about="How far della's probabilities vary with magnitude.",
    example=0.2,
    range=Range(low=0.0, high=1.0),
)
OUTLIERS = Parameter(
    name="outliers",
    kind=float,
    about="Share of the largest entries that breadcrumbs drops.",
    example=0.01,
    range=Range(low=0.0, high=1.0, open_high=True),
)


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
    if recipe[SEMANTICS] == "paper":
        least = thresholds(modules, len(recipe.weights), recipe[DENSITY])
        return _elementwise(modules, recipe, lambda _, t, __: _at_least(least[t]))

    def rule(_: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        return factorise(trimmed_mean(factors, recipe).mul_(recipe.factor), result_rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


TIES = MergeMethod(
    name="ties",
    summary="Trim small entries, elect signs, average what agrees.",
    source="2306.01708",
    function=ties,
    laws=frozenset({"identity", "idempotent", "factor-free"}),
    takes={COEFFICIENT: 1.0, DENSITY: 0.2, SEMANTICS: "paper", RANK: None},
    whole_model=True,
)


def dare(modules: Modules, recipe: Recipe) -> Combined:
    """Drop entries at random, rescale the rest by 1/density, and sum: coefficient · Σ w_t τ̂_t, unbiased.

    References: arXiv 2311.03099, section 3.1. Deviations: none.
    """
    return _summed(modules, recipe, lambda name, t, _: _sampled(name, t, lambda __: recipe[DENSITY], recipe))


DARE = MergeMethod(
    name="dare",
    summary="Drop entries at random, rescale the rest, sum.",
    source="2311.03099",
    function=dare,
    laws=frozenset({"identity", "factor-free"}),
    takes={COEFFICIENT: 1.0, DENSITY: 0.5, RANK: None},
    limit=({"density": 1.0}, "task-arithmetic"),
)


def dare_ties(modules: Modules, recipe: Recipe) -> Combined:
    """Drop and rescale as `dare`, then elect signs and average as `ties`.

    References: arXiv 2311.03099, section 4.1. Deviations: none.
    """
    return _elementwise(modules, recipe, lambda name, t, _: _sampled(name, t, lambda __: recipe[DENSITY], recipe))


DARE_TIES = MergeMethod(
    name="dare-ties",
    summary="Drop entries at random, rescale, then elect signs and average what agrees.",
    source="2311.03099",
    function=dare_ties,
    laws=frozenset({"identity", "factor-free"}),
    takes={COEFFICIENT: 1.0, DENSITY: 0.5, SEMANTICS: "paper", RANK: None},
    limit=({"density": 1.0}, "ties"),
)


def della(modules: Modules, recipe: Recipe) -> Combined:
    """Drop entries at random, small ones more often, rescale by 1/probability, then elect signs and average.

    References: arXiv 2406.11617, section 3 (MAGPRUNE, elect, fuse). Deviations: the range of the probabilities is
    stated as a share of the room around the density, so that none can leave [0, 1]; see `keep_probabilities`.
    """

    def chances(rows: Tensor) -> Tensor:
        return keep_probabilities(rows, recipe[DENSITY], recipe[SPREAD])

    return _elementwise(modules, recipe, lambda name, t, _: _sampled(name, t, chances, recipe))


DELLA = MergeMethod(
    name="della",
    summary="Drop small entries more often than large ones, rescale, elect signs, average.",
    source="2406.11617",
    function=della,
    laws=frozenset({"identity", "factor-free"}),
    takes={COEFFICIENT: 1.0, DENSITY: 0.5, SPREAD: 0.2, SEMANTICS: "paper", RANK: None},
    limit=({"density": 1.0}, "ties"),
)


def breadcrumbs(modules: Modules, recipe: Recipe) -> Combined:
    """Drop each module's largest entries as outliers and its small ones as noise, and sum: coefficient · Σ w_t τ̂_t.

    References: arXiv 2312.06795, section 3.2; mergekit's `magnitude_outliers`. Deviations: at least one entry is kept,
    and where no outlier is dropped none of the others is either (mergekit returns zeros when int(outliers · n) = 0).
    """

    def sparsify(_: str, __: int, item: LowRankDelta) -> Cut:
        rows = iter(torch.split(middle(item.delta(), recipe[DENSITY], recipe[OUTLIERS]), rows_at_once(item)))
        return lambda _: next(rows)

    return _summed(modules, recipe, sparsify)


BREADCRUMBS = MergeMethod(
    name="breadcrumbs",
    summary="Drop the largest and the small entries, sum the rest.",
    source="2312.06795",
    function=breadcrumbs,
    laws=frozenset({"identity", "factor-free"}),
    takes={COEFFICIENT: 1.0, DENSITY: 0.1, OUTLIERS: 0.01, RANK: None},
    limit=({"density": 1.0}, "task-arithmetic"),
)


def elected_mean(matrices: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """Elect a sign per entry and average the entries that agree with it.

    Args:
        matrices: Every party's sparse matrix, or the same rows of it.
        recipe: Weights and semantics, as in `ties`.
    """
    weights = _weights(recipe)
    votes = weights if recipe[SEMANTICS] == "mergekit" else [1.0] * len(weights)
    worth = weights if recipe[SEMANTICS] == "peft" else [1.0] * len(weights)
    elected = total_of(vote * matrix for vote, matrix in zip(votes, matrices, strict=True)).sign_()
    if recipe[SEMANTICS] != "paper":
        elected.add_(0.5).sign_()  # a tied election is positive
    total, divisor = torch.zeros_like(elected), torch.zeros_like(elected)
    for vote, alpha, matrix in zip(votes, worth, matrices, strict=True):
        agreeing = (vote * matrix).mul_(elected).clamp_(min=0)  # a few times faster than masks
        total.add_(agreeing, alpha=alpha)
        divisor.add_(agreeing.sign_(), alpha=vote)
    return total.mul_(elected).div_(divisor.add_(divisor == 0))


def trimmed_mean(factors: Sequence[LowRankDelta], recipe: Recipe) -> Tensor:
    """Trim every party's matrix by itself, elect signs and average what agrees: TIES of one module, [out, in].

    Entries equal to the last that is kept are kept too; so at least one is.

    Args:
        factors: Every party's change of one module, [out, in].
        recipe: Density, semantics and weights.

    >>> item = LowRankDelta(torch.eye(2), torch.tensor([[1.0, -3.0], [2.0, 0.5]]))
    >>> trimmed_mean([item], Recipe(parties=("shop",), weights=(1.0,), parameters={"density": 0.5}))
    tensor([[ 0., -3.],
            [ 2.,  0.]])
    """
    cuts = [_at_least(*thresholds({"": (item,)}, 1, recipe[DENSITY])) for item in factors]
    return by_strips(factors, cuts, lambda parts: elected_mean(parts, recipe))


def middle(matrix: Tensor, density: float, outliers: float) -> Tensor:
    """Drop the share `outliers` of the largest entries, then keep the share `density`, and at least one.

    Fewer outliers are dropped where the density asks for their places.

    Args:
        matrix: [out, in].
        density: Share to keep, in (0, 1].
        outliers: Share to drop, in [0, 1).

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

    Args:
        matrix: [out, in].
        density: Mean of the probabilities, in (0, 1].
        spread: Share of the room around the density, in [0, 1].

    >>> keep_probabilities(torch.tensor([[1.0, -3.0, 2.0]]), 0.5, 0.5).tolist()
    [[0.25, 0.75, 0.5]]
    """
    width = matrix.shape[1]
    half = spread * min(density, 1 - density)
    order = matrix.abs().argsort(dim=1, stable=True)
    steps = torch.linspace(density - half, density + half, width) if width > 1 else torch.tensor([density])
    return torch.empty_like(matrix).scatter_(1, order, steps.expand_as(matrix))


def _summed(modules: Modules, recipe: Recipe, sparsify: Sparsify) -> Combined:
    def combine(parts: list[Tensor]) -> Tensor:
        return total_of(recipe.factor * weight * part for weight, part in zip(recipe.weights, parts, strict=True))

    def rule(name: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        cuts = [sparsify(name, t, item) for t, item in enumerate(factors)]
        return factorise(by_strips(factors, cuts, combine), result_rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


def _elementwise(modules: Modules, recipe: Recipe, sparsify: Sparsify) -> Combined:
    def rule(name: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        cuts = [sparsify(name, t, item) for t, item in enumerate(factors)]
        merged = by_strips(factors, cuts, lambda parts: recipe.factor * elected_mean(parts, recipe))
        return factorise(merged, result_rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


def _weights(recipe: Recipe) -> tuple[float, ...]:
    if recipe[SEMANTICS] != "paper":
        return recipe.weights
    fix = "leave weights out, or choose semantics peft or mergekit"
    refuse_unequal_weights(recipe, "TIES as published has none", fix)
    return (1.0,) * len(recipe.weights)


def _at_least(threshold: float) -> Cut:
    below = torch.nextafter(torch.tensor(threshold), torch.tensor(0.0)).item()
    return lambda rows: torch.nn.functional.hardshrink(rows, below)  # keeps what is larger; faster than torch.where


def _sampled(name: str, party: int, keep: Callable[[Tensor], Tensor | float], recipe: Recipe) -> Cut:
    """Keep entries with a probability, rescaled; the mask depends on seed, module and party's name only."""
    word = hashlib.sha256(f"{recipe.seed}|{name}|{recipe.parties[party]}".encode()).digest()[:8]
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(word, "little") >> 1)

    def cut(rows: Tensor) -> Tensor:
        chance = torch.rand(rows.shape, generator=generator, device="cpu").to(rows.device)  # one mask on every device
        kept = keep(rows)
        return (rows / kept).mul_(chance < kept)

    return cut


METHODS = (TIES, DARE, DARE_TIES, DELLA, BREADCRUMBS)
