"""From a plan to the coordinates that its training works in; private records have no way into this module."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.gradients.public import PSEUDO_LABELS, public_gradients
from dpmerge.client.party.calibration import make_mechanism
from dpmerge.client.party.model import PartyModel
from dpmerge.client.subspace.basis import Basis, StreamingSvd, public_seed, random_basis
from dpmerge.client.subspace.basis_cache import cached_basis
from dpmerge.client.subspace.coordinates import Coordinates, FullSpace, MakeBasis, Subspace
from dpmerge.common.config.federation import LoraSettings, PartyPlan
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.privacy.sizing import candidates, size_for
from dpmerge.common.public.corpus import PublicCorpus
from dpmerge.common.statement.subspace_part import SUBSPACE_CLIP_QUANTILE, describe_subspace


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


@dataclass(frozen=True, eq=False)
class PublicBases:
    """Bases of public gradients at the θ of the moment, the first of which is found in the cache if it is there.

    Attributes:
        model: The party's, at the shared start while the first basis is made.
        gradients: Per-example gradients of the classifier.
        corpus: The public texts.
        lora: The adapter's shape.
        max_length: Tokens kept of each text.
        seed: Public; of pseudo-labels.
    """

    model: PartyModel
    gradients: PerExampleGradients
    corpus: PublicCorpus
    lora: LoraSettings = field(kw_only=True)
    max_length: int = field(kw_only=True)
    seed: int = field(kw_only=True)

    def of(self, k: int) -> MakeBasis:
        """Return what makes bases of k directions."""
        identity = self._identity(k)
        return lambda number: cached_basis(identity, lambda: self._made(k, 0)) if number == 0 else self._made(k, number)

    def _made(self, k: int, number: int) -> Basis:
        svd = StreamingSvd(self.gradients.theta.numel(), k)
        seed = public_seed(f"{self.seed}|pseudo-labels|{number}")
        for rows in public_gradients(self.model.classifier, self.gradients, self._activations, seed):
            svd.add(rows)
        return svd.finish()

    @cached_property
    def _activations(self) -> Activations:
        return Activations(self.model.base, self.model.split, self.corpus.texts, max_length=self.max_length)

    def _identity(self, k: int) -> dict[str, str]:
        """Return all that the first basis is a function of."""
        head = self.model.head
        return {
            "base model": self.model.base.sha256,
            "LoRA layout": _hash([asdict(self.lora), [(slot.name, slot.shape) for slot in self.gradients.layout]]),
            "head": _hash([head.labels, head.feature_scale, head.weight.tolist()]),
            "public data": self.corpus.sha256,
            "number of directions": str(k),
            "number of tokens": str(self.max_length),
            "seed": str(self.seed),
            "kind of pseudo-labels": PSEUDO_LABELS,
            "physical batch": str(self.gradients.capacity),  # by which labels are drawn and sums are rounded
            "version of torch": torch.__version__,
        }


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
        bases = PublicBases(model, gradients, corpus, lora=plan.lora, max_length=plan.base.max_length, seed=plan.seed)
        make_basis = _public_directions(bases, settings.k, lambda k: make_mechanism(plan.privacy, plan.training, k))
    elif isinstance(settings.k, int):
        make_basis = _random_directions(plan.seed, settings.k, gradients)
    else:
        raise ValueError("Expected the public texts that k = 'auto' is chosen by.")
    space = Subspace(gradients, settings, make_basis)
    clip_norm = space.clip_norm(SUBSPACE_CLIP_QUANTILE) if settings.clip == "public" else plan.privacy.l2_clip_norm
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


def _random_directions(seed: int, k: int, gradients: PerExampleGradients) -> MakeBasis:
    return lambda number: random_basis(gradients.theta.numel(), k, f"{seed}|random|{number}")


def _public_directions(bases: PublicBases, k: int | str, mechanism_of: Callable[[int], Mechanism]) -> MakeBasis:
    """Return what makes bases of public gradients, of as many directions as are stated, or as the rule chooses.

    The rule looks at the widest basis that so many texts give, of which the first k directions are then trained. Its σ
    is that of the widest too: secure noise charges δ for every coordinate, by too little to matter.
    """
    if isinstance(k, int):
        return bases.of(k)
    widest = max(candidates(len(bases.corpus.texts)))
    wide = bases.of(widest)(0)
    chosen = size_for(mechanism_of(widest), wide.coordinates.numpy()).k
    first, later = wide.first(chosen), bases.of(chosen)
    return lambda number: first if number == 0 else later(number)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
