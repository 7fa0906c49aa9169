"""What a caller may ask of a merge: every parameter against its method's row, its range, and the parties."""

from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from dpmerge.common.config.sections import Robust
from dpmerge.common.errors import DpmergeError, closest
from dpmerge.server.merging.adapters.deltas import LARGEST
from dpmerge.server.merging.methods.parameter import ParameterRefused, Value
from dpmerge.server.merging.methods.recipe import REQUIRED, MergeMethod
from dpmerge.server.merging.registry import METHODS, parameters_of
from dpmerge.server.merging.spec.spec import Device, MergeSpec


def method_of(name: str) -> MergeMethod:
    """Return a method by its name.

    Raises:
        DpmergeError: DPM-104 for an unknown one.
    """
    if name not in METHODS:
        fix = f"choose one of {', '.join(METHODS)}{closest(name, METHODS)}"
        raise DpmergeError("DPM-104", f"merge method {name!r} is unknown", fix)
    return METHODS[name]


def resolved(
    method: MergeMethod, given: Mapping[str, Value | None], *, in_file: bool = False
) -> dict[str, Value | None]:
    """Fill in the method's defaults and check every value.

    Args:
        method: Whose parameters.
        given: Parameter → value, None where the caller says nothing.
        in_file: Whether a federation file gives them.

    Raises:
        ParameterRefused: DPM-103 for a parameter that the method does not take or needs, or a value out of its range.
    """
    takes = {parameter.name: parameter for parameter in method.takes}
    known = parameters_of(METHODS)
    chosen = method.parameters
    for key, value in given.items():
        if value is None or (key in known and key not in takes and value == known[key].implied):
            continue
        if key not in takes:
            fix = f"remove it; {method.name} takes {', '.join(takes)}"
            raise ParameterRefused(key, value, f"is no parameter of {method.name}", fix)
        chosen[key] = takes[key].read(value, in_file=in_file)
    for key, value in chosen.items():
        if value == REQUIRED:
            fix = f"state it, for example {takes[key].example}"
            raise ParameterRefused(key, None, f"has no default for {method.name}", fix)
    return chosen


def check_robust(method: MergeMethod, robust: str | None) -> None:
    """Refuse a bound on one party's influence that is none, or that the method has no weights for.

    Args:
        method: What it is put around.
        robust: As in `Wrappers`.

    Raises:
        ParameterRefused: DPM-103.
    """
    if robust is not None and robust not in get_args(Robust):
        raise ParameterRefused("robust", robust, "is unknown", f"choose one of {', '.join(get_args(Robust))}")
    if robust == "median" and not method.is_weighted_sum:
        sums = ", ".join(name for name, each in METHODS.items() if each.is_weighted_sum)
        problem = (
            f"is no choice for {method.name}: it replaces the weights of a weighted sum, which {method.name} is not"
        )
        raise ParameterRefused("robust", robust, problem, f"choose clip, or one of {sums}")


def check_wrappers(method: MergeMethod, spec: MergeSpec) -> None:
    """Refuse what cannot be put around a method, and statistics that it lacks or has no use for.

    Args:
        method: The spec's.
        spec: What was asked for.

    Raises:
        DpmergeError: DPM-103.
    """
    around, name = spec.wrappers, method.name
    if around.denoise and method.noise:
        raise ParameterRefused(
            "denoise", around.denoise, f"is no choice for {name}, which uses the noise itself", "leave it out"
        )
    check_robust(method, around.robust)
    if around.party_layer_scales and (method.noise or around.denoise):
        asker = "denoise" if around.denoise else name
        problem = f"merge.party_layer_scales is no choice for {asker}, which asks for noise"
        fix = "leave it out: what is known of an adapter's noise is about the whole of it"
        raise DpmergeError("DPM-103", problem, fix)
    if method.statistics and not spec.statistics:
        call = f'public_statistics(base, adapters, texts, kind="{method.statistics}", ...)'
        fix = f"give statistics = {call} of public texts"
        raise ParameterRefused("statistics", None, f"is missing, and {name} needs it", fix)
    if spec.statistics and not method.statistics:
        raise DpmergeError("DPM-103", f"merge.statistics is no parameter of {name}", "remove it")
    if around.core and method.statistics:
        problem = f"is no choice for {name}, whose statistics are about the whole matrices"
        raise ParameterRefused("core", around.core, problem, "leave core out")


def weights_of(parties: Sequence[str], weights: Mapping[str, float] | None) -> tuple[float, ...]:
    """Return one weight per party, in the order of the parties; all 1 if None.

    Args:
        parties: Names.
        weights: Party → finite number.

    Raises:
        DpmergeError: DPM-103 for weights of other parties, or beyond fp32.
    """
    if weights is None:
        return (1.0,) * len(parties)
    if set(weights) != set(parties):
        problem = f"weights name {', '.join(sorted(weights))}, but the parties are {', '.join(parties)}"
        raise DpmergeError("DPM-103", problem, "give one weight per party")
    for party, weight in weights.items():
        if not abs(weight) <= LARGEST:
            raise ParameterRefused(f"weights.{party}", weight, "is not finite in fp32", "give a weight such as 0.5")
    return tuple(float(weights[party]) for party in parties)


def device_of(device: Device) -> torch.device:
    """Return the device that a name stands for: "auto" is CUDA where there is one, and the processor elsewhere.

    >>> device_of("cpu")
    device(type='cpu')

    Raises:
        DpmergeError: DPM-103 for another name, or for "cuda" where torch sees no such device.
    """
    if device not in get_args(Device):
        raise ParameterRefused("device", device, "is unknown", f"choose one of {', '.join(get_args(Device))}")
    present = torch.cuda.is_available()
    if device == "cuda" and not present:
        problem = "is not there: torch sees no CUDA device on this machine"
        raise ParameterRefused("device", device, problem, "choose cpu, or a torch build and a driver that have CUDA")
    return torch.device("cuda" if present and device != "cpu" else "cpu")
