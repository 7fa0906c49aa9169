"""Model Stock: how far to trust the average, read off the angle between the parties' weight changes."""

from torch import Tensor

from dpmerge.server.merging.adapters.deltas import Factors, Modules
from dpmerge.server.merging.low_rank.algebra import gram
from dpmerge.server.merging.methods.geometry import cosines
from dpmerge.server.merging.methods.linear import weighted_module
from dpmerge.server.merging.methods.recipe import Combined, Recipe, per_module, refuse_unequal_weights


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

    def rule(_: str, factors: tuple[Factors, ...]) -> tuple[Factors, float]:
        ratio = interpolation_ratio(cosines(gram(factors)))
        return weighted_module(factors, [ratio / len(factors)] * len(factors), recipe.rank)

    return per_module(modules, rule, recipe.factor)


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
