"""Exact per-example gradients in one backward pass, and the flat vector θ that training works on.

    with PerExampleGradients(model) as gradients:
        rows = gradients.compute(lambda: cross_entropy(model(x), y, reduction="none"))   # [n, P]
        gradients.theta.sub_(0.1 * rows.mean(0))                                         # moves the model

LoRA linears and plain linear layers take the fused path (`fused_linear`); any other trainable module goes through
Opacus's hooks (`hooked_gradients`). Both fill the same rows. What cannot be told apart by example is refused by
name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpmerge.client.gradients.hooked import HookedGradients
from dpmerge.client.gradients.routes import fusable, lora_dropouts
from dpmerge.client.gradients.rows import GradientRows, Slot
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.mechanism import COMPANY_MARGIN

DEFAULT_MEMORY_BUDGET_BYTES = 2**30

_ALONE_TOLERANCE = 1e-3  # relative: batches of another shape are rounded otherwise, by far less


class PerExampleGradients:
    """Per-example gradients of a module's trainable parameters.

    Args:
        module: Whatever the losses run through: a `PeftModel`, with or without a head, or any module. Trainable is
            what has `requires_grad`. Its parameters become views of `theta`; fp16 and bf16 ones become fp32.
        max_examples: Upper limit on the physical batch, or None.
        memory_budget_bytes: Upper limit on the memory of per-example gradients, which is twice that of the rows [n, P]
            for a moment; with `max_examples` it settles `capacity`.
        fused: False sends everything through Opacus, for comparison.

    Raises:
        DpmergeError: DPM-502, with the module named, for what cannot be clipped by example: batch statistics, dropout
            inside a LoRA path in training mode, DoRA and other LoRA variants, LoRA bias, adapters on other than
            linear layers, a parameter tied to a module of another kind, a budget under one row. DPM-503 if nothing is
            trainable.

    Guarantees:
        Row n is a function of θ and of example n, provided that loss n is (`check_independent` tests that).

    Deviations: none; the rows are exact, not an approximation.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        max_examples: int | None = None,
        memory_budget_bytes: int = DEFAULT_MEMORY_BUDGET_BYTES,
        fused: bool = True,
    ) -> None:
        if max_examples is not None and max_examples < 1:
            raise ValueError(f"Expected max_examples={max_examples} to be at least 1 or None.")
        self._module = module
        self._batch_norms = [(name, m) for name, m in module.named_modules() if isinstance(m, _BatchNorm)]
        self._lora_dropouts = list(lora_dropouts(module))
        self._refuse_coupling()
        fused_modules = fusable(module) if fused else []
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise DpmergeError(
                "DPM-503", "the model has no trainable parameter", "attach an adapter or call requires_grad_(True)"
            )
        self._theta, self._layout = _flatten(self._parameters)
        self._capacity = _capacity(self._theta, max_examples, memory_budget_bytes)
        self._rows = GradientRows(self._theta.numel(), self._theta.dtype, self._theta.device)

        slots = {id(p): slot for p, slot in zip(self._parameters.values(), self._layout, strict=True)}
        claimed = {id(p) for one in fused_modules for p in one.parameters}
        self._fused_parameters = {name: p for name, p in self._parameters.items() if id(p) in claimed}
        hooked = {name: p for name, p in self._parameters.items() if id(p) not in claimed}
        self._hooked = HookedGradients(module, hooked, slots, self._rows) if hooked else None
        self._own_forwards: list[tuple[nn.Module, Any]] | None = []
        for one in fused_modules:
            self._own_forwards.append((one.module, one.module.__dict__.get("forward")))
            one.module.forward = one.make_forward(self._rows, slots)

    @property
    def theta(self) -> Tensor:
        """The trainable vector θ [P], of which every trainable parameter is a view; fp32 (fp64 if a parameter is).

        It has no history and needs no `no_grad`: give it to an optimizer, set its `.grad`, add to it in place.
        """
        return self._theta

    @property
    def layout(self) -> tuple[Slot, ...]:
        """Where each parameter lies in θ, in the module's order."""
        return self._layout

    @property
    def capacity(self) -> int:
        """The largest number of examples that `compute` takes at once; split larger logical batches."""
        return self._capacity

    def compute(self, losses: Callable[[], Tensor]) -> Tensor:
        """Run the forward pass, then one backward pass; return every example's gradient.

        Args:
            losses: Runs the module on n ≤ `capacity` examples and returns their losses [n]; loss n depends on example
                n alone. An example's own normalisation (a mean over its tokens) is fine, one over the batch is not.

        Returns:
            Rows [n, P] in θ's dtype, which are the caller's: overwrite them at will, and let go of them before the next
            call, or they add to its peak memory. A non-finite example spoils its own row only.

        Raises:
            ValueError: The losses are not a vector of 1 to `capacity` entries that depend on a trainable parameter.
            DpmergeError: DPM-502 if a trainable weight is used in a way that cannot be told apart by example.
        """
        if self._own_forwards is None:
            raise ValueError("Expected open gradients in compute(); close() has been called.")
        self._refuse_coupling()
        self._clear_gradients()
        if self._hooked:
            self._hooked.open()
        with torch.enable_grad():
            values = losses()
        self._check_losses(values)
        self._rows.open(values.shape[0])
        backward = self._hooked.backward if self._hooked else torch.autograd.backward
        backward(values, torch.ones_like(values))
        self._refuse_stray_gradients()
        return self._rows.close(self._layout)

    def check_storage(self, optimizer_parameters: Iterable[Tensor]) -> None:
        """Refuse to go on if optimizer, θ and module no longer share one storage.

        Args:
            optimizer_parameters: The tensors that the optimizer steps, as in `optimizer.param_groups[0]["params"]`.

        Raises:
            DpmergeError: DPM-503 with the likely cause.
        """
        if not any(_is_view(p, self._theta, 0) and p.numel() == self._theta.numel() for p in optimizer_parameters):
            raise DpmergeError(
                "DPM-503",
                "the optimizer does not step the trained vector θ",
                "build the optimizer over [gradients.theta]",
            )
        current = dict(self._module.named_parameters())
        for slot in self._layout:
            if slot.name not in current or not _is_view(current[slot.name], self._theta, slot.start):
                raise DpmergeError(
                    "DPM-503",
                    f"{slot.name} no longer shares its storage with the trained vector θ: the model was moved, cast, "
                    "reloaded or wrapped after its gradients were set up, and would never change",
                    "move and wrap the model first, then build PerExampleGradients and the optimizer",
                )

    def check_independent(
        self, losses: Callable[[Tensor], Tensor], num_examples: int, *, num_bystanders: int, fewest: int | None = None
    ) -> None:
        """Test on public or made-up examples that a gradient does not change with the company it is in.

        A batch is computed, then again with every example at another place, then the first of them in the smallest
        batch, and each half of them among copies of one other example. Finds couplings down to what `COMPANY_MARGIN`
        covers: batch statistics, in-batch negatives,
        packed sequences, products whose last bits depend on the place. One example alone shows what all share: a
        denominator that is the batch's size. Run it in evaluation mode: random masks differ from call to call.

        Args:
            losses: Maps positions of examples, int64 [n] and possibly repeated, to their losses [n].
            num_examples: How many there are, at least 2: the rows of one batch.
            num_bystanders: How many rows may change together when a unit comes or goes.
            fewest: Rows of the smallest batch, where batches differ in size.

        Raises:
            DpmergeError: DPM-502 if a gradient changes by more.
        """
        if num_examples < 2:
            raise ValueError(f"Expected num_examples={num_examples} to be at least 2.")
        everybody = torch.arange(num_examples)
        together = self.compute(lambda: losses(everybody))
        norms = torch.linalg.vector_norm(together, dim=1)
        allowed = COMPANY_MARGIN / (2 * max(1, num_bystanders)) * norms.clamp_min(1e-3 * float(norms.max()))
        half, stranger = num_examples // 2, torch.zeros_like(everybody)
        for places, kept in (
            (everybody.roll(1 + half), everybody >= 0),
            (everybody[:fewest], everybody[:fewest] >= 0),
            (torch.where(everybody < half, everybody, stranger + num_examples - 1), everybody < half),
            (torch.where(everybody < half, stranger, everybody), everybody >= half),
        ):
            again = self.compute(lambda places=places: losses(places))  # type: ignore[misc]
            change = torch.linalg.vector_norm(again - together[places], dim=1)
            _refuse_company(bool((change <= allowed[places])[kept].all()))
        alone = self.compute(lambda: losses(everybody[:1]))[0]
        _refuse_company(bool(torch.linalg.vector_norm(together[0] - alone) <= _ALONE_TOLERANCE * norms[0]))

    def close(self) -> None:
        """Give the module its own forwards back; its parameters remain views of θ."""
        for module, own in self._own_forwards or ():
            if own is None:
                del module.forward
            else:
                module.forward = own
        self._own_forwards = None
        if self._hooked:
            self._hooked.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_losses(self, losses: Tensor) -> None:
        if losses.dim() != 1 or not 1 <= losses.shape[0] <= self._capacity:
            raise ValueError(
                f"Expected losses of shape {list(losses.shape)} to be one loss per example, [n] with n from 1 to "
                f"capacity={self._capacity}; use reduction='none', and split larger batches."
            )
        if not losses.requires_grad:
            raise ValueError("Expected losses that depend on a trainable parameter; they have no gradient.")

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _refuse_stray_gradients(self) -> None:
        """Refuse a fused weight that autograd reached: not through its own forward, so something else used it."""
        stray = [name for name, p in self._fused_parameters.items() if p.grad is not None]
        if stray:
            raise DpmergeError(
                "DPM-502",
                f"{stray[0]} is used outside its own module's forward, so its gradient cannot be told apart by example",
                "freeze it, or train the modules that use it through their forward",
            )

    def _refuse_coupling(self) -> None:
        """Refuse what the mode decides; asked again at every step, because train() and eval() may come at any time."""
        for name, norm in self._batch_norms:
            if norm.training or norm.running_mean is None:
                raise DpmergeError(
                    "DPM-502",
                    f"{name} normalises with batch statistics",
                    f"call eval() on it, or replace the {type(norm).__name__}",
                )
        for name, layer, dropout in self._lora_dropouts:
            if layer.training:
                raise DpmergeError(
                    "DPM-502",
                    f"{name} has lora_dropout = {dropout} in training mode",
                    "set lora_dropout = 0, or call eval() on the model",
                )


