"""Merge adapters into one low-rank weight change per module, with an account of it, and write that as a model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from torch import Tensor

from dpmerge.common.config.sections import Robust
from dpmerge.common.errors import DpmergeError, closest
from dpmerge.common.release.format import MERGED, Release
from dpmerge.server.merging.adapters.deltas import Adapter, Factors, Modules
from dpmerge.server.merging.diagnostics import measures
from dpmerge.server.merging.gate.compatibility import gather
from dpmerge.server.merging.merged_adapter import peft_config, saved_modules, tensors_of
from dpmerge.server.merging.methods.least_squares import statistics_hash
from dpmerge.server.merging.methods.recipe import Combined, Recipe
from dpmerge.server.merging.noise.shares import noise_of
from dpmerge.server.merging.parameters import Device, check_wrappers, device_of, resolved, weights_of
from dpmerge.server.merging.registry import METHODS, MergeMethod
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
        modules: Factors with scaling 1, per module of the base model.
        info: JSON values: `method`, `parameters`, `parties`, `weights`, `coefficient` (used), `norms` (‖τ_t‖ per
            party), `overlap` (matrix of cosines, or None above 64 parties), `norm` (of the result, or None for an exact
            sum of more than 64 parties whose rank is above 1024), `rank` (largest),
            `truncation_error` (relative, over the whole model), `absent` ("party: module" taken as 0), `robust` (what
            bounding a party's influence did, or None), `statistics_sha256` (of public statistics, or None), `noise`
            (per party `share`, `num_coordinates` and `origin`, or None where nobody asked), `factors` (one per party,
            where the method chose them, or None).
    """

    modules: dict[str, Factors]
    info: dict[str, Any]


