"""What a caller may ask of a merge: every parameter against its method's row, its range, and the parties."""

import sys
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch

from dpmerge.common.config.sections import Robust
from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import LARGEST
from dpmerge.server.merging.methods.recipe import SEMANTICS
from dpmerge.server.merging.registry import METHODS, REQUIRED, MergeMethod

Device = Literal["cpu", "cuda", "auto"]

SMALLEST = sys.float_info.min
RANGES = {
    "coefficient": (-LARGEST, LARGEST, "is not finite in fp32", "state a number such as 0.5"),
    "density": (SMALLEST, 1.0, "is outside (0, 1]", "state the share of entries to keep, for example 0.2"),
    "ridge": (0.0, LARGEST, "is negative or not finite", "state a small number such as 1e-6"),
    "common_share": (SMALLEST, 1.0, "is outside (0, 1]", "state a share such as 0.8"),
    "spread": (0.0, 1.0, "is outside [0, 1]", "state a share such as 0.2"),
    "outliers": (0.0, 1.0 - sys.float_info.epsilon, "is outside [0, 1)", "state a small share such as 0.01"),
    "off_diagonal": (0.0, 1.0, "is outside [0, 1]", "state a share such as 0.9"),
}


def resolved(row: MergeMethod, given: Mapping[str, float | str | None]) -> dict[str, float | str | None]:
    """Fill in the row's defaults and check every value.

    Args:
        row: The method.
        given: Parameter → value, None where the caller says nothing.

    Raises:
        DpmergeError: DPM-103 for a parameter that the method does not take or needs, or a value out of its range.
    """
    chosen = dict(row.parameters)
    for key, value in given.items():
        if value is None:
            continue
        if key not in row.parameters:
            raise _refused(
                key, value, f"is no parameter of {row.name}", f"remove it; {row.name} takes {', '.join(chosen)}"
            )
        chosen[key] = value
    if chosen.get("coefficient") == REQUIRED:
        raise _refused("coefficient", None, f"has no default for {row.name}", "state it, for example 0.5")
    for key, (low, high, constraint, fix) in RANGES.items():
        value = chosen.get(key)
        if isinstance(value, float | int) and not low <= value <= high:
            raise _refused(key, value, constraint, fix)
    rank = chosen["rank"]
    if rank is not None and (not isinstance(rank, int) or rank < 1):
        raise _refused("rank", rank, "is not a positive integer", "choose a rank of at least 1")
    if chosen.get("semantics", "paper") not in SEMANTICS:
        raise _refused("semantics", chosen["semantics"], "is unknown", f"choose one of {', '.join(SEMANTICS)}")
    return chosen


def check_wrappers(row: MergeMethod, core: bool, robust: str | None, denoise: bool, statistics: object) -> None:
    """Refuse what cannot be put around a method, and statistics that it lacks or has no use for.

    Raises:
        DpmergeError: DPM-103.
    """
    if denoise and row.noise:
        raise _refused("denoise", denoise, f"is no choice for {row.name}, which uses the noise itself", "leave it out")
    if robust is not None and robust not in get_args(Robust):
        raise _refused("robust", robust, "is unknown", f"choose one of {', '.join(get_args(Robust))}")
    if robust == "median" and row.family != "linear":
        linear = ", ".join(name for name, method in METHODS.items() if method.family == "linear")
        fix = f"choose clip, or one of {linear}"
        raise _refused("robust", robust, f"replaces the weights of a linear method, which {row.name} is not", fix)
    if row.statistics and not statistics:
        fix = (
            f'give statistics = public_statistics(base, adapters, texts, kind="{row.statistics}", ...) of public texts'
        )
        raise _refused("statistics", None, f"is missing, and {row.name} needs it", fix)
    if statistics and not row.statistics:
        raise DpmergeError("DPM-103", f"merge.statistics is no parameter of {row.name}", "remove it")
    if core and row.statistics:
        problem = f"is no choice for {row.name}, whose statistics are about the whole matrices"
        raise _refused("core", core, problem, "leave core out")


def weights_of(parties: Sequence[str], weights: Mapping[str, float] | None) -> tuple[float, ...]:
    """Return one weight per party, in the order of the parties; all 1 if None.

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
            raise _refused(f"weights.{party}", weight, "is not finite in fp32", "give a weight such as 0.5")
    return tuple(float(weights[party]) for party in parties)


def device_of(device: Device) -> torch.device:
    """Return the device that a name stands for: "auto" is CUDA where there is one, and the processor elsewhere.

    >>> device_of("cpu")
    device(type='cpu')

    Raises:
        DpmergeError: DPM-103 for another name, or for "cuda" where torch sees no such device.
    """
    if device not in get_args(Device):
        raise _refused("device", device, "is unknown", f"choose one of {', '.join(get_args(Device))}")
    present = torch.cuda.is_available()
    if device == "cuda" and not present:
        problem = "is not there: torch sees no CUDA device on this machine"
        raise _refused("device", device, problem, "choose cpu, or a torch build and a driver that have CUDA")
    return torch.device("cuda" if present and device != "cpu" else "cpu")


def _refused(key: str, value: object, constraint: str, fix: str) -> DpmergeError:
    return DpmergeError("DPM-103", f"merge.{key} = {value!r} {constraint}", fix)
