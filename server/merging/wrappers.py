"""What can be put around any merge method: shared coordinates, a bound on one party's influence, factors per layer."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from dpmerge.common.config.sections import Robust
from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import LARGEST, LowRankDelta, Modules
from dpmerge.server.merging.adapters.patterns import PatternRefused, first_matches, matches
from dpmerge.server.merging.low_rank.algebra import gram, weighted_sum
from dpmerge.server.merging.low_rank.cores import stacked_bases
from dpmerge.server.merging.methods.geometry import overlaps, split, wiener_weights
from dpmerge.server.merging.methods.linear import shares
from dpmerge.server.merging.methods.recipe import Combined, Method, Recipe, per_module
from dpmerge.server.merging.noise.noise import Noise

MAX_STEPS = 1000
TOLERANCE = 1e-10  # change of a weight
NEAREST = 1e-9  # of the median distance: a party nearer than this to the median counts as this far


def in_core(method: Method, modules: Modules, recipe: Recipe, *, whole_model: bool) -> Combined:
    """Apply a method to the parties' coordinates M_t = Q_Bᵀ τ_t Q_A in place of τ_t, and lift what it returns.

    Q_B, Q_A are orthonormal bases of every module's stacked factors, so nothing is lost: methods that no rotation
    changes (sums, spectra, least squares) give what they give without it; element-wise ones see at most (T·r)² numbers
    that all parties fill, in place of [out, in].

    Args:
        method: Any rule.
        modules: As any method takes them.
        recipe: As the method takes it.
        whole_model: Whether the method must see all modules at once; otherwise one module's bases are held at a time.

    References: arXiv 2509.17786, section 3. Deviations: the stacked factors go through QR before their SVD.
    """

    def rule(name: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        bases = _bases(factors)
        combined = method({name: coordinates(*bases, factors)}, recipe)
        return _lifted(*bases, combined.modules[name]), combined.lost[name]

    if not whole_model:
        return per_module(modules, rule, recipe.factor)
    bases, cores = {}, {}
    for name, factors in modules.items():
        q_b, q_a = _bases(factors)
        cores[name] = coordinates(q_b, q_a, factors)
        bases[name] = q_b.float(), q_a.float()  # all modules' are held, and what is lifted is rounded to fp32 anyway
    combined = method(cores, recipe)
    lifted = {name: _lifted(*bases.pop(name), item).on("cpu") for name, item in combined.modules.items()}
    return replace(combined, modules=lifted)


def coordinates(q_b: Tensor, q_a: Tensor, factors: Sequence[LowRankDelta]) -> tuple[LowRankDelta, ...]:
    """Return every party's factors in orthonormal bases (columns): Q_Bᵀ b, a Q_A, in float64.

    Equal a's stay equal bit by bit, so that parties who share one are still seen to do so.

    Args:
        q_b: Orthonormal columns [out, k].
        q_a: Orthonormal columns [in, l].
        factors: Every party's change of one module, [out, in].
    """
    return tuple(LowRankDelta(item.a.double() @ q_a, q_b.T @ item.b.double(), item.scaling) for item in factors)


def party_norms(modules: Modules) -> list[float]:
    """Return every party's ‖τ_t‖ over the whole model, in one pass over the modules."""
    squares = [[max(float(gram([item])), 0.0) for item in factors] for factors in modules.values()]
    return [math.sqrt(math.fsum(column)) for column in zip(*squares, strict=True)]


def clipped(modules: Modules) -> tuple[Modules, dict[str, Any]]:
    """Shorten every party's whole weight change to the parties' median length, so that none outweighs the others.

    The median is the lower one of those that moved: of two parties, the longer becomes as long as the shorter.

    Returns:
        The modules, and an account: `bound` and a `factors` entry in (0, 1] per party.
    """
    norms = party_norms(modules)
    moved = [norm for norm in norms if norm > 0]
    bound = median_low(moved) if moved else 0.0
    factors = [bound / norm if norm > bound else 1.0 for norm in norms]
    return _Made(modules, lambda items: _scaled(items, factors)), {"rule": "clip", "bound": bound, "factors": factors}


def median_weights(inner: Tensor, weights: Sequence[float]) -> list[float]:
    """Return convex weights p with Σ p_t τ_t the geometric median: the point with the least Σ w_t ‖τ_t - m‖.

    Less than half of the weight, wherever it lies, moves this point by a bounded amount only. Weiszfeld's steps
    p_t ∝ w_t / ‖τ_t - m‖ need inner products alone, so they are exact over the whole model.

    Args:
        inner: ⟨τ_t, τ_s⟩ over all modules, float64 [T, T].
        weights: w_t, at least 0, not all 0.

    >>> line = torch.tensor([0.0, 1.0, 1e6], dtype=torch.float64)
    >>> [round(p, 6) for p in median_weights(torch.outer(line, line), [1, 1, 1])]
    [0.0, 1.0, 0.0]
    """
    given = torch.tensor(shares(weights), dtype=torch.float64)
    point = given
    for _ in range(MAX_STEPS):
        differences = torch.eye(len(given), dtype=torch.float64) - point
        distances = ((differences @ inner) * differences).sum(1).clamp(min=0).sqrt()
        floor = NEAREST * distances.median()
        if floor == 0:
            return point.tolist()  # most parties are the median already
        pulls = given / distances.clamp(min=floor)
        moved = pulls / pulls.sum()
        if float((moved - point).abs().max()) < TOLERANCE:
            return moved.tolist()
        point = moved
    return point.tolist()


