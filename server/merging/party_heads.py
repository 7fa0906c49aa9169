"""One party's head on a merged model: what PEFT trained whole under `modules_to_save` is kept per party, not merged.

    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model = PeftModel.from_pretrained(model, "merged")
    load_head(model, Path("merged"), "shop")

Parties answer different questions, so that the mean of their heads answers none.
"""

from pathlib import Path

import torch
from torch import nn

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import MODULES, by_party
from dpmerge.server.merging.adapters.lazy_tensors import open_tensors


@torch.no_grad()
def load_head(model: nn.Module, folder: Path, party: str) -> list[str]:
    """Copy a party's head into a model, in place.

    Args:
        model: The base model with a head of the party's classes, also with the merged adapter around it.
        folder: A merged model's.
        party: Whose head.

    Returns:
        The names of the parameters that were filled.

    Raises:
        DpmergeError: DPM-104 for a party without a head there; DPM-402 for a model that has no place for it.
    """
    file = folder / MODULES
    heads = by_party(open_tensors(file, f"{folder}: {MODULES}", ("F32",))[0]) if file.is_file() else {}
    if party not in heads:
        kept = f"it has those of {', '.join(sorted(heads))}" if heads else "no adapter brought one"
        raise DpmergeError("DPM-104", f"{folder} has no head of {party!r}", kept)
    parameters, targets = dict(model.named_parameters()), {}
    for name, stored in heads[party].items():
        fitting = [key for key in parameters if key == name or key.endswith(f".{name}")]
        if len(fitting) != 1 or tuple(parameters[fitting[0]].shape) != stored.shape:
            found = ", ".join(f"{key} {tuple(parameters[key].shape)}" for key in fitting) or "nothing of this name"
            fix = "open the base model with a head of the party's number of classes"
            raise DpmergeError("DPM-402", f"{party}: {name} is {stored.shape}, and the model has {found}", fix)
        targets[fitting[0]] = stored
    for key, stored in targets.items():
        parameters[key].copy_(stored.read())
    return sorted(targets)
