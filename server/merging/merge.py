"""Merge adapters into one low-rank weight change per module, with its diagnostics, and write that as a model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import torch

from dpmerge.common.release.format import MERGED, Release
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta, Modules
from dpmerge.server.merging.diagnostics import measures
from dpmerge.server.merging.gate.compatibility import gather
from dpmerge.server.merging.merged_adapter import peft_config, saved_modules, tensors_of
from dpmerge.server.merging.methods.least_squares import statistics_hash
from dpmerge.server.merging.methods.recipe import Combined, MergeMethod, Recipe
from dpmerge.server.merging.noise.shares import noise_of
from dpmerge.server.merging.spec.checks import check_wrappers, device_of, method_of, resolved, weights_of
from dpmerge.server.merging.spec.spec import MergeSpec, Wrappers
from dpmerge.server.merging.wrappers import bounded, denoised, in_core, scale_layers, scale_parties

RECORDED = (
    "method",
    "parameters",
    "coefficient",
    "factors",
    "noise",
    "robust",
    "statistics_sha256",
    "truncation_error",
    "absent",
)


@dataclass(frozen=True, eq=False)
class Merged:
    """A merged weight change and how it came about.

    Attributes:
        modules: LowRankDelta with scaling 1, per module of the base model.
        info: JSON values: `method`, `parameters`, `parties`, `weights`, `coefficient` (used), `norms` (‖τ_t‖ per
            party), `overlap` (matrix of cosines, or None above 64 parties), `norm` (of the result, or None for an exact
            sum of more than 64 parties whose rank is above 1024), `rank` (largest),
            `truncation_error` (relative, over the whole model), `absent` ("party: module" taken as 0), `robust` (what
            bounding a party's influence did, or None), `statistics_sha256` (of public statistics, or None), `noise`
            (per party `share`, `num_coordinates` and `origin`, or None where nobody asked), `factors` (one per party,
            where the method chose them, or None).
    """

    modules: dict[str, LowRankDelta]
    info: dict[str, Any]


def merge(adapters: Sequence[Adapter], spec: MergeSpec) -> Merged:
    """Merge adapters. A pure function: the same adapters, in any order, give the same bytes on one kind of device.

    Args:
        adapters: At least one; see `read_adapter`, `adapter_from_files`.
        spec: What to do with them.

    Raises:
        DpmergeError: DPM-104 for an unknown method, DPM-103 for a parameter, DPM-402 and DPM-403 for the adapters.
    """
    method, around = method_of(spec.method), spec.wrappers
    adapters = sorted(adapters, key=lambda adapter: adapter.party)
    place = device_of(spec.device)
    modules, absent = gather(adapters, strict=spec.strict, device=place)
    parties = tuple(adapter.party for adapter in adapters)
    modules = scale_parties(modules, parties, around.party_layer_scales)
    parameters = resolved(method, spec.parameters)
    check_wrappers(method, spec)
    recipe = Recipe(
        parties=parties,
        weights=weights_of(parties, spec.weights),
        parameters=parameters,
        statistics=spec.statistics,
        noise=tuple(map(noise_of, adapters)) if method.noise or around.denoise else (),
        seed=spec.seed,
    )
    combined, bounding = _combined(method, modules, recipe, around)
    combined = scale_layers(combined, around.layer_scales)
    info = {
        "method": spec.method,
        "parameters": parameters | around.to_dict() | _repeatable(spec, place),
        "parties": list(parties),
        "weights": list(recipe.weights),
        "absent": absent,
        "robust": bounding,
        "statistics_sha256": statistics_hash(spec.statistics) if spec.statistics else None,
        "noise": [asdict(each) for each in recipe.noise] or None,
        "factors": combined.coefficients,
    }
    return Merged(combined.modules, info | measures(modules, combined))


def _repeatable(spec: MergeSpec, place: torch.device) -> dict[str, Any]:
    return {"seed": spec.seed, "strict": spec.strict, "device": place.type}


def _combined(
    method: MergeMethod, modules: Modules, recipe: Recipe, around: Wrappers
) -> tuple[Combined, dict[str, Any] | None]:
    """Apply a method inside the wrappers that were asked for; also return what bounding a party's influence did."""
    bounding, given = None, modules
    if around.robust:
        modules, recipe, bounding = bounded(modules, recipe, around.robust)
    if around.denoise:
        modules = denoised(modules, recipe.noise)
    if around.core:
        combined = in_core(method.function, modules, recipe, whole_model=method.whole_model)
    else:
        combined = method.function(modules, recipe)
    return combined if modules is given else replace(combined, weights=None), bounding  # a sum of other changes


def as_release(merged: Merged, adapters: Sequence[Adapter]) -> Release:
    """Return a merged model as PEFT opens it, with every input's head and a record of how to merge it again.

    Args:
        merged: From `merge`.
        adapters: The adapters that were merged.
    """
    adapters = sorted(adapters, key=lambda adapter: adapter.party)
    weights = dict(zip(merged.info["parties"], merged.info["weights"], strict=True))
    inputs = [
        {"party": a.party, "sha256": a.sha256, "epsilon": a.statement.get("epsilon"), "weight": weights[a.party]}
        for a in adapters
    ]
    record = {
        "schema": 1,
        "inputs": inputs,
        "base_sha256": next((a.base_sha256 for a in adapters if a.base_sha256), None),
        "versions": {name: version(name) for name in ("dpmerge", "torch")},
        **{key: merged.info[key] for key in RECORDED},
    }
    heads = {party: head for adapter in adapters for party, head in adapter.heads.items()}
    tensors, config = tensors_of(merged.modules, adapters), peft_config(merged.modules, adapters)
    return Release(MERGED, tensors, config, heads, {}, record, saved_modules(adapters))