def bounded(modules: Modules, recipe: Recipe, robust: Robust) -> tuple[Modules, Recipe, dict[str, Any]]:
    """Bound one party's influence: by its length, or by the geometric median's weights.

    Args:
        modules: What to merge.
        recipe: As the method would take it.
        robust: How.

    Returns:
        What the method gets in place of its modules and recipe, and an account of what was done.
    """
    if robust == "clip":
        modules, account = clipped(modules)
        return modules, recipe, account
    weights = [sum(recipe.weights) * share for share in median_weights(overlaps(modules).cpu(), recipe.weights)]
    return modules, replace(recipe, weights=tuple(weights)), {"rule": "median", "weights": weights}


def denoised(modules: Modules, noise: Sequence[Noise]) -> Modules:
    """Return, in place of every party's change, the best linear prediction of its signal from all parties' changes.

    Related parties borrow from each other as far as their signals are alike and their noise is not; see
    `geometry.wiener_weights`. Without noise nothing changes.

    Args:
        modules: What to merge.
        noise: How much of each party's change is noise.
    """
    rows = wiener_weights(*split(overlaps(modules).cpu(), noise)).tolist()
    return _Made(modules, lambda items: tuple(weighted_sum(items, row) for row in rows))


def scale_layers(combined: Combined, scales: Mapping[str, float]) -> Combined:
    """Multiply merged modules by factors.

    As in PEFT's `rank_pattern`, a pattern matches a whole tail of a dotted name, and the first that does wins.

    Args:
        combined: What a method returned.
        scales: Pattern of module names → finite factor.

    Raises:
        DpmergeError: DPM-103 for a factor that is not finite, or a pattern that names no module.
    """
    if not scales:
        return combined
    chosen = _chosen(scales, combined.modules, "layer_scales")
    merged = {
        name: item if chosen[name] == 1 else LowRankDelta(item.a, item.b * chosen[name], item.scaling)
        for name, item in combined.modules.items()
    }
    lost = {name: abs(chosen[name]) * value for name, value in combined.lost.items()}
    return replace(combined, modules=merged, lost=lost, weights=None)


def scale_parties(modules: Modules, parties: Sequence[str], scales: Mapping[str, Mapping[str, float]]) -> Modules:
    """Multiply single parties' changes by factors per module; patterns as in `scale_layers`.

    Args:
        modules: What to merge.
        parties: Names, in the order of every module's factors.
        scales: Party → pattern → factor.

    Raises:
        DpmergeError: DPM-103 for another party, a factor that is not finite, or a pattern that names no module.
    """
    if not scales:
        return modules
    if strangers := sorted(scales.keys() - set(parties)):
        problem = f"merge.party_layer_scales names {', '.join(strangers)}, but the parties are {', '.join(parties)}"
        raise DpmergeError("DPM-103", problem, "name parties that are merged")
    rows = {
        party: _chosen(scales[party], modules, f"party_layer_scales.{party}") for party in parties if party in scales
    }
    return {
        name: _scaled(factors, [rows[party][name] if party in rows else 1.0 for party in parties])
        for name, factors in modules.items()
    }


def _chosen(scales: Mapping[str, float], names: Collection[str], where: str) -> dict[str, float]:
    """Return every module's factor: that of the first pattern that matches it, or else 1."""
    try:
        found = first_matches(scales, names)
    except PatternRefused as refusal:
        problem = f"merge.{where}: {refusal}"
        raise DpmergeError("DPM-103", problem, "name the end of a module's name, for example query") from None
    for pattern, scale in scales.items():
        problem = f"merge.{where}.{pattern} = {scale!r}"
        if not abs(scale) <= LARGEST:
            raise DpmergeError("DPM-103", f"{problem} is not finite in fp32", "give a factor such as 0.5")
        if not any(matches(pattern, name) for name in names):
            fix = f"name the end of a module's name, for example {min(names).rpartition('.')[2]}"
            raise DpmergeError("DPM-103", f"{problem} matches no merged module", fix)
    return {name: scales[found[name]] if name in found else 1.0 for name in names}


class _Made(Mapping[str, tuple[LowRankDelta, ...]]):
    """Modules whose factors are made from others as they are read."""

    def __init__(self, modules: Modules, make: Callable[[tuple[LowRankDelta, ...]], tuple[LowRankDelta, ...]]) -> None:
        self._modules, self._make = modules, make

    def __getitem__(self, name: str) -> tuple[LowRankDelta, ...]:
        return self._make(self._modules[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def _scaled(factors: tuple[LowRankDelta, ...], by: Sequence[float]) -> tuple[LowRankDelta, ...]:
    return tuple(replace(item, scaling=item.scaling * factor) for item, factor in zip(factors, by, strict=True))


def _bases(factors: Sequence[LowRankDelta]) -> tuple[Tensor, Tensor]:
    (q_b, _), (q_a, _) = stacked_bases(factors, [1.0] * len(factors))
    return q_b, q_a


def _lifted(q_b: Tensor, q_a: Tensor, item: LowRankDelta) -> LowRankDelta:
    q_b, q_a = q_b.double(), q_a.double()
    return LowRankDelta((item.a.to(q_a) @ q_a.T).float(), (q_b @ item.b.to(q_b)).float(), item.scaling)
