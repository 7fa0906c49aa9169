"""What a statement says about the subspace that was trained in, and whether that fits the rest of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from dpmerge.common.config.subspace import AUTO, RANDOM, Clip, SubspaceSettings
from dpmerge.common.privacy.clip_grid import ClipGrid
from dpmerge.common.privacy.mechanism import CLIP_NORM_RANGE
from dpmerge.common.privacy.sizing import candidates
from dpmerge.common.public.corpus import PublicCorpus, public_name
from dpmerge.common.untrusted.kinds import same

SUBSPACE_CLIP_QUANTILE = 0.5
"""With clip = "public" the clip norm is this quantile of the projected public gradients' norms, with "quantile" of a
noisy histogram of the private ones'."""

BY_RULE = "rule"
"""The `k_origin` of a k that the sizing rule chose."""

_HASH = re.compile("[0-9a-f]{64}")


def describe_subspace(
    settings: SubspaceSettings,
    corpus: PublicCorpus | None,
    *,
    k: int,
    l2_clip_norm: float,
    seed: int,
    basis_sha256: str,
    scales: tuple[float, float],
) -> dict[str, Any]:
    """Return a statement's `subspace` object; everything in it is public.

    Of a corpus that nobody answers for, the name and the number of texts are stated, and no hash: texts that are
    private after all could be guessed, and the guess tried against it.

    Args:
        settings: What was asked for.
        corpus: The public texts; None for random directions.
        k: Directions that are trained, as asked for or as the rule chose.
        l2_clip_norm: The training's, or the middle of the grid that a clip query looks at.
        seed: Of pseudo-labels and random directions.
        basis_sha256: Hash of the first basis, which the texts determine.
        scales: Least and largest entry of the first D, by which noise is spread over directions.
    """
    may_hash = corpus is None or corpus.is_listed
    return {
        "k": k,
        **({"k_origin": BY_RULE} if settings.k == AUTO else {}),
        "public": None if corpus is None else public_name(settings),
        "texts_sha256": corpus.sha256 if corpus is not None and corpus.is_listed else None,
        "num_public": 0 if corpus is None else len(corpus.texts),
        "seed": seed,
        "basis_sha256": basis_sha256 if may_hash else None,
        "refresh_every_steps": settings.refresh_every_steps,
        "allocation": settings.allocation,
        "scales": list(scales),
        "clip": settings.clip,
        "clip_quantile": None if settings.clip == "fixed" else SUBSPACE_CLIP_QUANTILE,
        **(_stated_grid(ClipGrid.around(l2_clip_norm, k)) if settings.clip == "quantile" else {}),
    }