def _flatten(parameters: dict[str, nn.Parameter]) -> tuple[Tensor, tuple[Slot, ...]]:
    """Move the parameters into one vector θ, of which they become views."""
    devices = Counter(p.device for p in parameters.values())
    if len(devices) > 1:
        raise DpmergeError(
            "DPM-502", f"trainable parameters lie on {', '.join(map(str, devices))}", "move the model to one device"
        )
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters.values()) else torch.float32
    theta = torch.cat([p.detach().reshape(-1).to(dtype) for p in parameters.values()])
    layout: list[Slot] = []
    start = 0
    for name, parameter in parameters.items():
        stop = start + parameter.numel()
        parameter.data = theta[start:stop].view(parameter.shape)
        layout.append(Slot(name, tuple(parameter.shape), start, stop))
        start = stop
    return theta, tuple(layout)


def _capacity(theta: Tensor, max_examples: int | None, memory_budget_bytes: int) -> int:
    row_bytes = 2 * theta.numel() * theta.element_size()  # the pieces, and the rows they are gathered into
    fitting = memory_budget_bytes // row_bytes
    if fitting < 1:
        raise DpmergeError(
            "DPM-502",
            f"one example's gradient takes {row_bytes} bytes and memory_budget_bytes = {memory_budget_bytes}",
            "raise the budget, or lower lora.rank or the number of adapted layers",
        )
    return fitting if max_examples is None else min(fitting, max_examples)


def _refuse_company(holds: bool) -> None:
    if not holds:
        raise DpmergeError(
            "DPM-502",
            "an example's gradient changes with the other examples of its batch",
            "remove batch statistics, batch-dependent denominators, in-batch negatives and packed sequences; "
            "if there are none, lower expected_batch_size: this machine rounds a row by its place in the batch",
        )


def _is_view(tensor: Tensor, theta: Tensor, start: int) -> bool:
    return tensor.device == theta.device and tensor.data_ptr() == theta.data_ptr() + start * theta.element_size()
