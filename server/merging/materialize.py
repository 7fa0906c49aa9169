"""The merged model as a whole: the base model's own weights plus the merged change, written by its own class.

One module's change is built at a time and added in place, so memory is that of the base model and one module. Weights
are read and written as safetensors only, and no code of a model folder is run.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from dpmerge.common.data.assets import ASSETS, model_folder
from dpmerge.common.errors import DpmergeError
from dpmerge.common.untrusted.own_code import NO_CODE, refuse_code
from dpmerge.server.merging.merge import Merged


def open_base(name: str) -> PreTrainedModel:
    """Open a base model by alias, local folder or hub id, in the class and the precision that it was saved in.

    Raises:
        DpmergeError: DPM-204 if it cannot be opened, or has no weights in safetensors.
    """
    source = str(model_folder(name)) if name in ASSETS else name
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    refuse_code(source)
    try:
        architecture = next(iter(AutoConfig.from_pretrained(source, **NO_CODE).architectures or ()), "")
        named = getattr(transformers, architecture, None)
        kind: Any = named if isinstance(named, type) and issubclass(named, PreTrainedModel) else AutoModel
        model: PreTrainedModel = kind.from_pretrained(
            source, dtype="auto", use_safetensors=True, **(NO_CODE if kind is AutoModel else {})
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        fix = "give --base an alias, a folder with config.json and model.safetensors, or a hub id"
        raise DpmergeError("DPM-204", f"base model {name!r} cannot be opened ({first_line})", fix) from error
    return model


@torch.no_grad()
def add_change(model: PreTrainedModel, merged: Merged) -> None:
    """Add a merged change to a model's weights, in place, each sum rounded once to the weight's own precision.

    Args:
        model: From `open_base`.
        merged: From `merge`; its modules are named as in the model, or as in the body inside a model with a head.

    Raises:
        DpmergeError: DPM-402 for a module that the model lacks, that has another shape, no floating-point weight, or
            a weight that another module uses too; nothing is added then. DPM-103 for a sum that the weight's own
            precision cannot hold.
    """
    targets = {name: _weight(model, name) for name in merged.modules}
    for name, (weight, transposed) in targets.items():
        factors = merged.modules[name]
        shape = (len(factors.b), factors.a.shape[1])
        if tuple(weight.T.shape if transposed else weight.shape) != shape:
            problem = f"{name} is {tuple(weight.shape)} in the base model, but its change is {shape}"
            raise DpmergeError("DPM-402", problem, "give --base the model that the adapters were trained on")
    for name, (weight, transposed) in targets.items():
        delta = merged.modules[name].delta()
        changed = weight.float() + (delta.T if transposed else delta)
        if not changed.abs().max() <= torch.finfo(weight.dtype).max:
            problem = f"{name} with the merged change is too large for the base model's {weight.dtype}"
            raise DpmergeError("DPM-103", problem, "give a smaller coefficient or smaller weights")
        weight.copy_(changed)


def save_model(model: PreTrainedModel, base: str, folder: Path) -> None:
    """Write weights, configuration and, where the base model has one, its tokenizer into an existing folder.

    Args:
        model: From `open_base`, changed.
        base: Where the base model was opened from.
        folder: An existing folder.
    """
    model.save_pretrained(folder)
    try:
        source = str(model_folder(base)) if base in ASSETS else base
        AutoTokenizer.from_pretrained(source, **NO_CODE).save_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return  # a model without a tokenizer, such as one of images, is whole without


def _weight(model: PreTrainedModel, name: str) -> tuple[Tensor, bool]:
    """Return a module's weight, and whether it is stored as [in, out]."""
    module: Any = None
    for path in (name, f"{model.base_model_prefix}.{name}"):
        try:
            module = model.get_submodule(path)
            break
        except AttributeError:
            continue
    fix = "give --base the model that the adapters were trained on"
    if module is None:
        raise DpmergeError("DPM-402", f"the base model has no module {name}", fix)
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear | Conv1D) or not isinstance(weight, Tensor) or not weight.is_floating_point():
        fix = "materialize onto the base model in floating point, with plain linear layers"
        raise DpmergeError("DPM-402", f"{name} of the base model is of class {type(module).__name__}", fix)
    users = [key for key, other in model.named_parameters(remove_duplicate=False) if other is weight]
    if len(users) > 1:
        problem = f"{name} shares its weight with others ({', '.join(users)}), which would be changed too"
        raise DpmergeError("DPM-402", problem, "keep the adapter, or untie the base model's weights")
    return weight, isinstance(module, Conv1D)
