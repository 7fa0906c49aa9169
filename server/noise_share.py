"""How much of an adapter is noise, told from its statement alone.

The server knows σ, C, B, T and the public optimizer. Feeding that optimizer pure noise of the stated scale, from the
common start, tells how far noise alone carries an adapter: noise_share = min(1, ‖B_noise‖² / ‖B‖²). It is an
estimate, and an upper one where the optimizer is adaptive: Adam divides by the root of signal plus noise, so that
signal makes the noise's steps smaller than here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dpmerge.common.alignment import LoraView, pull
from dpmerge.common.config import TrainingSettings
from dpmerge.common.mechanism import Mechanism
from dpmerge.common.optimizer import make_optimizer
from dpmerge.server.merging.deltas import Factors


def noise_share(mechanism: Mechanism, training: TrainingSettings, modules: Mapping[str, Factors]) -> float | None:
    """Return the estimated share in [0, 1] of ‖B‖² that is noise; None without privacy (no noise) or for B = 0.

    Args:
        mechanism: As stated by the release.
        training: The statement's public settings: optimizer, learning rate, alignment.
        modules: The release's factors per module; B started at zero.
    """
    observed = sum(float(item.b.square().sum()) for item in modules.values())
    if not mechanism.private or observed == 0.0:
        return None
    views, stop = [], 0
    for item in modules.values():
        b_slice = slice(stop, stop + item.b.numel())
        views.append(LoraView(item.a, b_slice, (item.b.shape[0], item.b.shape[1]), item.scaling, None))
        stop = b_slice.stop
    theta, start = torch.zeros(stop), torch.zeros(stop)
    scale = mechanism.noise_std
    optimizer = make_optimizer(training.optimizer, theta, training.learning_rate, noise_std=scale)
    generator = torch.Generator().manual_seed(0)  # an estimate for the report: reproducible, no privacy rests on it
    for step in range(mechanism.num_steps):
        theta.grad = scale * torch.randn(stop, generator=generator) + pull(theta, start, tuple(views), training, step)
        optimizer.step()
    return min(1.0, float(theta.square().sum()) / observed)
