"""What a party's training will cost and how much it can learn, told before it: from the plan and public texts alone.

No private record is read. Sizes that follow from the plan are computed; time and memory are estimated from one batch
that is measured on the class descriptions, which are public.
"""

from __future__ import annotations

import itertools
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.party.calibration import make_mechanism
from dpmerge.client.party.model import PartyModel, party_model
from dpmerge.client.party.trained_space import PublicBases
from dpmerge.client.privacy.noise import FastNoise, SecureNoise
from dpmerge.client.privacy.privatiser import Privatiser
from dpmerge.common.config.federation import PartyPlan
from dpmerge.common.encoder.base_model import Base, load_base, lora_shapes
from dpmerge.common.encoder.split_encoder import pad, padded_length, tokenize
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy import sizing
from dpmerge.common.privacy.accounting import epsilon_pld
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.public.corpus import public_corpus
from dpmerge.common.public.terms import label_descriptions
from dpmerge.common.statement.subspace_part import SUBSPACE_CLIP_QUANTILE

FACTORS = (0.5, 1.0, 2.0)
"""What the what-if table multiplies ε, B and T by."""

_TURNS = 3  # of which the fastest counts: others may use the machine too
_FLOAT_BYTES = 4

Directions = NDArray[np.float64]
"""Public gradients along their own principal directions [n, k_max], the strongest first."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one party's training takes.

    Attributes:
        num_parameters: P, values of the adapter and a linear head that are trained.
        upload_bytes: The release's tensors; statement and configuration add a few kilobytes.
        memory_bytes: Peak of this process after the measured batch, and the records encoded at full length.
        seconds: Encoding the population once, and T steps, at full length.
        seconds_per_step: One of these steps.
    """

    num_parameters: int
    upload_bytes: int
    memory_bytes: int
    seconds: float
    seconds_per_step: float


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One row of the what-if table: `signal_to_noise` needs public gradients, its bound does not."""

    epsilon: float
    expected_batch_size: int
    num_steps: int
    noise_multiplier: float
    noise_std: float
    signal_to_noise_bound: float
    signal_to_noise: float | None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """All that is told about one party.

    Attributes:
        plan: What was asked for.
        mechanism: Calibrated for it.
        epsilon: What the mechanism costs; infinite without privacy.
        cost: Memory, time, upload.
        planned: Prediction for the plan's own k and C; None without public gradients or privacy.
        size: What the rule would choose; None without public gradients or privacy.
        learning_rate: What the rule would choose; None for an optimizer that it does not know.
        scenarios: The what-if table.
    """

    plan: PartyPlan
    mechanism: Mechanism
    epsilon: float
    cost: Cost
    planned: sizing.Point | None
    size: sizing.Size | None
    learning_rate: float | None
    scenarios: tuple[Scenario, ...]

    @property
    def signal_to_noise_bound(self) -> float:
        """Of one step, whatever the gradients are; infinite without privacy."""
        made = self.mechanism
        return sizing.signal_to_noise_bound(made.num_coordinates, made.noise_multiplier, made.expected_batch_size)


def forecast(plan: PartyPlan, *, full_grid: bool = False) -> Forecast:
    """Forecast one party's training.

    Args:
        plan: The party's plan.
        full_grid: Vary ε, B and T together in the what-if table, in place of one at a time.

    Raises:
        DpmergeError: For a base model, public texts or privacy settings that cannot be used.
    """
    base = load_base(plan.base.model)
    tensors = sum(
        plan.lora.rank * (width_out + width_in) for width_out, width_in in lora_shapes(base, plan.lora).values()
    )
    model = party_model(base, plan)
    num_examples = model.max_examples or plan.training.expected_batch_size
    with PerExampleGradients(model.classifier, max_examples=num_examples) as gradients:
        directions = _directions(plan, model, gradients)
        mechanism, size = _sized(plan, directions, gradients.theta.numel())
        cost = _cost(plan, model, gradients, mechanism, tensors + model.head.weight.numel())
    planned = None if directions is None or size is None else _point(directions, mechanism)
    noise_std = mechanism.noise_std if size is None else size.chosen.noise_std
    return Forecast(
        plan=plan,
        mechanism=mechanism,
        epsilon=epsilon_pld(mechanism) if mechanism.private else math.inf,
        cost=cost,
        planned=planned,
        size=size,
        learning_rate=sizing.learning_rate(plan.training.optimizer, num_steps=mechanism.num_steps, noise_std=noise_std),
        scenarios=tuple(_scenarios(plan, mechanism, directions, full_grid)),
    )


def _sized(plan: PartyPlan, directions: Directions | None, num_parameters: int) -> tuple[Mechanism, sizing.Size | None]:
    """Return the mechanism that the party will train by, and what the rule chooses: with k = "auto" that very k.

    The size is None without privacy, or without public texts enough for the least of its candidates.
    """
    subspace = plan.training.subspace
    if subspace is None or directions is None:
        k = num_parameters if subspace is None else int(subspace.k)
        return make_mechanism(plan.privacy, plan.training, k), None
    size = None
    if not isinstance(subspace.k, int):
        size = sizing.size_for(make_mechanism(plan.privacy, plan.training, directions.shape[1]), directions)
    k = int(subspace.k) if size is None else size.k
    clip_norm = sizing.public_clip_norm(directions, k, SUBSPACE_CLIP_QUANTILE) if subspace.clip == "public" else None
    mechanism = make_mechanism(plan.privacy, plan.training, k, l2_clip_norm=clip_norm)
    if not mechanism.private or not sizing.candidates(len(directions)):
        return mechanism, None
    return mechanism, size or sizing.size_for(mechanism, directions)


def _point(directions: Directions, mechanism: Mechanism) -> sizing.Point:
    """Predict for a mechanism in these directions as it is."""
    return sizing.predict(
        directions,
        mechanism.num_coordinates,
        mechanism.noise_multiplier,
        mechanism.expected_batch_size,
        mechanism.num_steps,
        l2_clip_norm=mechanism.l2_clip_norm,
    )


def _directions(plan: PartyPlan, model: PartyModel, gradients: PerExampleGradients) -> Directions | None:
    """Return public gradients along as many directions as rule and plan may want; None without public texts."""
    subspace = plan.training.subspace
    corpus = None if subspace is None else public_corpus(subspace)
    if subspace is None or corpus is None:
        return None
    stated = subspace.k if isinstance(subspace.k, int) else 0
    widest = max(stated, *sizing.candidates(len(corpus.texts)), 0)
    bases = PublicBases(model, gradients, corpus, lora=plan.lora, max_length=plan.base.max_length, seed=plan.seed)
    return bases.of(widest)(0).coordinates.numpy()


def _cost(
    plan: PartyPlan,
    model: PartyModel,
    gradients: PerExampleGradients,
    mechanism: Mechanism,
    num_uploaded: int,
) -> Cost:
    """Measure one batch of the class descriptions, repeated to the full length, and scale it to the whole training."""
    num_examples, length = gradients.capacity, padded_length(plan.base.max_length, plan.base.max_length)
    ids = _full_length_ids(plan, model.base, num_examples)
    mask, labels = torch.ones_like(ids), torch.arange(num_examples) % len(label_descriptions(plan.source))
    hidden = model.split.trunk(ids, mask)
    encode_seconds = _fastest(lambda: model.split.trunk(ids, mask)) / num_examples
    noise = SecureNoise() if mechanism.noise == "secure" else FastNoise(0)
    privatiser = Privatiser(mechanism, mechanism.num_coordinates, noise)
    projection = None
    if plan.training.subspace is not None:
        projection = torch.zeros(gradients.theta.numel(), mechanism.num_coordinates)

    def batch() -> None:
        rows = gradients.compute(
            lambda: nn.functional.cross_entropy(model.classifier(hidden, mask), labels, reduction="none")
        )
        privatiser.accumulate(rows if projection is None else rows @ projection)

    queries = 2 if mechanism.sharpness == "sam" else 1
    batches = mechanism.expected_batch_size / num_examples
    step_seconds = queries * (batches * _fastest(batch) + _fastest(privatiser.finish))
    encoded_bytes = mechanism.population * length * model.base.width * _FLOAT_BYTES
    return Cost(
        num_parameters=gradients.theta.numel(),
        upload_bytes=num_uploaded * _FLOAT_BYTES,
        memory_bytes=_peak_bytes() + encoded_bytes,
        seconds=mechanism.population * encode_seconds
        + (mechanism.num_steps + mechanism.num_clip_queries) * step_seconds,
        seconds_per_step=step_seconds,
    )


def _full_length_ids(plan: PartyPlan, base: Base, num_examples: int) -> Tensor:
    """Return token ids [n, length] of class descriptions, each repeated until the length is full."""
    length = padded_length(plan.base.max_length, plan.base.max_length)
    tokens = tokenize(base, list(label_descriptions(plan.source).values()), plan.base.max_length)
    filled = [(row * length)[:length] for row in tokens]
    return pad([filled[n % len(filled)] for n in range(num_examples)], int(base.tokenizer.pad_token_id), length)[0]


def _fastest(action: Callable[[], Any]) -> float:
    """Return the least wall-clock seconds of a few turns."""
    times = []
    for _ in range(_TURNS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def _peak_bytes() -> int:
    """Return the largest resident size that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # kilobytes on Linux


