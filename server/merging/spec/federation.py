"""`[merge]` of a federation file against the registry: its check, its JSON Schema and its lines in the template.

`common` knows a method as a name, and its parameters as plain values: whoever merges has them checked here, before
anything private is touched.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dpmerge.common.config.federation import Federation
from dpmerge.common.config.sections import MERGE_KEYS, MergeSettings
from dpmerge.common.config.template import setting_line
from dpmerge.common.errors import closest
from dpmerge.server.merging.methods.parameter import Parameter, ParameterRefused
from dpmerge.server.merging.methods.recipe import MergeMethod
from dpmerge.server.merging.registry import METHODS, parameters_of
from dpmerge.server.merging.spec.checks import check_robust, resolved
from dpmerge.server.merging.spec.spec import MergeSpec, Wrappers


def offered() -> dict[str, MergeMethod]:
    """Return the methods that a federation file may name: it has no key for public texts, so none that needs them."""
    return {name: method for name, method in METHODS.items() if method.statistics is None}


def checked(federation: Federation, where: str = "") -> Federation:
    """Return a federation whose `[merge]` a method of the registry takes.

    Args:
        federation: As it was read, or made.
        where: What errors call the file.

    Raises:
        DpmergeError: DPM-102 for a key that is none, DPM-103 for a value, DPM-104 for a method, as in `[merge]`.
    """
    try:
        return federation.with_merge(checked_settings(federation.merge))
    except ParameterRefused as refusal:
        raise refusal.at(where) from None


def checked_settings(settings: MergeSettings) -> MergeSettings:
    """Return the section with every value as it is used; what no method was told stays absent.

    Args:
        settings: The section, with any parameters.

    Raises:
        ParameterRefused: At the first key or value that the method does not take.
    """
    methods = offered()
    known = parameters_of(methods)
    method = methods.get(settings.method)
    if method is None:
        fix = f"choose one of {', '.join(methods)}{closest(settings.method, methods)}"
        raise ParameterRefused("method", settings.method, "is not a known name", fix, code="DPM-104")
    for key, value in settings.parameters.items():
        if key not in known:
            keys = sorted([*MERGE_KEYS, *known])
            fix = f"use one of {', '.join(keys)}{closest(key, keys)}"
            raise ParameterRefused(key, value, "is not a known key", fix, code="DPM-102")
    values = resolved(method, settings.parameters, in_file=True)
    check_robust(method, settings.robust)
    implied = {name: each.implied for name, each in known.items() if each.implied is not None}
    stated = {key: values[key] for key in values if key in settings.parameters}
    return replace(settings, parameters=_ordered(implied | stated, method, known))


def spec_of_settings(settings: MergeSettings, *, seed: int) -> MergeSpec:
    """Return what a federation asks of its merge.

    Args:
        settings: The checked section.
        seed: The federation's, of random masks.
    """
    wrappers = Wrappers(
        core=settings.core,
        robust=settings.robust,
        denoise=settings.denoise,
        layer_scales=settings.layer_scales or {},
    )
    return MergeSpec(method=settings.method, parameters=settings.parameters, wrappers=wrappers, seed=seed)


def merge_schema() -> dict[str, Any]:
    """Return the properties of `[merge]` that come from the registry: the methods' names and their parameters."""
    methods = offered()
    named = {"enum": list(methods), "description": "The merge method.", "default": MergeSettings.method}
    return {"method": named} | {name: each.schema for name, each in parameters_of(methods).items()}


def merge_lines() -> list[str]:
    """Return a line of the template for every parameter; those that stand for nothing said are not commented out."""
    return [
        setting_line(
            each.name, each.example if each.implied is None else each.implied, each.about, optional=each.implied is None
        )
        for each in parameters_of(offered()).values()
    ]


def _ordered(values: Mapping[str, Any], method: MergeMethod, known: Mapping[str, Parameter[Any]]) -> dict[str, Any]:
    """Return values in the method's own order, what else is stated before the rank."""
    names = dict.fromkeys([*method.parameters, *known])
    names.pop("rank")
    return {name: values[name] for name in [*names, "rank"] if name in values}
