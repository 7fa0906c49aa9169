"""What can be put around any merge method, whatever its rule: here, shared coordinates in place of full matrices."""

from collections.abc import Sequence
from dataclasses import replace

from dpmerge.server.merging.deltas import Factors, Modules
from dpmerge.server.merging.recipe import Combined, Method, Recipe
from dpmerge.server.merging.subspace import Core, core_of


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
    merged: dict[str, Factors] = {}
    lost: dict[str, float] = {}
    coefficient = recipe.factor
    for names in [list(modules)] if whole_model else [[name] for name in modules]:
        factors = {name: modules[name] for name in names}
        cores = {name: core_of(items, [1.0] * len(items)) for name, items in factors.items()}
        small = {name: coordinates(cores[name], items) for name, items in factors.items()}
        combined = method(small, recipe)
        merged |= {name: _lifted(cores[name], item) for name, item in combined.modules.items()}
        lost |= combined.lost
        coefficient = combined.coefficient
    return Combined(merged, coefficient, lost)


def coordinates(core: Core, factors: Sequence[Factors]) -> tuple[Factors, ...]:
    """Return every party's factors in a core's bases: Q_Bᵀ b, a Q_A, in float64.

    Equal a's stay equal bit by bit, so that parties who share one are still seen to do so.
    """
    return tuple(replace(item, a=item.a.double() @ core.q_a, b=core.q_b.T @ item.b.double()) for item in factors)


def _lifted(core: Core, item: Factors) -> Factors:
    return Factors((item.a.double() @ core.q_a.T).float(), (core.q_b @ item.b.double()).float(), item.scaling)
