"""The private training loop: one party, one mechanism, T logical steps.

Read `train` and you have read it all. Private records touch it in one place, `_private_rows`, and leave it through the
`Privatiser`; everything after that line is post-processing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from dpmerge.client.gradients.fused_linear import linear_by_row
from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.privacy.clip_query import with_private_clip_norm
from dpmerge.client.privacy.noise import NoiseSource
from dpmerge.client.privacy.privatiser import Privatiser
from dpmerge.client.privacy.sampling import PoissonSampler
from dpmerge.client.privacy.units import Users
from dpmerge.client.subspace.coordinates import Coordinates, FullSpace, SubspaceState
from dpmerge.client.training.sharpness import AscentMemory, perturbation, perturbed
from dpmerge.common.config.federation import TrainingSettings
from dpmerge.common.encoder.activations import Activations, Batch
from dpmerge.common.encoder.split_encoder import SplitEncoder, pool
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.training.alignment import LoraView, l2_sp
from dpmerge.common.training.optimizer import make_optimizer, scheduled


class Classifier(nn.Module):
    """The trained half of the encoder with a linear head on its pooled, scaled features."""

    def __init__(self, encoder: nn.Module, split: SplitEncoder, head: nn.Linear, feature_scale: float) -> None:
        super().__init__()
        self.encoder = encoder  # registered, so that its trainable parameters are found; run through the split
        self.head = head
        self._split = split
        self._feature_scale = feature_scale

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Hidden states at the split [n, length, width] and mask [n, length] → class scores [n, classes]."""
        features = self._feature_scale * pool(self._split.top(hidden, mask), mask)
        if any(parameter.requires_grad for parameter in self.head.parameters()):
            scores: Tensor = self.head(features)
            return scores
        return linear_by_row(features, self.head.weight, self.head.bias)


@dataclass(frozen=True)
class PrivateData:
    """One party's records, encoded: never leaves the process.

    Attributes:
        activations: The records at the split.
        labels: Class indices, int64 [N].
        users: Whose records they are, where the unit of privacy is a user; None where it is a record.
    """

    activations: Activations
    labels: Tensor
    users: Users | None = None

    @property
    def num_units(self) -> int:
        """How many records, or users, the party holds: what Poisson samples are drawn of. Private."""
        return len(self.labels) if self.users is None else len(self.users)


@dataclass
class TrainingState:
    """Everything a killed training needs to go on under the same reservation.

    Attributes:
        step: Logical steps done.
        theta: The trainable vector [P].
        optimizer: The optimizer's state dict.
        direction: Next ascent direction, in the coordinates that are trained, or None.
        sampler: The sampler's cipher state.
        noise: The noise's ratcheted state; earlier noise cannot be recomputed from it.
        subspace: Where a training in a subspace is; None in the full space.
        l2_clip_norm: C of the steps to come; before the first step, of the clip query if there is one.
    """

    step: int
    theta: Tensor
    optimizer: dict[str, Any]
    direction: Tensor | None
    sampler: bytes
    noise: bytes
    subspace: SubspaceState | None = None
    l2_clip_norm: float | None = None


