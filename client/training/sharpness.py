"""Where the gradient is taken: directions of ascent made from privatised gradients only.

DP-SGD's gradient at w becomes the gradient at w + e, ‖e‖ = ρ, which prefers flat minima. Whatever e is made of must
be private already: the previous steps' privatised gradients (`sat`), the path walked so far (`sat-momentum`), or a
privatised ascent query of the same step (`sam`, the only form that asks the data twice). A direction from the raw
gradient would be a leak.

References: DP-SAT, arXiv 2306.05651; paired-query DP-SAM, DP-Merging, arXiv 2608.26655; SAM, arXiv 2010.01412.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def perturbation(direction: Tensor | None, radius: float) -> Tensor | None:
    """Return ρ·d/‖d‖ for a direction d [P] of privatised origin; None where there is none yet or it is zero.

    >>> perturbation(torch.tensor([3.0, 4.0]), 0.5)
    tensor([0.3000, 0.4000])
    """
    if direction is None or radius == 0.0:
        return None
    norm = torch.linalg.vector_norm(direction)
    return direction * (radius / norm) if norm > 0 else None


@contextmanager
def perturbed(theta: Tensor, ascent: Tensor | None) -> Iterator[None]:
    """Hold θ at θ + e inside the block, for one logical step however many physical batches it takes.

    θ comes back from a saved copy, bit for bit. Subtracting e again would leave rounding behind, and undoing it once
    per physical batch, as published code does, lets the weights drift.
    """
    if ascent is None:
        yield
        return
    saved = theta.clone()
    theta.add_(ascent)
    try:
        yield
    finally:
        theta.copy_(saved)


class AscentMemory:
    """What `sat` and `sat-momentum` remember from one step to the next: vectors that are private already.

    Attributes:
        direction: The next step's ascent direction [P], None before the first step and for the other forms.
    """

    def __init__(self, sharpness: str) -> None:
        self._sharpness = sharpness
        self.direction: Tensor | None = None

    def remember(self, private_gradient: Tensor, theta_before: Tensor, theta_after: Tensor) -> None:
        """Keep g̃ (`sat`) or w_{t−1} − w_t (`sat-momentum`) for the next step."""
        if self._sharpness == "sat":
            self.direction = private_gradient.clone()
        elif self._sharpness == "sat-momentum":
            self.direction = theta_before - theta_after
