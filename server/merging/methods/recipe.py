"""What every method is given, what it gives back, and how it is declared."""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import LowRankDelta, Modules
from dpmerge.server.merging.methods.parameter import COEFFICIENT, RANK, Parameter, T, Value
from dpmerge.server.merging.noise.noise import Noise

REQUIRED = "required"
LAWS = {
    "identity": "one adapter with weight 1 and density 1 is itself",
    "idempotent": "identical adapters give that adapter",
    "additive": "T identical adapters give T times that adapter",
    "cancels": "weights 1 and -1 of one adapter give zero",
    "rotation-free": "coordinates in other orthonormal bases, such as core space, change nothing",
    "factor-free": "the form of the factors, (B G⁻¹, G A) or ranks padded with zeros, changes nothing",
}
"""Laws that a method may declare; a contract test checks every one against those, and all against the others."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What one merge is made with, resolved: `recipe[DENSITY]` is the value of a parameter that the method takes.

    Attributes:
        parties: Names, in the order of the factors of every module.
        weights: One finite number per party, as given; a method that averages divides by their sum.
        parameters: Parameter's name → value.
        statistics: Party → module → what public data say of it, where the method needs it; may be lazy.
        noise: How much of each party's change is noise, where the method asks for it.
        seed: Of random masks.
    """

    parties: tuple[str, ...]
    weights: tuple[float, ...]
    parameters: Mapping[str, Value | None] = field(default_factory=dict)
    statistics: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    noise: tuple[Noise, ...] = ()
    seed: int = 0

    def __getitem__(self, parameter: Parameter[T]) -> T:
        """Return the value of a parameter.

        Raises:
            ValueError: For one that has no value here: the method does not declare it.
        """
        value = self._stated(parameter)
        if value is None:
            raise ValueError(f"Expected parameters={dict(self.parameters)} to have {parameter.name}: declare it.")
        return value

    @property
    def coefficient(self) -> float | None:
        """Factor on the sum, or None for the method's own choice."""
        return self._stated(COEFFICIENT)

    @property
    def factor(self) -> float:
        """The coefficient, 1 where none is stated."""
        return 1.0 if self.coefficient is None else self.coefficient

    @property
    def rank(self) -> int | None:
        """Rank of the result, or None for the lowest exact one."""
        return self._stated(RANK)

    def _stated(self, parameter: Parameter[T]) -> T | None:
        value = self.parameters.get(parameter.name)
        return parameter.implied if value is None else parameter.kind(value)


@dataclass(frozen=True)
class Combined:
    """What a method returns: a merged weight change.

    Attributes:
        modules: LowRankDelta with scaling 1, per module.
        coefficient: The factor that was used on the weighted sum, where a method has one.
        lost: Frobenius norm of what the rank left out, per module.
        coefficients: One factor per party, where the method chose them; None otherwise.
        weights: One factor per party, where what is merged is Σ weights_t τ_t but for what was lost; None otherwise.
    """

    modules: dict[str, LowRankDelta]
    coefficient: float
    lost: dict[str, float] = field(default_factory=dict)
    coefficients: tuple[float, ...] | None = None
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
"""(modules, recipe) → what they combine to. Modules map a name to every party's change, in the order of the recipe's
parties, all of one shape; the recipe holds weights and the parameters that the method declares. No method changes them.
"""

Rule = Callable[[str, tuple[LowRankDelta, ...]], tuple[LowRankDelta, float]]
"""(module, every party's factors) → merged factors and the Frobenius norm of what the rank left out."""


@dataclass(frozen=True, kw_only=True)
class MergeMethod:
    """A merge method as it is declared beside its function.

    Attributes:
        name: As written in a configuration.
        summary: One line.
        source: arXiv id, or "-".
        function: Modules and recipe to what they combine to.
        laws: Keys of `LAWS` that hold.
        takes: Parameters with defaults, in the order in which they are shown; None is "chosen by the method",
            `REQUIRED` has no default.
        limit: Parameters under which the method is another one, and that one's name.
        most: Largest number of parties, or None for any.
        statistics: Kind of `public_statistics` that it needs, or None.
        whole_model: It looks at all modules at once (a threshold, a norm), not at one after the other.
        noise: It asks how much of every adapter is noise.
        is_weighted_sum: It is Σ c_t τ_t, and whoever calls may choose the weights for it, as `robust = "median"` does.
    """

    name: str
    summary: str
    source: str
    function: Method
    laws: frozenset[str]
    takes: Mapping[Parameter[Any], Value | None]
    limit: tuple[Mapping[str, float], str] | None = None
    most: int | None = None
    statistics: Literal["gram", "fisher"] | None = None
    whole_model: bool = False
    noise: bool = False
    is_weighted_sum: bool = False

    @property
    def parameters(self) -> dict[str, Value | None]:
        """Name → default of what it takes."""
        return {parameter.name: default for parameter, default in self.takes.items()}

    @property
    def family(self) -> str:
        """The file it lives in."""
        return self.function.__module__.rpartition(".")[2]


def result_rank(factors: tuple[LowRankDelta, ...], recipe: Recipe) -> int:
    """Return the rank asked for, or else the sum of the inputs' ranks, as far as the matrix goes.

    Args:
        factors: Every party's change of one module.
        recipe: Holds the rank that was asked for, if one was.
    """
    full = min(factors[0].shape)
    return min(recipe.rank or sum(item.rank for item in factors), full)


def total_of(matrices: Iterable[Tensor]) -> Tensor:
    """Return the sum of matrices that are never held together."""
    iterator = iter(matrices)
    total = next(iterator).clone()
    for matrix in iterator:
        total += matrix
    return total


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


def _applied(rule: Rule, entry: tuple[str, tuple[LowRankDelta, ...]]) -> tuple[LowRankDelta, float]:
    name, factors = entry
    if factors[0].device.type == "cpu":
        return rule(name, factors)
    with factors[0].device:  # also for tensors that a rule makes itself
        merged, lost = rule(name, factors)
    return merged.on("cpu"), lost


def _cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
