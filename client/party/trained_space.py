"""From a plan to the coordinates that its training works in; private records have no way into this module."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.gradients.public import PSEUDO_LABELS, public_gradients
from dpmerge.client.party.calibration import make_mechanism
from dpmerge.client.party.model import PartyModel
from dpmerge.client.subspace.basis import Basis, StreamingSvd, public_seed, random_basis
from dpmerge.client.subspace.basis_cache import cached_basis
from dpmerge.client.subspace.coordinates import Coordinates, FullSpace, MakeBasis, Subspace
from dpmerge.common.config.federation import PartyPlan, SubspaceSettings
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.privacy.sizing import candidates, size_for
from dpmerge.common.public.corpus import PublicCorpus
from dpmerge.common.statement.subspace_part import CLIP_QUANTILE, describe_subspace


@dataclass(frozen=True)
class TrainedSpace:
    """What is trained, and what has to be said about it.

    Attributes:
        coordinates: For the training loop.
        l2_clip_norm: C in these coordinates, or where a clip query starts.
        description: The statement's `subspace`; None in the full space.
    """

    coordinates: Coordinates
    l2_clip_norm: float
    description: Mapping[str, Any] | None


def trained_space(
    plan: PartyPlan, model: PartyModel, gradients: PerExampleGradients, corpus: PublicCorpus | None
) -> TrainedSpace:
    """Return the coordinates that the plan trains in, at the shared start.

    Args:
        plan: Its training settings say which.
        model: The party's, at the shared start.
        gradients: Per-example gradients of the classifier.
        corpus: The public texts; None without a subspace, or for random directions.

    Raises:
        DpmergeError: DPM-505 if the public data do not give the directions that are asked for.
    """
    settings = plan.training.subspace
    if settings is None:
        return TrainedSpace(FullSpace(gradients), plan.privacy.l2_clip_norm, None)
    if corpus is not None:
        make_basis = _public_directions(plan, settings, model, gradients, corpus)
    elif isinstance(settings.k, int):
        make_basis = _random_directions(plan, settings.k, gradients)
    else:
        raise ValueError("Expected the public texts that k = 'auto' is chosen by.")
    space = Subspace(gradients, settings, make_basis)
    clip_norm = space.clip_norm(CLIP_QUANTILE) if settings.clip == "public" else plan.privacy.l2_clip_norm
    description = describe_subspace(
        settings,
        corpus,
        k=space.vector.numel(),
        l2_clip_norm=clip_norm,
        seed=plan.seed,
        basis_sha256=space.basis.sha256,
        scales=(float(space.scales.min()), float(space.scales.max())),
    )
    return TrainedSpace(space, clip_norm, description)


def _random_directions(plan: PartyPlan, k: int, gradients: PerExampleGradients) -> MakeBasis:
    return lambda number: random_basis(gradients.theta.numel(), k, f"{plan.seed}|random|{number}")


def _public_directions(
    plan: PartyPlan,
    settings: SubspaceSettings,
    model: PartyModel,
    gradients: PerExampleGradients,
    corpus: PublicCorpus,
) -> MakeBasis:
    """Return what makes bases of public gradients, of as many directions as are stated, or as the rule chooses.

    The rule looks at the widest basis that so many texts give, of which the first k directions are then trained. Its σ
    is that of the widest too: secure noise charges δ for every coordinate, by too little to matter.
    """
    if isinstance(settings.k, int):
        return public_bases(plan, settings.k, model, gradients, corpus)
    widest = max(candidates(len(corpus.texts)))
    wide = public_bases(plan, widest, model, gradients, corpus)(0)
    k = size_for(make_mechanism(plan, widest), wide.coordinates.numpy()).k
    first, later = wide.first(k), public_bases(plan, k, model, gradients, corpus)
    return lambda number: first if number == 0 else later(number)


def public_bases(
    plan: PartyPlan, k: int, model: PartyModel, gradients: PerExampleGradients, corpus: PublicCorpus
) -> MakeBasis:
    """Return what makes bases of public gradients at the θ of the moment, the first one found in the cache if there.

    Args:
        plan: Its base model, adapter and seed.
        k: Directions.
        model: The party's, at the shared start while the first basis is made.
        gradients: Per-example gradients of the classifier.
        corpus: The public texts.
    """
    base, head = model.base, model.head

    @cache
    def activations() -> Activations:
        return Activations(base, model.split, corpus.texts, max_length=plan.base.max_length)

    def made(number: int) -> Basis:
        svd = StreamingSvd(gradients.theta.numel(), k)
        seed = public_seed(f"{plan.seed}|pseudo-labels|{number}")
        for rows in public_gradients(model.classifier, gradients, activations(), seed):
            svd.add(rows)
        return svd.finish()

    identity = {
        "base model": base.sha256,
        "LoRA layout": _hash([asdict(plan.lora), [(slot.name, slot.shape) for slot in gradients.layout]]),
        "head": _hash([head.labels, head.feature_scale, head.weight.tolist()]),
        "public data": corpus.sha256,
        "number of directions": str(k),
        "number of tokens": str(plan.base.max_length),
        "seed": str(plan.seed),
        "kind of pseudo-labels": PSEUDO_LABELS,
        "physical batch": str(gradients.capacity),  # by which labels are drawn and sums are rounded
        "version of torch": torch.__version__,
    }
    return lambda number: cached_basis(identity, lambda: made(0)) if number == 0 else made(number)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
