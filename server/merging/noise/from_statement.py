"""How much of an adapter is noise, told from its statement alone.

The server knows σ, C, B, T and the public optimizer. Feeding that optimizer pure noise of the stated scale, from the
common start, tells how far noise alone carries an adapter: noise_share = min(1, ‖B_noise‖² / ‖B‖²). It is an
estimate, and an upper one where the optimizer is adaptive: Adam divides by the root of signal plus noise, so that
signal makes the noise's steps smaller than here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dpmerge.common.config.federation import TrainingSettings
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.training.alignment import LoraView, l2_sp
from dpmerge.common.training.optimizer import make_optimizer, scheduled
from dpmerge.server.merging.adapters.deltas import LowRankDelta


def noise_share(mechanism: Mechanism, training: TrainingSettings, modules: Mapping[str, LowRankDelta]) -> float | None:
    """Return the estimated share in [0, 1] of ‖B‖² that is noise; None without privacy (no noise) or for B = 0.

    Args:
        mechanism: As stated by the release.
        training: The statement's public settings: optimizer, learning rate, alignment, subspace.
        modules: The release's factors per module; B started at zero.
    """
    observed = sum(float(item.b.square().sum()) for item in modules.values())
    if not mechanism.private or observed == 0.0:
        return None
    views, stop = [], 0
    for item in modules.values():
        a, b = item.a, item.b
        b_slice = slice(stop, stop + b.numel())
        views.append(LoraView(a, b_slice, (b.shape[0], b.shape[1]), item.scaling, None))
        stop = b_slice.stop
    if training.subspace is None:
        start, lora = torch.zeros(stop), tuple(views)
        return min(
            1.0, _walk(mechanism, training, stop, lambda x, step: l2_sp(x, start, lora, training, step)) / observed
        )
    stiffness = _stiffness(training, views)

    def pull_on_coordinates(x: Tensor, step: int) -> Tensor:
        return 2.0 * scheduled(training.alignment, step, training.alignment_warmup_steps) * stiffness * x

    return min(1.0, _walk(mechanism, training, mechanism.num_coordinates, pull_on_coordinates) / observed)


def _walk(
    mechanism: Mechanism, training: TrainingSettings, num_coordinates: int, pulled: Callable[[Tensor, int], Tensor]
) -> float:
    """Return how far, squared, noise alone takes the optimizer, which a refreshed subspace starts anew each time.

    Of a subspace the directions are not needed: noise has none, and the lift to θ keeps lengths. The walks between
    refreshes are taken to be at right angles, and noise to be spread evenly; an allocation keeps its total.
    """
    generator = torch.Generator().manual_seed(0)  # an estimate for the report: reproducible, no privacy rests on it
    scale, num_steps = mechanism.noise_std, mechanism.num_steps
    every = (training.subspace and training.subspace.refresh_every_steps) or num_steps
    squared = 0.0
    for first in range(0, num_steps, every):
        x = torch.zeros(num_coordinates)
        optimizer = make_optimizer(training.optimizer, x, training.learning_rate, noise_std=scale)
        for step in range(first, min(first + every, num_steps)):
            x.grad = scale * torch.randn(num_coordinates, generator=generator) + pulled(x, step)
            optimizer.step()
        squared += float(x.square().sum())
    return squared


def _stiffness(training: TrainingSettings, views: list[LoraView]) -> float:
    """Return the factor on λθ in the pull: 1 on the factors; on the delta s² times the mean eigenvalue of AAᵀ."""
    if training.alignment_on == "factors":
        return 1.0
    total = sum(float(view.lora_a.square().sum()) * view.scaling**2 for view in views)
    return total / sum(len(view.lora_a) for view in views)
