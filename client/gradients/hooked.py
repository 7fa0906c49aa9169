"""Per-example gradients of any other module, by Opacus's hooks: layer norms, embeddings, convolutions, IA³, prefixes.

Opacus keeps each hooked module's input, multiplies it with the output gradient (or re-runs the module under `vmap`
where it has no formula), and leaves a `grad_sample` at the parameter; here that becomes part of the common rows. It
costs more time and memory than the fused path: the input of every hooked module, and a second copy of its rows.

References: Opacus, arXiv 2109.12298, section 3.
Deviations: works in evaluation mode too; an adapter without a forward of its own (IA³'s vectors) is hooked at the
module that applies it; what Opacus would get wrong in silence is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from torch import Tensor, nn

from dpmerge.client.gradients.rows import GradientRows, Slot
from dpmerge.common.errors import DpmergeError


class _Hooks(GradSampleHooks):  # type: ignore[misc]
    """Opacus's hooks on chosen modules."""

    def __init__(self, module: nn.Module, hosts: list[nn.Module]) -> None:
        self._hosts = hosts
        super().__init__(module, loss_reduction="sum", strict=False)

    def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
        yield from self._hosts

    def capture_activations_hook(self, module: Any, forward_input: tuple[Any, ...], _forward_output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not forward_input or not isinstance(forward_input[0], Tensor):
            raise _refusal(f"a {type(module).__name__}", "is called without its input as first positional argument")
        if not hasattr(module, "activations"):
            module.activations = []
        module.activations.append([t.detach() for t in forward_input if isinstance(t, Tensor)])
        for parameter in _trainable(module):
            parameter._forward_counter += 1  # type: ignore[attr-defined]


class HookedGradients:
    """Collects into the rows what the hooks left at the parameters.

    Args:
        module: The whole model.
        parameters: The trainable parameters to cover, by dotted name.
        slots: Slot by `id(parameter)`.
        rows: Where gradients are gathered.

    Raises:
        DpmergeError: DPM-502 for a parameter of a module that Opacus cannot tell apart by example.
    """

    def __init__(
        self, module: nn.Module, parameters: dict[str, nn.Parameter], slots: dict[int, Slot], rows: GradientRows
    ) -> None:
        self._slots = {p: slots[id(p)] for p in parameters.values()}
        self._rows = rows
        self._hosts = list(_hosts(module, parameters).values())
        self._hooks = _Hooks(module, self._hosts)
        # Opacus gives an embedding's padding row the gradient that torch withholds.
        self._padding_rows = {
            host.weight: host.padding_idx
            for host in self._hosts
            if isinstance(host, nn.Embedding) and host.padding_idx is not None
        }
        self._is_checked = False

    def open(self) -> None:
        """Forget what an earlier pass left, also one that stopped half-way."""
        for host in self._hosts:
            for leftover in ("activations", "max_batch_len"):
                if hasattr(host, leftover):
                    delattr(host, leftover)
        for parameter in self._slots:
            _reset(parameter)

    def backward(self, losses: Tensor, weights: Tensor) -> None:
        """Run autograd's backward, and hand what the hooks left to the rows.

        Raises:
            DpmergeError: DPM-502 if the hooks saw another pass than autograd did. The first pass compares the two in
            full.
        """
        with warnings.catch_warnings():
            # A lowest layer's input needs no gradient; Opacus's hooks do not use it.
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            torch.autograd.backward(losses, weights)
        for parameter, slot in self._slots.items():
            if parameter.grad is None:  # the losses do not depend on it
                continue
            sample = parameter.grad_sample  # type: ignore[attr-defined]
            if not isinstance(sample, Tensor) or parameter._forward_counter:  # type: ignore[attr-defined]
                raise _refusal(
                    slot.name, "is used outside its module's forward, or its module runs under gradient checkpointing"
                )
            if not self._is_checked and _disagrees(sample, parameter.grad):
                raise _refusal(slot.name, "is used outside its module's forward as well")
            if parameter in self._padding_rows:
                sample[:, self._padding_rows[parameter]] = 0.0
            self._rows.add(slot, sample)
            _reset(parameter)
        self._is_checked = True

    def close(self) -> None:
        """Remove the hooks and what Opacus stored at the parameters."""
        self.open()
        self._hooks.cleanup()


def _hosts(module: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Module]:
    """Return the modules to hook by name: each parameter's nearest ancestor that has a forward."""
    modules = dict(module.named_modules())
    covered = {id(p) for p in parameters.values()}
    hosts: dict[str, nn.Module] = {}
    for name in parameters:
        host = name.rpartition(".")[0]
        while type(modules[host]).forward is nn.Module.forward and host:
            host = host.rpartition(".")[0]
        hosts[host] = modules[host]
    for name, host_module in hosts.items():
        label = name or type(host_module).__name__
        if type(host_module) not in GradSampleHooks.GRAD_SAMPLERS and any(True for _ in host_module.buffers()):
            raise _refusal(label, f"({type(host_module).__name__}) has buffers")
        if any(id(p) not in covered for p in _trainable(host_module)):
            raise _refusal(label, f"({type(host_module).__name__}) contains modules that are trained by another path")
        if any(other.startswith(f"{name}." if name else "") for other in hosts if other != name):
            raise _refusal(label, f"({type(host_module).__name__}) is trained as a whole and in a part of it")
    return hosts


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _reset(parameter: Any) -> None:
    parameter.grad = parameter.grad_sample = None
    parameter._forward_counter = 0
    if hasattr(parameter, "_current_grad_sample"):
        del parameter._current_grad_sample


def _disagrees(sample: Tensor, total: Tensor) -> bool:
    """Tell whether the rows' sum is another than autograd's gradient; a non-finite one never does."""
    gap = torch.linalg.vector_norm(sample.sum(0) - total)
    scale = torch.linalg.vector_norm(sample.reshape(len(sample), -1), dim=1).sum()
    return bool(gap > 1e-2 * scale)


def _refusal(name: str, problem: str) -> DpmergeError:
    return DpmergeError("DPM-502", f"{name} {problem}", "freeze it, or train LoRA on linear layers")
