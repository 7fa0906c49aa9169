"""The merge methods by name. Each is declared beside its function; a new file of `methods/` is named here, no more."""

from collections.abc import Mapping
from typing import Any

from dpmerge.server.merging.methods import consensus, geometry, least_squares, linear, singular, sparse, sphere
from dpmerge.server.merging.methods.parameter import RANK, Parameter
from dpmerge.server.merging.methods.recipe import MergeMethod

FAMILIES = (linear, sparse, consensus, sphere, singular, least_squares, geometry)

METHODS: dict[str, MergeMethod] = {method.name: method for family in FAMILIES for method in family.METHODS}


def parameters_of(methods: Mapping[str, MergeMethod]) -> dict[str, Parameter[Any]]:
    """Return what the methods take between them, by name: the order of the methods, and the rank last.

    Raises:
        ValueError: For two parameters of one name.
    """
    found: dict[str, Parameter[Any]] = {}
    for method in methods.values():
        for parameter in method.takes:
            if found.setdefault(parameter.name, parameter) != parameter:
                raise ValueError(f"Expected one parameter {parameter.name!r}, and {method.name} declares another.")
    found.pop(RANK.name, None)
    return found | {RANK.name: RANK}
