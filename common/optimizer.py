"""The optimizers by name, and the schedules.

Public: parties step with them, and the server replays them on pure noise to tell noise from signal.
"""

from __future__ import annotations

import torch
from torch import Tensor

OPTIMIZERS = ("adam", "adamw", "momentum", "sgd")


def make_optimizer(name: str, theta: Tensor, learning_rate: float) -> torch.optim.Optimizer:
    """Return a torch optimizer over the single flat vector θ [P], at a constant learning rate.

    >>> make_optimizer("momentum", torch.zeros(3), 0.1).defaults["momentum"]
    0.9
    """
    if name == "adam":
        return torch.optim.Adam([theta], lr=learning_rate)
    if name == "adamw":
        return torch.optim.AdamW([theta], lr=learning_rate)
    if name == "momentum":
        return torch.optim.SGD([theta], lr=learning_rate, momentum=0.9)
    if name == "sgd":
        return torch.optim.SGD([theta], lr=learning_rate)
    raise ValueError(f"Expected name={name!r} to be one of {OPTIMIZERS}.")


def scheduled(value: float, step: int, warmup_steps: int) -> float:
    """Return a schedule's value at `step` (from 0): linear from value/warmup_steps up to value, then constant.

    >>> [scheduled(0.4, step, 4) for step in (0, 1, 3, 9)]
    [0.1, 0.2, 0.4, 0.4]
    """
    return value * min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else value
