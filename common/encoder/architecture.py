"""Which models can be a base: one stack of layers over the tokens of a text, whatever the family.

Everything here is decided by the configuration and one forward pass over made-up token ids, before a record is read.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from dpmerge.common.errors import DpmergeError

NUM_PROBE_TOKENS = 4
_FIX = "choose a text model with one stack of layers: an encoder such as BERT, or a decoder such as Llama"


def check_config(config: Any, name: str) -> None:
    """Refuse by its configuration what is no model of texts with one stack of layers.

    Raises:
        DpmergeError: DPM-204 for encoder–decoders and for models that see or hear.
    """
    kind = f"base.model = {name!r} is of type {config.model_type}"
    if getattr(config, "is_encoder_decoder", False):
        raise DpmergeError("DPM-204", f"{kind}, an encoder with a decoder", _FIX)
    others = sorted(key for key in getattr(config, "sub_configs", {}) if key != "text_config")
    if others or config.get_text_config() is not config:
        raise DpmergeError("DPM-204", f"{kind}, put together of several models ({', '.join(others)})", _FIX)


def check_encoder(encoder: nn.Module, name: str) -> None:
    """Refuse a model that token ids and a mask alone do not lead to a last hidden state of the stated width.

    Raises:
        DpmergeError: DPM-204 with the model's class.
    """
    kind = f"base.model = {name!r}, a {type(encoder).__name__},"
    if getattr(encoder, "main_input_name", "input_ids") != "input_ids":
        raise DpmergeError("DPM-204", f"{kind} does not take token ids", _FIX)
    ids = torch.zeros(1, NUM_PROBE_TOKENS, dtype=torch.long)
    try:
        with torch.no_grad():
            hidden = encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    except Exception as error:  # a model's own forward fails in as many ways as there are models
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DpmergeError("DPM-204", f"{kind} cannot run on token ids and a mask ({first_line})", _FIX) from error
    expected = (1, NUM_PROBE_TOKENS, int(cast(Any, encoder.config).hidden_size))
    if tuple(hidden.shape) != expected:
        problem = f"{kind} ends in states of shape {list(hidden.shape)} where {list(expected)} are expected"
        raise DpmergeError("DPM-204", problem, _FIX)


def find_layers(encoder: nn.Module, name: str) -> str:
    """Return the dotted name of the stack of transformer layers: a `ModuleList` outside any other.

    Of several it is the one that is as long as the configuration says.

    Raises:
        DpmergeError: DPM-204 if there is none, or no way to tell.
    """
    stacks = {
        key: module for key, module in encoder.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    outermost = {k: m for k, m in stacks.items() if not any(k.startswith(other + ".") for other in stacks)}
    if len(outermost) > 1:
        stated = getattr(encoder.config, "num_hidden_layers", None)
        outermost = {key: stack for key, stack in outermost.items() if len(stack) == stated} or outermost
    if len(outermost) != 1:
        found = f"more than one ({', '.join(sorted(outermost))})" if outermost else "none"
        problem = f"base.model = {name!r}, a {type(encoder).__name__}, should have one stack of layers and has {found}"
        raise DpmergeError("DPM-204", problem, _FIX)
    return str(next(iter(outermost)))


def num_positions(encoder: nn.Module) -> int | None:
    """Return how many tokens the model has positions for, or None if its configuration states no limit.

    RoBERTa, MPNet and their kin count positions from one past the padding id: of 514 rows they use 512.
    """
    positions = getattr(encoder.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    for name, module in encoder.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return min(positions, module.num_embeddings - unused)
    return positions
