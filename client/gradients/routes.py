"""Which trainable modules take the fused path, and which adapters no path can tell apart by example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import nn

from dpmerge.client.gradients.fused_linear import Fused, fuse_linear, fuse_lora
from dpmerge.common.errors import DpmergeError


def fusable(module: nn.Module) -> list[Fused]:
    """Choose the modules that take the fused path, and refuse adapters that no path can take."""
    fused: list[Fused] = []
    inside_lora: set[nn.Module] = set()
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer) and _adapter_is_trainable(layer):
            adapter = _check_lora(name, layer)
            fused.append(fuse_lora(layer, adapter))
            inside_lora |= {layer.lora_A[adapter], layer.lora_B[adapter]}
        elif type(layer) is nn.Linear and layer not in inside_lora and any(p.requires_grad for p in layer.parameters()):
            fused.append(fuse_linear(layer))
    _refuse_ties(module, fused, inside_lora)
    return fused


def lora_dropouts(module: nn.Module) -> Iterator[tuple[str, nn.Module, float]]:
    """Yield each LoRA layer that drops inputs in training mode, with its rate."""
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            for dropout in layer.lora_dropout.values():
                if getattr(dropout, "p", 0.0) > 0.0:
                    yield name, layer, dropout.p


def _adapter_is_trainable(layer: Any) -> bool:
    return any(p.requires_grad for name, p in layer.named_parameters() if not name.startswith("base_layer."))


def _check_lora(name: str, layer: Any) -> str:
    """Return the layer's one active adapter, or refuse the layer."""
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    if type(layer) is not LoraLinear:
        problem = f"is an adapter of type {type(layer).__module__}.{type(layer).__name__}, not a LoRA linear"
    elif len(active) != 1:
        problem = f"has {len(active)} active adapters"
    elif layer.use_dora[active[0]]:
        problem = "uses DoRA"
    elif active[0] in layer.lora_variant:
        problem = f"uses the LoRA variant {type(layer.lora_variant[active[0]]).__name__}"
    elif layer.lora_bias[active[0]]:
        problem = "has lora_bias"
    elif layer.merged:
        problem = "is merged into its base layer"
    else:
        return str(active[0])
    raise DpmergeError("DPM-502", f"{name} {problem}", "train one plain, unmerged LoRA adapter on linear layers")


def _refuse_ties(module: nn.Module, fused: list[Fused], inside_lora: set[nn.Module]) -> None:
    """Refuse a parameter shared with a module of another kind; among fused modules the contributions add up."""
    claimed = {id(p) for one in fused for p in one.parameters}
    known = inside_lora | {one.module for one in fused}
    for name, other in module.named_modules():
        for own_name, parameter in other.named_parameters(recurse=False):
            if id(parameter) in claimed and other not in known:
                raise DpmergeError(
                    "DPM-502",
                    f"{name}.{own_name} is trainable and tied to a linear layer",
                    "freeze it, or untie the two",
                )