def _scenarios(
    plan: PartyPlan, mechanism: Mechanism, directions: Directions | None, full_grid: bool
) -> Iterator[Scenario]:
    """Yield the what-if table; what the mechanism refuses, such as more noise than reaches ε, is left out."""
    if plan.privacy.epsilon is None or not mechanism.private:
        return
    for factors in itertools.product(FACTORS, repeat=3):
        if not full_grid and sum(factor != 1.0 for factor in factors) > 1:
            continue
        batch, steps = round(factors[1] * mechanism.expected_batch_size), round(factors[2] * mechanism.num_steps)
        privacy = replace(plan.privacy, epsilon=factors[0] * plan.privacy.epsilon)
        try:
            training = replace(plan.training, expected_batch_size=max(1, batch), num_steps=max(1, steps))
            changed = replace(plan, privacy=privacy, training=training)
            made = make_mechanism(
                changed.privacy, changed.training, mechanism.num_coordinates, l2_clip_norm=mechanism.l2_clip_norm
            )
        except DpmergeError:
            continue
        bound = sizing.signal_to_noise_bound(made.num_coordinates, made.noise_multiplier, made.expected_batch_size)
        yield Scenario(
            epsilon=float(privacy.epsilon or 0.0),
            expected_batch_size=made.expected_batch_size,
            num_steps=made.num_steps,
            noise_multiplier=made.noise_multiplier,
            noise_std=made.noise_std,
            signal_to_noise_bound=bound,
            signal_to_noise=None if directions is None else _point(directions, made).signal_to_noise,
        )