def train(
    model: Classifier,
    data: PrivateData,
    gradients: PerExampleGradients,
    lora: tuple[LoraView, ...],
    mechanism: Mechanism,
    settings: TrainingSettings,
    sampler: PoissonSampler,
    noise: NoiseSource,
    *,
    coordinates: Coordinates | None = None,
    resume_from: TrainingState | None = None,
    after_step: Callable[[int, Callable[[], TrainingState]], None] = lambda _step, _state: None,
) -> Mechanism:
    """Run the mechanism's clip query, if it has one, and its T steps, and return it with the clip norm of the steps.

    θ (`gradients.theta`) holds the final iterate afterwards.

    Args:
        model: What is trained; its trainable parameters are views of θ.
        data: The party's records.
        gradients: Per-example gradients of `model`, and θ.
        lora: Where the LoRA factors lie in θ, for the L2-SP gradient.
        mechanism: σ, C, q, B, T and the form of sharpness; the only source of these numbers.
        settings: Optimizer, learning rate, radius, weight of L2-SP.
        sampler: Draws the Poisson samples of the data's units.
        noise: Draws the noise; it forgets how after every query.
        coordinates: What is trained of θ; None is all of it.
        resume_from: State of an interrupted run under the same reservation.
        after_step: Called with the number of steps done (0 before the first) and a function that captures the state.

    Raises:
        ValueError: If the data's unit is not the one that the mechanism is accounted for.
        DpmergeError: DPM-503 if θ did not move in the first step, or the model no longer shares its storage.

    Guarantees:
        One record (or user) added or removed changes the distribution of (θ_1 … θ_T) by at most what `mechanism` is
        accounted for: each step, and the clip query, is `mechanism`'s query, and the rest is a function of its answers
        and of public constants. The final iterate is the result; nothing is selected by a loss.
    """
    if (mechanism.privacy_unit == "user") != (data.users is not None):
        raise ValueError(f"Expected data whose unit is privacy_unit={mechanism.privacy_unit!r}, as accounted.")
    theta, start = gradients.theta, gradients.theta.clone()
    space = FullSpace(gradients) if coordinates is None else coordinates
    if resume_from is not None:
        space.restore(resume_from.step, resume_from.theta, resume_from.subspace)
        if resume_from.step and mechanism.num_clip_queries:
            mechanism = replace(mechanism, l2_clip_norm=resume_from.l2_clip_norm)

    def new_optimizer() -> torch.optim.Optimizer:
        made = make_optimizer(settings.optimizer, space.vector, settings.learning_rate, noise_std=mechanism.noise_std)
        space.check_storage(made.param_groups[0]["params"])
        return made

    optimizer, memory, first_step = new_optimizer(), AscentMemory(mechanism.sharpness), 0
    if resume_from is not None:
        first_step = resume_from.step
        optimizer.load_state_dict(resume_from.optimizer)
        memory.direction = resume_from.direction

    def capture(steps_done: int) -> TrainingState:
        state = (optimizer.state_dict(), memory.direction, sampler.state(), noise.state(), space.state())
        return TrainingState(steps_done, theta.clone(), *state, mechanism.l2_clip_norm)

    if resume_from is None:
        after_step(0, partial(capture, 0))  # before any noise is drawn: an open reservation always has a state
    if first_step == 0 and mechanism.num_clip_queries:
        rows = _private_rows(sampler.sample(), model, data, space)
        mechanism = with_private_clip_norm(mechanism, noise, rows)
        optimizer = new_optimizer()  # dp-adam knows its noise, which is relative to C
    num_coordinates = space.vector.numel()
    descent = Privatiser(mechanism, num_coordinates, noise, query="descent")
    ascent = Privatiser(mechanism, num_coordinates, noise, query="ascent") if mechanism.sharpness == "sam" else None

    for step in range(first_step, mechanism.num_steps):
        if space.refresh(step, mechanism.noise_std):  # other coordinates: moments and directions of ascent start anew
            optimizer, memory = new_optimizer(), AscentMemory(mechanism.sharpness)
        sample = sampler.sample()
        direction = memory.direction
        if ascent is not None:
            direction = space.gradient(_private_gradient(ascent, sample, model, data, space))
            if mechanism.ascent_sampling == "separate":
                sample = sampler.sample()
        climb = perturbation(direction, scheduled(settings.rho, step, settings.rho_warmup_steps))
        with perturbed(theta, None if climb is None else space.lift(climb)):
            gradient = space.gradient(_private_gradient(descent, sample, model, data, space))
        before = space.vector.clone()
        space.vector.grad = gradient + space.project(l2_sp(theta, start, lora, settings, step))
        optimizer.step()
        space.place(gradient)
        memory.remember(gradient, before, space.vector)
        if step == 0:
            _check_movement(start, theta)
            space.check_storage(optimizer.param_groups[0]["params"])
        after_step(step + 1, partial(capture, step + 1))
    return mechanism


def _private_gradient(
    privatiser: Privatiser, sample: Tensor, model: Classifier, data: PrivateData, space: Coordinates
) -> Tensor:
    """Return the mechanism's answer about one Poisson sample of units.

    In the full space it is the privatised mean gradient [P], in a subspace that of D⁻¹Qg [k].
    """
    for rows in _private_rows(sample, model, data, space):
        privatiser.accumulate(rows)
        del rows  # before the next batch's are computed
    return privatiser.finish()


def _private_rows(sample: Tensor, model: Classifier, data: PrivateData, space: Coordinates) -> Iterable[Tensor]:
    """Return the rows to clip of some units (positions, int64 [m], m may be 0), in batches: for a privatiser only."""

    def rows_of(batch: Batch) -> Tensor:
        labels = data.labels[batch.filled]
        rows = space.compute(
            lambda: nn.functional.cross_entropy(model(batch.hidden, batch.mask), labels, reduction="none")
        )
        return rows[: len(batch.records)]  # the others only fill the shape: nothing of them is summed

    def record_rows(records: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in data.activations.batches(records, space.capacity):
            yield batch.records, rows_of(batch)

    gradients: Iterator[Tensor] = map(itemgetter(1), record_rows(sample))
    if data.users is not None:
        gradients = data.users.rows(sample, space.capacity, record_rows)
    return space.rows(gradients)


def _check_movement(before: Tensor, after: Tensor) -> None:
    if torch.equal(before, after):
        raise DpmergeError(
            "DPM-503",
            "the first step moved no trainable tensor although its ε is spent",
            "check that the model was not copied or moved after its parameters were handed to the optimizer, and that "
            "training.learning_rate is not too small for fp32",
        )
