"""Whether adapters fit onto the base model, where that lies on this machine: names and shapes, without its weights."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import Adapter
from dpmerge.server.merging.adapters.lazy_tensors import StoredTensor


def shapes_of(folder: Path) -> dict[str, tuple[int, int]] | None:
    """Return (out, in) of every linear layer and embedding of a base model, by name; None if it cannot be opened.

    The model is built from its configuration, without numbers. No code of the folder runs.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        with torch.device("meta"):
            if isinstance(named, type) and issubclass(named, PreTrainedModel):
                model: Any = named(config)
            else:
                model = AutoModel.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError):
        return None
    return {name: shape for name, module in model.named_modules() if (shape := _shape(module))}


def misplaced(adapters: Sequence[Adapter], folder: Path) -> list[DpmergeError]:
    """Return what does not fit: an adapter of which the base model has no module at all, and modules of other shapes.

    A module that lies in a head is not looked for, since the base model may be used with another; neither is any of an
    adapter that names at least one module of the base model.

    Args:
        adapters: What is merged.
        folder: Of the base model.
    """
    shapes = shapes_of(folder)
    if not shapes:
        return []
    refusals = []
    fix = "give --base the model that the adapter was trained on"
    for adapter in adapters:
        found = {name: here for name in adapter.modules if (here := _found(shapes, name))}
        if not found:
            problem = f"{adapter.party}: the base model has none of its modules, such as {min(adapter.modules)}"
            refusals.append(DpmergeError("DPM-402", problem, fix))
        for name, shape in sorted(found.items()):
            if adapter.modules[name].shape != shape:
                problem = f"{adapter.party}: {name} is {adapter.modules[name].shape} but {shape} in the base model"
                refusals.append(DpmergeError("DPM-402", problem, fix))
        refusals += _other_copies(adapter, folder)
    return refusals


def _found(shapes: Mapping[str, tuple[int, int]], name: str) -> tuple[int, int] | None:
    """Look a module up by its name in the model or in the body inside a model with a head, either way round."""
    if name in shapes:
        return shapes[name]
    within, without = f".{name}", name.partition(".")[2]
    return next((shape for other, shape in shapes.items() if other.endswith(within)), shapes.get(without))


def _shape(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, nn.Embedding):
        return module.embedding_dim, module.num_embeddings
    return (int(module.nf), int(module.nx)) if isinstance(module, Conv1D) else None


def _other_copies(adapter: Adapter, folder: Path) -> Iterator[DpmergeError]:
    """Yield the copies of the base model's weights that came with an adapter and are not those of the base model."""
    for name, copy in sorted(adapter.copies.items()):
        own = _weight_sha256(folder, name)
        if own and isinstance(copy, StoredTensor) and copy.sha256 != own:
            problem = (
                f"{adapter.party}: its copy of {name} is not the base model's: the vocabulary or the layer changed"
            )
            yield DpmergeError("DPM-402", problem, "train the adapter on the base model as it is")


def _weight_sha256(folder: Path, name: str) -> bytes:
    """Return the SHA-256 of a weight's numbers as fp32; empty if it is not there under this name."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                for key in tensors.keys():
                    if key == f"{name}.weight" or key.endswith(f".{name}.weight"):
                        return hashlib.sha256(tensors.get_tensor(key).float().contiguous().numpy().data).digest()
        except SafetensorError:
            return b""
    return b""
