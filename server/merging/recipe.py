"""What every method is given, and what it gives back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from torch import Tensor

from dpmerge.common.config_sections import Semantics
from dpmerge.server.merging.deltas import Factors, Modules

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
    """

    modules: dict[str, Factors]
    coefficient: float
    lost: dict[str, float] = field(default_factory=dict)


Method = Callable[[Modules, Recipe], Combined]

Rule = Callable[[str, tuple[Factors, ...]], tuple[Factors, float]]
"""(module, every party's factors) → merged factors and the Frobenius norm of what the rank left out."""


def per_module(modules: Modules, rule: Rule, coefficient: float) -> Combined:
    """Apply a rule to one module after the other, so that memory does not grow with their number."""
    results = {name: rule(name, factors) for name, factors in modules.items()}
    merged = {name: factors for name, (factors, _) in results.items()}
    return Combined(merged, coefficient, {name: lost for name, (_, lost) in results.items()})
