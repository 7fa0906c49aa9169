"""The optimizers by name, and the schedules.

Public: parties step with them, and the server replays them on pure noise to tell noise from signal.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from torch import Tensor

from dpmerge.common.config.sections import Optimizer

OPTIMIZERS = get_args(Optimizer)

SECOND_MOMENT_FLOOR = 0.1
"""Least corrected second moment of `DPAdam`, as a multiple of the noise variance.

On pure noise the corrected moment is zero on average, and strays from it by √(2/t) of the variance after t < 1/(1 − β₂)
steps (0.22 at 40 steps), by 0.03 in the long run. The floor must be of that order: far below it, chance alone decides
the largest steps; at 1 only coordinates whose signal outweighs the noise are corrected. At 0.1 a coordinate that holds
nothing but noise moves at most about 1/√0.1 ≈ 3 times as far as under Adam.
"""


class DPAdam(torch.optim.Optimizer):
    """Adam with the known variance of the noise taken out of its second moment.

    Under noise of variance s² Adam's v estimates E[g²] + s², so that where noise prevails every coordinate is divided
    by about s and Adam is momentum at rate lr/s. Here the step is

        lr · m̂ / (√max(v̂ − s², SECOND_MOMENT_FLOOR · s²) + eps).

    With s = 0 it is Adam. At the same learning rate its steps are up to 3 times as long as Adam's (see the floor).

    Args:
        params: Parameters, or groups of them, as for any torch optimizer.
        lr: Learning rate.
        noise_std: s = σC/B, standard deviation of the noise in each coordinate of the gradient; 0 without privacy.
        betas: Decay of the two moments, in [0, 1).
        eps: Numerical guard, as Adam's.

    Guarantees: a function of privatised gradients and public constants.

    References:
        DP-AdamBC, arXiv 2312.14334, Algorithm 1; the bias, arXiv 2304.10853.

    Deviations:
        The floor is a multiple of the noise variance rather than a constant to be tuned; eps is kept beside it.
    """

    def __init__(
        self, params: Any, lr: float, *, noise_std: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        if not (math.isfinite(noise_std) and noise_std >= 0):
            raise ValueError(f"Expected noise_std={noise_std} to be finite and at least 0.")
        super().__init__(params, {"lr": lr, "noise_std": noise_std, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; there is no loss to re-evaluate, so a closure is refused."""
        if closure is not None:
            raise ValueError("Expected closure=None: evaluating a private loss again is another query.")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _dp_adam_step(parameter, group, self.state[parameter])


def _dp_adam_step(parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    if not state:
        state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    state["step"] += 1
    beta1, beta2 = group["betas"]
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(parameter.grad, 1 - beta1)
    square.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
    moment = corrected_second_moment(square / (1 - beta2 ** state["step"]), group["noise_std"])
    parameter.addcdiv_(mean, moment.sqrt_().add_(group["eps"]), value=-group["lr"] / (1 - beta1 ** state["step"]))


def corrected_second_moment(moment: Tensor, noise_std: float) -> Tensor:
    """Return v̂ − s², floored at `SECOND_MOMENT_FLOOR`·s², for a bias-corrected second moment v̂ of noisy gradients.

    >>> corrected_second_moment(torch.tensor([0.5, 4.0, 5.0]), noise_std=2.0)
    tensor([0.4000, 0.4000, 1.0000])
    """
    variance = noise_std**2
    return (moment - variance).clamp_min(SECOND_MOMENT_FLOOR * variance)


def make_optimizer(name: str, theta: Tensor, learning_rate: float, *, noise_std: float) -> torch.optim.Optimizer:
    """Return a torch optimizer over the single flat vector θ [P], at a constant learning rate.

    Args:
        name: One of `OPTIMIZERS`.
        theta: The vector.
        learning_rate: Step size.
        noise_std: `Mechanism.noise_std` of the gradients to come; only "dp-adam" makes use of it.

    Raises:
        ValueError: If the name is unknown.

    >>> make_optimizer("momentum", torch.zeros(3), 0.1, noise_std=0.01).defaults["momentum"]
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
    if name == "dp-adam":
        return DPAdam([theta], learning_rate, noise_std=noise_std)
    raise ValueError(f"Expected name={name!r} to be one of {OPTIMIZERS}.")


def scheduled(value: float, step: int, warmup_steps: int) -> float:
    """Return a schedule's value at `step` (from 0): linear from value/warmup_steps up to value, then constant.

    >>> [scheduled(0.4, step, 4) for step in (0, 1, 3, 9)]
    [0.1, 0.2, 0.4, 0.4]
    """
    return value * min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else value
