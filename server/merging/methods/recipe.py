"""What every method is given, and what it gives back."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import get_args

import torch
from torch import Tensor

from dpmerge.common.config.sections import Semantics
from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import Factors, Modules
from dpmerge.server.merging.noise.shares import Noise

SEMANTICS = get_args(Semantics)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Parameters of one merge, resolved: a method reads those that its registry row lists.

    Attributes:
        parties: Names, in the order of the factors of every module.
        weights: One finite number per party, as given; a method that averages divides by their sum.
        coefficient: Factor on the sum, or None for the method's own choice.
        density: Share of entries to keep, in (0, 1].
        semantics: Whose TIES: "paper", "peft" or "mergekit".
        ridge: Relative ridge of a least-squares method, at least 0.
        common_share: Share of the directions that `iso-cts` takes from the sum, in (0, 1].
        spread: How far `della`'s probabilities vary with magnitude, in [0, 1].
        outliers: Share of the largest entries that `breadcrumbs` drops, in [0, 1).
        off_diagonal: What `regmean` keeps of Gram matrices outside their diagonals, in [0, 1].
        statistics: Party → module → what public data say of it, where the row needs it; may be lazy.
        noise: How much of each party's change is noise, where the row asks for it.
        rank: Rank of the result, or None for the lowest exact one.
        seed: Of random masks.
    """

    parties: tuple[str, ...]
    weights: tuple[float, ...]
    coefficient: float | None = None
    density: float = 1.0
    semantics: str = "paper"
    ridge: float = 0.0
    common_share: float = 0.8
    spread: float = 0.2
    outliers: float = 0.01
    off_diagonal: float = 0.9
    statistics: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    noise: tuple[Noise, ...] = ()
    rank: int | None = None
    seed: int = 0

    @property
    def factor(self) -> float:
        """The coefficient, 1 where none is stated."""
        return 1.0 if self.coefficient is None else self.coefficient


@dataclass(frozen=True)
class Combined:
    """What a method returns: a merged weight change.

    Attributes:
        modules: Factors with scaling 1, per module.
        coefficient: The factor that was used on the weighted sum, where a method has one.
        lost: Frobenius norm of what the rank left out, per module.
        factors: One factor per party, where the method chose them; None otherwise.
        weights: One factor per party, where what is merged is Σ weights_t τ_t but for what was lost; None otherwise.
    """

    modules: dict[str, Factors]
    coefficient: float
    lost: dict[str, float] = field(default_factory=dict)
    factors: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None


def refuse_unequal_weights(recipe: Recipe, why: str, fix: str) -> None:
    """Refuse weights that differ, for methods that were published without any.

    Args:
        recipe: Holds the weights.
        why: What the method has in their place, as in "TIES as published has none".
        fix: What to do.

    Raises:
        DpmergeError: DPM-103.
    """
    if len(set(recipe.weights)) > 1:
        raise DpmergeError("DPM-103", f"weights {list(recipe.weights)} differ, and {why}", fix)


Method = Callable[[Modules, Recipe], Combined]

Rule = Callable[[str, tuple[Factors, ...]], tuple[Factors, float]]
"""(module, every party's factors) → merged factors and the Frobenius norm of what the rank left out."""


def per_module(modules: Modules, rule: Rule, coefficient: float, workers: int | None = None) -> Combined:
    """Apply a rule to every module, each by itself: memory is a module's per worker, however many modules there are.

    Args:
        modules: What to merge. A rule computes where its factors are, and its result is brought back to the processor.
        rule: What to do with one module. Its result must depend on nothing but the arguments.
        coefficient: Passed on.
        workers: Threads; by default as many as there are processors for torch's own threads, often one.
    """
    count = min(workers or _cores() // torch.get_num_threads(), len(modules))
    if count > 1:
        with ThreadPoolExecutor(count) as pool:
            results = list(pool.map(_applied, repeat(rule), modules.items()))
    else:
        results = [_applied(rule, entry) for entry in modules.items()]
    merged = {name: factors for name, (factors, _) in zip(modules, results, strict=True)}
    return Combined(merged, coefficient, {name: lost for name, (_, lost) in zip(modules, results, strict=True)})


def _applied(rule: Rule, entry: tuple[str, tuple[Factors, ...]]) -> tuple[Factors, float]:
    name, factors = entry
    if factors[0].device.type == "cpu":
        return rule(name, factors)
    with factors[0].device:  # also for tensors that a rule makes itself
        merged, lost = rule(name, factors)
    return merged.on("cpu"), lost


def _cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
