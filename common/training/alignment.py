"""L2-SP: the penalty on the distance from the shared start.

It is data-free, so its gradient is added to the privatised one after the noise.

The penalty is λ‖w − w₀‖² on what the merge will see. For LoRA with B₀ = 0 the merge sees the delta s·BA, whose
squared Frobenius norm is s² tr((BᵀB)(AAᵀ)): an r×r cost. The alternative pulls the trained factors themselves.

References: L2-SP, arXiv 1802.01483;
alignment to the pretrained reference, DP-Merging, arXiv 2608.26655. Deviation: there on full weights,
here on LoRA's delta or factors; the heads are not pulled, having no part in the merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpmerge.common.config.federation import TrainingSettings
from dpmerge.common.training.optimizer import scheduled


@dataclass(frozen=True)
class LoraView:
    """One LoRA module inside the flat vector θ.

    Attributes:
        lora_a: A [rank, width_in]; a view of θ if it is trained, a constant otherwise.
        b_slice: Slice of θ that holds B.
        b_shape: B's shape (width_out, rank).
        scaling: s in the delta s·BA.
        a_slice: Slice of θ that holds A if it is trained, else None.
    """

    lora_a: Tensor
    b_slice: slice
    b_shape: tuple[int, int]
    scaling: float
    a_slice: slice | None


@torch.no_grad()
def delta_l2_sp(theta: Tensor, modules: tuple[LoraView, ...], strength: float) -> Tensor:
    """Return the gradient of λ Σ ‖s·BA‖²_F with respect to θ [P]; zero outside the LoRA factors.

    ∂/∂B = 2λs² B(AAᵀ), and ∂/∂A = 2λs² (BᵀB)A where A is trained.
    """
    gradient = torch.zeros_like(theta)
    for module in modules:
        b = theta[module.b_slice].view(module.b_shape)
        a = module.lora_a if module.a_slice is None else theta[module.a_slice].view(module.lora_a.shape)
        factor = 2.0 * strength * module.scaling**2
        gradient[module.b_slice] = (factor * (b @ (a @ a.T))).reshape(-1)
        if module.a_slice is not None:
            gradient[module.a_slice] = (factor * ((b.T @ b) @ a)).reshape(-1)
    return gradient


@torch.no_grad()
def factor_l2_sp(theta: Tensor, start: Tensor, modules: tuple[LoraView, ...], strength: float) -> Tensor:
    """Return the gradient 2λ(θ − θ₀) of λ‖θ − θ₀‖² on the LoRA factors [P]; zero elsewhere."""
    gradient = torch.zeros_like(theta)
    for module in modules:
        for part in (module.b_slice, module.a_slice):
            if part is not None:
                gradient[part] = 2.0 * strength * (theta[part] - start[part])
    return gradient


def l2_sp(theta: Tensor, start: Tensor, modules: tuple[LoraView, ...], settings: TrainingSettings, step: int) -> Tensor:
    """Return what the alignment adds to the gradient at `step` (from 0): [P], zero if there is no alignment.

    Args:
        theta: The trainable vector [P].
        start: θ₀ [P], where the training began.
        modules: Where the LoRA factors lie in θ.
        settings: λ with its warm-up, and what it acts on.
        step: Logical step, from 0.
    """
    strength = scheduled(settings.alignment, step, settings.alignment_warmup_steps)
    if strength == 0.0:
        return torch.zeros_like(theta)
    if settings.alignment_on == "delta":
        return delta_l2_sp(theta, modules, strength)
    return factor_l2_sp(theta, start, modules, strength)