def merge(
    adapters: Sequence[Adapter],
    *,
    method: str,
    weights: Mapping[str, float] | None = None,
    coefficient: float | None = None,
    density: float | None = None,
    semantics: str = "paper",
    ridge: float | None = None,
    common_share: float | None = None,
    spread: float | None = None,
    outliers: float | None = None,
    off_diagonal: float | None = None,
    rank: int | None = None,
    core: bool = False,
    robust: Robust | None = None,
    denoise: bool = False,
    layer_scales: Mapping[str, float] | None = None,
    party_layer_scales: Mapping[str, Mapping[str, float]] | None = None,
    statistics: Mapping[str, Mapping[str, Tensor]] | None = None,
    seed: int = 0,
    strict: bool = True,
    device: Device = "cpu",
) -> Merged:
    """Merge adapters. A pure function: the same adapters, in any order, give the same bytes on one kind of device.

    Args:
        adapters: At least one; see `read_adapter`, `adapter_from_files`.
        method: A name of `METHODS`.
        weights: Party → finite weight; all 1 if None.
        coefficient: Factor on the sum, where the method takes one.
        density: Share of entries to keep, in (0, 1], where the method takes one.
        semantics: Whose TIES, where the method takes one.
        ridge: Relative ridge of `wudi`, at least 0.
        common_share: Share of the directions that `iso-cts` takes from the sum, in (0, 1].
        spread: How far `della`'s probabilities vary with magnitude, in [0, 1].
        outliers: Share of the largest entries that `breadcrumbs` drops, in [0, 1).
        off_diagonal: What `regmean` keeps of Gram matrices outside their diagonals, in [0, 1].
        rank: Rank of the result; None keeps the lowest exact one (for element-wise methods: the sum of the inputs'
            ranks).
        core: Apply the method to coordinates in the adapters' shared bases; see `wrappers.in_core`.
        robust: Bound one party's influence: "clip" shortens every whole change to the median length, "median" replaces
            the weights of a linear method by the geometric median's, which needs three parties to resist one.
        denoise: Give the method, in place of every party's change, the best linear prediction of its signal from all
            parties' changes; see `wrappers.denoised`.
        layer_scales: Pattern of module names, as in PEFT's `rank_pattern` → factor on the merged change there.
        party_layer_scales: Party → pattern of module names → factor on that party's change there, before the method.
            The first pattern that matches holds. Weights stay as they are: a mean divides by their sum.
        statistics: What `regmean` and `fisher` need; see `statistics.public_statistics`.
        seed: Of random masks.
        strict: Refuse modules that only some parties adapt; otherwise the others have delta 0 there.
        device: Where to compute; "auto" is CUDA where there is one. The result comes back to the processor. Its last
            bits are the device's, so the one that was used is recorded, and the processor is the default.

    Raises:
        DpmergeError: DPM-104 for an unknown method, DPM-103 for a parameter, DPM-402 and DPM-403 for the adapters.
    """
    if method not in METHODS:
        fix = f"choose one of {', '.join(METHODS)}{closest(method, METHODS)}"
        raise DpmergeError("DPM-104", f"merge method {method!r} is unknown", fix)
    row = METHODS[method]
    adapters = sorted(adapters, key=lambda adapter: adapter.party)
    place = device_of(device)
    modules, absent = gather(adapters, strict=strict, device=place)
    parties = tuple(adapter.party for adapter in adapters)
    modules = scale_parties(modules, parties, party_layer_scales or {})
    given = {
        "coefficient": coefficient,
        "density": density,
        "semantics": None if semantics == "paper" else semantics,  # every caller's default, taken or not
        "ridge": ridge,
        "common_share": common_share,
        "spread": spread,
        "outliers": outliers,
        "off_diagonal": off_diagonal,
        "rank": rank,
    }
    parameters = resolved(row, given)
    chosen: dict[str, Any] = {key: value for key, value in parameters.items() if value is not None}
    check_wrappers(row, core, robust, denoise, statistics)
    if party_layer_scales and (row.noise or denoise):
        problem = (
            f"merge.party_layer_scales is no choice for {'denoise' if denoise else row.name}, which asks for noise"
        )
        fix = "leave it out: what is known of an adapter's noise is about the whole of it"
        raise DpmergeError("DPM-103", problem, fix)
    noise = tuple(noise_of(adapter) for adapter in adapters) if row.noise or denoise else ()
    recipe = Recipe(
        parties=parties,
        weights=weights_of(parties, weights),
        statistics=statistics or {},
        noise=noise,
        seed=seed,
        **chosen,
    )
    combined, account = _combined(row, modules, recipe, core=core, robust=robust, denoise=denoise)
    combined = scale_layers(combined, layer_scales or {})
    stated = {
        "core": core,
        "robust": robust,
        "denoise": denoise,
        "layer_scales": dict(layer_scales or {}),
        "party_layer_scales": {party: dict(scales) for party, scales in (party_layer_scales or {}).items()},
        "seed": seed,
        "strict": strict,
        "device": place.type,
    }
    info = {
        "method": method,
        "parameters": parameters | stated,
        "parties": list(parties),
        "weights": list(recipe.weights),
        "absent": absent,
        "robust": account,
        "statistics_sha256": statistics_hash(statistics) if statistics else None,
        "noise": [asdict(each) for each in noise] or None,
        "factors": combined.factors,
    }
    return Merged(combined.modules, info | measures(modules, combined))


def _combined(
    row: MergeMethod, modules: Modules, recipe: Recipe, *, core: bool, robust: Robust | None, denoise: bool
) -> tuple[Combined, dict[str, Any] | None]:
    """Apply a method inside the wrappers that were asked for; also return what bounding a party's influence did."""
    account, given = None, modules
    if robust:
        modules, recipe, account = bounded(modules, recipe, robust)
    if denoise:
        modules = denoised(modules, recipe.noise)
    if core:
        combined = in_core(row.function, modules, recipe, whole_model=row.whole_model)
    else:
        combined = row.function(modules, recipe)
    return combined if modules is given else replace(combined, weights=None), account  # a sum of other changes


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
