"""Element-wise methods that weigh every party's entry against the other parties' in the same place: SCE and PCB.

As in `sparse`, a module's matrices are built one party at a time and dropped again: a few passes over the parties in
place of a stack of their matrices.
"""

import torch
from torch import Tensor

from dpmerge.server.merging.adapters.deltas import LowRankDelta, Modules
from dpmerge.server.merging.low_rank.algebra import factorise
from dpmerge.server.merging.methods.parameter import COEFFICIENT, DENSITY, RANK
from dpmerge.server.merging.methods.recipe import (
    Combined,
    MergeMethod,
    Recipe,
    per_module,
    refuse_unequal_weights,
    result_rank,
    total_of,
)

_OWN_WEIGHTS = "leave weights out, or choose a method that takes them"
CLAMPED = 1e-4  # share of the largest and of the smallest entries that PCB clamps
NO_VARIATION = 1e-12  # variance over mean square below which the parties differ by fp32 rounding only


def sce(modules: Modules, recipe: Recipe) -> Combined:
    """Select the entries in which parties vary most, weigh parties by the energy of theirs, erase minority signs.

    Per module: keep the share `density` of the entries that vary, largest variance across parties first; weigh each
    party by its mean square over these; average, entry by entry, the parties that have the sign of the sum.

    References: arXiv 2408.07990, section 3.3 (select, calculate, erase); mergekit's `sce`. Deviations: at least one
    entry is kept, and all of them where parties do not differ at all (mergekit returns zeros for identical adapters);
    nothing depends on the scale of the matrices (mergekit's guards of 1e-6 flatten the weights of small ones).
    """
    refuse_unequal_weights(recipe, "SCE as published makes its own", _OWN_WEIGHTS)

    def rule(_: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        unit = max(float(item.delta().abs().max()) for item in factors) or 1.0  # squares of tiny entries are no fp32
        mean = total_of(item.delta() / unit for item in factors) / len(factors)
        selected = _most_varied(factors, mean, unit, recipe[DENSITY])
        energies = [torch.where(selected, item.delta() / unit, 0.0).square().mean() for item in factors]
        total_energy = torch.stack(energies).sum()
        total, divisor = torch.zeros_like(mean), torch.zeros_like(mean)
        positive = mean >= 0
        for item, energy in zip(factors, energies, strict=True):
            share = energy / total_energy if total_energy > 0 else torch.tensor(1 / len(factors))
            delta = item.delta()
            agrees = selected & (delta != 0) & ((delta > 0) == positive)
            total += torch.where(agrees, share * delta, 0.0)
            divisor += torch.where(agrees, share, 0.0)
        merged = recipe.factor * total / torch.where(divisor == 0, 1.0, divisor)
        return factorise(merged, result_rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


SCE = MergeMethod(
    name="sce",
    summary="Select what varies, weigh parties by its energy, erase minority signs.",
    source="2408.07990",
    function=sce,
    laws=frozenset({"identity", "idempotent", "factor-free"}),
    takes={COEFFICIENT: 1.0, DENSITY: 0.1, RANK: None},
)


def pcb(modules: Modules, recipe: Recipe) -> Combined:
    """Score every entry by its own magnitude and its agreement with the sum, keep the best, average by the scores.

    Per module and party: exp(T · u²) · tanh(τ_t ∘ Σ_s τ_s), where u is |τ_t| scaled to [0, 1]; the share `density` of
    the highest scores, scaled to [0, 1], are the weights of an average entry by entry.

    References: arXiv 2410.02396, section 3; the authors' `PCB_merge`, whose tanh stands for the paper's softmax.
    Deviations: each module by itself in place of the flattened model; the largest and smallest 0.01 % of magnitudes are
    clamped by counting, so that small matrices lose none; the authors' search over coefficients is left to the caller.
    """
    refuse_unequal_weights(recipe, "PCB as published makes its own", _OWN_WEIGHTS)

    def rule(_: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        party_sum = total_of(item.delta() for item in factors)
        total, divisor = torch.zeros_like(party_sum), torch.zeros_like(party_sum)
        for item in factors:
            delta = item.delta()
            magnitude = _clamped(delta.abs())
            scores = pcb_weights(delta, magnitude, party_sum, len(factors), recipe[DENSITY])
            total += scores * magnitude.copysign(delta)
            divisor += scores
        merged = recipe.factor * total / torch.where(divisor == 0, 1.0, divisor)
        return factorise(merged, result_rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


PCB = MergeMethod(
    name="pcb",
    summary="Average by scores of an entry's size and its agreement with the sum.",
    source="2410.02396",
    function=pcb,
    laws=frozenset({"factor-free"}),
    takes={COEFFICIENT: 1.0, DENSITY: 0.1, RANK: None},
)


def pcb_weights(delta: Tensor, magnitude: Tensor, party_sum: Tensor, num_parties: int, density: float) -> Tensor:
    """Return PCB's weights in [0, 1] of one party's entries; those below the share `density` of the scores have 0.

    Args:
        delta: The party's matrix.
        magnitude: Its magnitudes, clamped.
        party_sum: The sum of all parties' matrices.
        num_parties: T.
        density: Share of entries to keep, in (0, 1].
    """
    inside = torch.exp(num_parties * (_unit_range(magnitude.double()).square() - 1))  # e^-T cancels in the range below
    scores = inside * torch.tanh(delta.double() * party_sum.double())
    kept = max(1, int(density * scores.numel()))
    least = scores.flatten().kthvalue(scores.numel() - kept + 1).values
    return _unit_range(scores.clamp(min=least)).float()


def _unit_range(values: Tensor) -> Tensor:
    """Scale values to [0, 1]; values that are all equal are all 1: none is less than another."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else torch.ones_like(values)


def _clamped(magnitude: Tensor) -> Tensor:
    outside = int(CLAMPED * magnitude.numel())
    if not outside:
        return magnitude
    ordered = magnitude.flatten().sort().values
    return magnitude.clamp(ordered[outside], ordered[-1 - outside])


def _most_varied(factors: tuple[LowRankDelta, ...], mean: Tensor, unit: float, density: float) -> Tensor:
    if density == 1:
        return torch.ones_like(mean, dtype=torch.bool)
    variance = total_of((item.delta() / unit - mean).square() for item in factors) / len(factors)
    variance = torch.where(variance > NO_VARIATION * mean.square(), variance, 0.0)
    varied = int((variance > 0).sum())
    if not varied:
        return torch.ones_like(mean, dtype=torch.bool)
    places = variance.flatten().topk(max(1, int(density * varied))).indices
    return torch.zeros_like(mean, dtype=torch.bool).flatten().index_fill_(0, places, True).view_as(mean)


METHODS = (SCE, PCB)