def subspace_problem(statement: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a statement's `subspace`, which may be absent; None if nothing is.

    It must consist of the known keys with values of their kinds, k must be the number of noised coordinates, and the
    training settings, where they are stated, must say the same, or leave k to the rule.
    """
    settings = _stated_settings(statement)
    if "subspace" not in statement:
        if statement.get("num_clip_queries"):
            return "num_clip_queries is stated although all coordinates were trained"
        return None if settings is None else "subspace is missing although the training settings name one"
    told = statement["subspace"]
    if not isinstance(told, Mapping) or told.keys() - _OPTIONAL_KINDS.keys() != _KINDS.keys():
        return f"subspace does not consist of {', '.join(_KINDS)}"
    kinds = {**_KINDS, **_OPTIONAL_KINDS}
    wrong = [key for key in told if not kinds[key](told[key])]
    if wrong:
        return f"subspace.{wrong[0]} = {told[wrong[0]]!r} is not of its kind"
    if told["k"] != statement["num_coordinates"]:
        return f"subspace.k = {told['k']} is not num_coordinates = {statement['num_coordinates']}"
    if (told["public"] is None) != (not told["num_public"]):
        return "subspace.public and num_public do not fit each other"
    if told["public"] is None and (told["texts_sha256"] is not None or told["basis_sha256"] is None):
        return "subspace.texts_sha256 and basis_sha256 do not fit random directions"
    if told["public"] is not None and (told["texts_sha256"] is None) != (told["basis_sha256"] is None):
        return "subspace.texts_sha256 and basis_sha256 do not fit each other"
    if settings is None:
        return "subspace is stated although the training settings name none"
    problem = _origin_problem(told, settings) or _clip_problem(told, statement)
    return problem or _difference(told, settings, statement["training"].get("seed"))


def subspace_words(statement: Mapping[str, Any]) -> str:
    """Return a clause for the statement's sentence; empty if all coordinates were trained."""
    told = statement.get("subspace")
    if told is None:
        return ""
    queries = ", one query more for the clip norm" if statement.get("num_clip_queries") else ""
    if told["public"] is None:
        return f", {told['k']} random directions{queries}"
    sha256 = "no hash: on nobody's list" if told["texts_sha256"] is None else told["texts_sha256"][:12]
    return f", {told['k']} directions from the public texts {told['public']} ({sha256}){queries}"


def _origin_problem(told: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a k that the rule chose; the choice itself cannot be checked without the gradients."""
    if settings.get("k") != AUTO:
        return "subspace.k_origin is stated although the training settings state k" if "k_origin" in told else None
    if "k_origin" not in told:
        return 'subspace.k_origin is missing although the training settings state k = "auto"'
    choices = candidates(told["num_public"])
    return None if told["k"] in choices else f"subspace.k = {told['k']} is none of the rule's choices {choices}"


def _clip_problem(told: Mapping[str, Any], statement: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a clip norm from private gradients: it costs one query, and is an edge of its grid."""
    by_query = told["clip"] == "quantile"
    if by_query != ("clip_middle" in told) or by_query != ("clip_bins" in told):
        return "subspace.clip_middle and clip_bins belong to clip = 'quantile'"
    if bool(statement.get("num_clip_queries")) != (by_query and statement["private"]):
        return f"num_clip_queries = {statement.get('num_clip_queries')!r} does not fit subspace.clip = {told['clip']!r}"
    if not by_query:
        return None
    grid = ClipGrid.around(told["clip_middle"], told["k"])
    if told["clip_bins"] != grid.num_bins:
        return f"subspace.clip_bins = {told['clip_bins']} should be {grid.num_bins}"
    if statement["private"] and statement["l2_clip_norm"] not in grid.edges:
        return f"l2_clip_norm = {statement['l2_clip_norm']!r} is no edge of the grid that subspace states"
    return None


def _difference(told: Mapping[str, Any], settings: Mapping[str, Any], seed: object) -> str | None:
    """Return which key of a `subspace` the training settings do not lead to; what they leave out allows anything."""
    wanted = {key: settings.get(key) for key in ("refresh_every_steps", "allocation", "clip")}
    wanted["k"] = told["k"] if settings.get("k") == AUTO else settings.get("k")
    wanted["public"] = None if settings.get("public") == RANDOM else settings.get("public")
    wanted["clip_quantile"] = SUBSPACE_CLIP_QUANTILE if settings.get("clip") in ("public", "quantile") else None
    wanted["seed"] = told["seed"] if seed is None else seed
    differing = [key for key, value in wanted.items() if not same(told[key], value)]
    if told["allocation"] != "public" and not same(told["scales"], [1.0, 1.0]):  # a history is of the steps to come
        differing.append("scales")
    most = settings.get("num_public", told["num_public"])
    if type(most) is not int or told["num_public"] > most:
        differing.append("num_public")
    return f"subspace.{differing[0]} differs from the training settings" if differing else None


def _stated_grid(grid: ClipGrid) -> dict[str, Any]:
    return {"clip_middle": grid.middle, "clip_bins": grid.num_bins}


def _stated_settings(statement: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the subspace table of the statement's public training settings."""
    settings = statement["training"]
    for key in ("training", "subspace"):
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings if isinstance(settings, Mapping) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 255 and value.isprintable()


def _are_scales(value: object) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(item) is float for item in value)
    return is_pair and 0 < value[0] <= value[1] < float("inf")  # type: ignore[index]  # a list of two, as checked


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "k": lambda value: _is_count(value) and value > 0,
    "public": lambda value: value is None or _is_name(value),
    "texts_sha256": lambda value: value is None or _is_hash(value),
    "num_public": _is_count,
    "seed": _is_count,
    "basis_sha256": lambda value: value is None or _is_hash(value),
    "refresh_every_steps": _is_count,
    "allocation": lambda value: value in ("uniform", "public", "history"),
    "scales": _are_scales,
    "clip": lambda value: value in get_args(Clip),
    "clip_quantile": lambda value: value is None or same(value, SUBSPACE_CLIP_QUANTILE),
}

_OPTIONAL_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "k_origin": lambda value: value == BY_RULE,
    "clip_middle": lambda value: type(value) is float and CLIP_NORM_RANGE[0] <= value <= CLIP_NORM_RANGE[1],
    "clip_bins": _is_count,
}
"""Absent where k was stated, and where no query asked for the clip norm."""
