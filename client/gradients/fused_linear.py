"""Linear layers and LoRA linears whose backward writes per-example gradients.

For y = base(x) + s·(x Aᵀ) Bᵀ with h = s·x Aᵀ and output gradient g, example n's gradients are

    ∂B[n] = g[n]ᵀ h[n]        ∂A[n] = (s·g[n] B)ᵀ x[n]

summed over the positions of the example only. That is the product an ordinary backward makes, batched instead of
summed: the same arithmetic, no second pass, no Gram matrices. The weights themselves receive no gradient.

References: per-example gradients of a linear layer, arXiv 1510.01799, eq. 5; LoRA, arXiv 2106.09685, eq. 3.
Deviations: none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dpmerge.client.gradients.rows import GradientRows, Slot
from dpmerge.common.encoder.row_bits import FEWEST_OUTPUTS

Forward = Callable[..., Tensor]


def linear_by_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + c, each row by a product of its own, so that its bits do not depend on how many rows there are.

    Heads have one row per example and few classes: no shape of one product for all of them is safe on every processor.

    Args:
        x: [n, d_in].
        weight: W [d_out, d_in].
        bias: c [d_out], or None.

    >>> linear_by_row(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), None)
    tensor([[11.]])
    """
    scores = torch.bmm(x[:, None], weight.t().expand(len(x), -1, -1))[:, 0]
    return scores if bias is None else scores + bias


def _narrow(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ for a W [r, d] of few rows, widened with zeros to as many as keep every row of x [n, …, d] alike."""
    missing = FEWEST_OUTPUTS - len(weight)
    if missing <= 0:
        return F.linear(x, weight)
    return F.linear(x, F.pad(weight, (0, 0, 0, missing)))[..., : len(weight)]


class _LoraFunction(torch.autograd.Function):
    """base + s·(x Aᵀ) Bᵀ, as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        base: Tensor,
        a: Tensor,
        b: Tensor,
        scaling: float,
        rows: GradientRows,
        slot_a: Slot | None,
        slot_b: Slot | None,
    ) -> Tensor:
        """Map x [n, …, d_in] and base [n, …, d_out] to [n, …, d_out]; A is [r, d_in], B is [d_out, r]."""
        # The scaling goes onto the r-wide tensor: neither pass then touches a d_out-wide one for it.
        h = _narrow(x.to(a.dtype), a) * scaling
        ctx.save_for_backward(x if slot_a else None, h, a, b)
        ctx.scaling, ctx.rows, ctx.slots, ctx.x_dtype = scaling, rows, (slot_a, slot_b), x.dtype
        y = torch.addmm(base.to(b.dtype).flatten(0, -2), h.flatten(0, -2), b.t())
        # As `F.linear` does it: a view would forbid models such as Falcon to add to the output in place.
        result: Tensor = torch.ops.aten._unsafe_view(y, base.shape).to(base.dtype)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Write ∂A[n] and ∂B[n] into the rows; return the gradients of x and of base only."""
        x, h, a, b = ctx.saved_tensors
        slot_a, slot_b = ctx.slots
        wide = g.to(b.dtype)
        grad_x = None
        if slot_b:
            ctx.rows.add_product(slot_b, wide, h)
        if slot_a or ctx.needs_input_grad[0]:
            grad_h = _narrow(wide, b.t()) * ctx.scaling
            if slot_a:
                ctx.rows.add_product(slot_a, grad_h, x)
            if ctx.needs_input_grad[0]:
                grad_x = (grad_h @ a).to(ctx.x_dtype)
        return grad_x, g if ctx.needs_input_grad[1] else None, None, None, None, None, None, None


class _LinearFunction(torch.autograd.Function):
    """x Wᵀ + c, as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: GradientRows,
        slot_weight: Slot | None,
        slot_bias: Slot | None,
    ) -> Tensor:
        """Map x [n, …, d_in] to [n, …, d_out]; weight is [d_out, d_in], bias [d_out] or None."""
        ctx.save_for_backward(x if slot_weight else None, weight)
        ctx.rows, ctx.slots, ctx.x_dtype = rows, (slot_weight, slot_bias), x.dtype
        wide = x.to(weight.dtype)
        return (linear_by_row(wide, weight, bias) if x.dim() == 2 else F.linear(wide, weight, bias)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Write ∂W[n] and ∂c[n] into the rows; return the gradient of x only."""
        x, weight = ctx.saved_tensors
        slot_weight, slot_bias = ctx.slots
        if slot_weight:
            ctx.rows.add_product(slot_weight, g, x)
        if slot_bias:
            ctx.rows.add_sum(slot_bias, g)
        grad_x = None
        if ctx.needs_input_grad[0]:
            wide = g.to(weight.dtype)
            grad_x = (linear_by_row(wide, weight.t(), None) if g.dim() == 2 else wide @ weight).to(ctx.x_dtype)
        return grad_x, None, None, None, None, None


class Fused(NamedTuple):
    """A module that takes the fused path, and the trainable parameters that this settles."""

    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    make_forward: Callable[[GradientRows, dict[int, Slot]], Forward]


def fuse_linear(linear: nn.Linear) -> Fused:
    """Return the fused form of a plain linear layer with a trainable weight, bias, or both."""

    def make_forward(rows: GradientRows, slots: dict[int, Slot]) -> Forward:
        def forward(x: Tensor) -> Tensor:
            weight, bias = linear.weight, linear.bias
            return _apply(_LinearFunction, x, weight, bias, rows, slots.get(id(weight)), slots.get(id(bias)))

        return forward

    return Fused(linear, tuple(p for p in linear.parameters() if p.requires_grad), make_forward)


def fuse_lora(layer: Any, adapter: str) -> Fused:
    """Return the fused form of PEFT's LoRA linear; its scaling is read from the layer at every call.

    Args:
        layer: `peft.tuners.lora.Linear` without variant, bias or dropout in its LoRA part.
        adapter: Its one active adapter.
    """
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    own = layer.forward

    def make_forward(rows: GradientRows, slots: dict[int, Slot]) -> Forward:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if layer.disable_adapters or layer.merged:
                result: Tensor = own(x, *args, **kwargs)
                return result
            base = layer.base_layer(x, *args, **kwargs)
            scaling = layer.scaling[adapter]
            return _apply(_LoraFunction, x, base, a, b, scaling, rows, slots.get(id(a)), slots.get(id(b)))

        return forward

    return Fused(layer, tuple(p for p in (a, b) if p.requires_grad), make_forward)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result
