"""The shared pretrained model: loading it, and LoRA on chosen layers.

Both sides use this module: a party trains the top of the model, the server evaluates it. Nothing here sees a label or
a loss.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from dpmerge.common.data.assets import ASSETS, model_folder
from dpmerge.common.encoder.architecture import check_config, check_encoder, find_layers
from dpmerge.common.encoder.attention import always_mask
from dpmerge.common.errors import DpmergeError, closest
from dpmerge.common.release.format import PEFT_PREFIX
from dpmerge.common.untrusted.own_code import NO_CODE, refuse_code

if TYPE_CHECKING:
    from dpmerge.common.config.federation import LoraSettings

UNHASHED_SETTINGS = frozenset({"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Settings of a model that say where it lies and who wrote it, not what it computes."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A frozen pretrained model, its tokenizer, and the hash by which parties and server know that they share it.

    Attributes:
        name: An alias, a hub id or a folder's own name; never a path, because it is written into every release.
        encoder: A `transformers` model whose output has `last_hidden_state` [n, length, width].
        tokenizer: Its tokenizer.
        sha256: Hash over the configuration, every weight's name, shape, dtype and bytes, and the tokenizer's rules.
        layers: Dotted name of the `ModuleList` of transformer layers inside the encoder.
    """

    name: str
    encoder: nn.Module
    tokenizer: Any
    sha256: str
    layers: str

    @property
    def num_layers(self) -> int:
        """Number of transformer layers."""
        return len(cast(nn.ModuleList, self.encoder.get_submodule(self.layers)))

    @property
    def width(self) -> int:
        """Width of the last hidden state."""
        return int(cast(Any, self.encoder.config).hidden_size)


def load_base(name: str) -> Base:
    """Load a base model by alias of the asset list, local folder, or hub id, in fp32, frozen, in evaluation mode.

    Raises:
        DpmergeError: DPM-104 for a misspelt alias; DPM-201 or DPM-202 for an embedded asset; DPM-204 if the folder
            or id cannot be opened as an encoder.
    """
    is_alias = name in ASSETS
    aliases = sorted(key for key, asset in ASSETS.items() if asset.kind == "model")
    if not is_alias and not Path(name).exists() and difflib.get_close_matches(name, aliases, n=1, cutoff=0.8):
        raise DpmergeError(  # at once, rather than after a minute of asking a hub for a misspelt alias
            "DPM-104",
            f"base.model = {name!r} is neither an alias nor a folder",
            f"use one of {', '.join(aliases)}{closest(name, aliases)}",
        )
    source = str(model_folder(name)) if is_alias else name
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    refuse_code(source)
    encoder, tokenizer = _opened(source, name, aliases)
    _choose_filler(tokenizer, name)
    encoder.eval().requires_grad_(False)
    always_mask(encoder)
    check_encoder(encoder, name)
    public_name = name if is_alias or not Path(name).exists() else Path(name).resolve().name
    encoder.name_or_path = public_name  # PEFT copies it into every adapter_config.json
    return Base(
        name=public_name,
        encoder=encoder,
        tokenizer=tokenizer,
        sha256=_base_hash(encoder, tokenizer),
        layers=find_layers(encoder, name),
    )


def _opened(source: str, name: str, aliases: Sequence[str]) -> tuple[Any, Any]:
    """Return encoder and tokenizer of a folder or hub id; no code of theirs is run."""
    try:
        check_config(AutoConfig.from_pretrained(source, **NO_CODE), name)
        encoder = AutoModel.from_pretrained(source, dtype=torch.float32, **NO_CODE)
        return encoder, AutoTokenizer.from_pretrained(source, **NO_CODE)
    except DpmergeError:
        raise
    except Exception as error:  # a damaged folder fails in as many ways as there are libraries that read it
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DpmergeError(
            "DPM-204",
            f"base.model = {name!r} cannot be opened ({first_line})",
            f"give one of {', '.join(aliases)}, "
            "a folder with config.json, weights and tokenizer, or a hub id that this machine can reach",
        ) from error


def _choose_filler(tokenizer: Any, name: str) -> None:
    """Let the tokenizer pad with some token of its own; what it is does not matter, since padding is masked."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        fix = "name a pad_token in the tokenizer's configuration"
        raise DpmergeError("DPM-204", f"the tokenizer of base.model = {name!r} has no token to pad with", fix)


def _base_hash(encoder: nn.Module, tokenizer: Any) -> str:
    digest = hashlib.sha256()
    # What the forward pass computes depends on the configuration too: heads, norms, activations, positions.
    config = cast(Any, encoder.config).to_dict()
    settings = {key: value for key, value in config.items() if key not in UNHASHED_SETTINGS}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for key, value in sorted(encoder.state_dict().items()):
        digest.update(f"{key}|{tuple(value.shape)}|{value.dtype}|".encode())
        digest.update(value.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    rules = getattr(tokenizer, "backend_tokenizer", None)
    if rules is not None:
        # Truncation and padding are set on every call and are no part of what the tokenizer is.
        rules.no_truncation()
        rules.no_padding()
    digest.update((rules.to_str() if rules is not None else repr(sorted(tokenizer.get_vocab().items()))).encode())
    return digest.hexdigest()


def adapted_layers(base: Base, layers: str | Sequence[int]) -> tuple[int, ...]:
    """Resolve `lora.layers` ("all", "last:2" or indices) to layer indices in ascending order.

    Raises:
        DpmergeError: DPM-103 if the base model has no such layer.
    """
    total = base.num_layers
    if layers == "all":
        return tuple(range(total))
    if isinstance(layers, str):
        match = re.fullmatch(r"last:(\d+)", layers)
        count = int(match.group(1)) if match else 0
        chosen = tuple(range(total - count, total)) if 1 <= count <= total else ()
    else:
        chosen = tuple(sorted(set(layers))) if all(0 <= index < total for index in layers) else ()
    if not chosen:
        raise DpmergeError(
            "DPM-103",
            f"lora.layers = {layers!r} names no layers of {base.name}, which has {total}",
            f'use "all", "last:1" to "last:{total}", or indices from 0 to {total - 1}',
        )
    return chosen


def target_modules(base: Base, lora: LoraSettings) -> tuple[str, ...]:
    """Expand `lora.targets` to the full names of linear modules inside the adapted layers.

    Full names, because PEFT does not accept "all-linear" beside a choice of layers, and by itself would adapt linears
    that the forward pass never uses, such as BERT's pooler.

    Raises:
        DpmergeError: DPM-103 if a target matches no linear module; the message lists those there are.
    """
    chosen: list[str] = []
    available: set[str] = set()
    wanted = lora.targets
    matched: set[str] = set()
    for index in adapted_layers(base, lora.layers):
        prefix = f"{base.layers}.{index}"
        for name, module in base.encoder.get_submodule(prefix).named_modules():
            if not isinstance(module, nn.Linear | Conv1D):
                continue
            available.add(name)
            hits = {target for target in wanted if name == target or name.endswith("." + target)}
            if wanted == "all-linear" or hits:
                chosen.append(f"{prefix}.{name}")
                matched |= hits
    if not available:
        fix = "choose a model whose layers are made of torch.nn.Linear, or of GPT-2's Conv1D"
        raise DpmergeError("DPM-204", f"{base.name} has no linear module in the layers {lora.layers!r}", fix)
    unmatched = [] if isinstance(wanted, str) else [target for target in wanted if target not in matched]
    if unmatched or not chosen:
        raise DpmergeError(
            "DPM-103",
            f"lora.targets = {unmatched or wanted!r} matches no linear module of {base.name}",
            f'use "all-linear" or names among {", ".join(sorted(available))}',
        )
    return tuple(chosen)


def lora_shapes(base: Base, lora: LoraSettings) -> dict[str, tuple[int, int]]:
    """Return the full name of each adapted linear → (width_out, width_in).

    Raises:
        DpmergeError: DPM-103 if the rank is larger than a width: such a change is no longer of low rank.
    """
    modules = {name: base.encoder.get_submodule(name) for name in target_modules(base, lora)}
    shapes = {name: _widths(module) for name, module in modules.items()}
    name, smallest = min(shapes.items(), key=lambda item: min(item[1]))
    if lora.rank > min(smallest):
        raise DpmergeError(
            "DPM-103",
            f"lora.rank = {lora.rank} is larger than the width {min(smallest)} of {name}",
            f"choose a rank of at most {min(smallest)}",
        )
    return shapes


def _widths(module: Any) -> tuple[int, int]:
    """Return (width_out, width_in); Conv1D, a linear layer for all its name, stores its weight as [in, out]."""
    if isinstance(module, Conv1D):
        return int(module.weight.shape[1]), int(module.weight.shape[0])
    return int(module.out_features), int(module.in_features)


def lora_config(base: Base, lora: LoraSettings) -> LoraConfig:
    """Return PEFT's configuration for these settings: explicit targets, no dropout, no bias."""
    targets = target_modules(base, lora)
    return LoraConfig(
        base_model_name_or_path=base.name,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(targets),
        fan_in_fan_out=all(isinstance(base.encoder.get_submodule(name), Conv1D) for name in targets),
        lora_dropout=0.0,
        bias="none",
        use_rslora=lora.rslora,
        inference_mode=False,
    )


def adapter_config(base: Base, lora: LoraSettings) -> dict[str, Any]:
    """Return the `adapter_config.json` that every release of these settings carries, as JSON values."""
    config = {**lora_config(base, lora).to_dict(), "inference_mode": True}
    return {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in config.items()
    }


def attach_lora(base: Base, lora: LoraSettings, *, seed: int) -> PeftModel:
    """Wrap the base encoder, in place, with LoRA modules whose A is the same at every party and whose B is zero.

    Each A [rank, width_in] is uniform on ±1/√width_in (PEFT's own initialisation) from a generator seeded by the
    public run seed and the module's name alone, so parties and server derive equal bytes whatever else they do. A is
    trainable only if `lora.train_a`.
    """
    config = lora_config(base, lora)
    model = get_peft_model(cast(Any, base.encoder), config)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            module_name = name.split(".lora_A.")[0].removeprefix(PEFT_PREFIX)
            parameter.data.copy_(shared_a(seed, module_name, parameter.shape))
            parameter.requires_grad_(lora.train_a)
        elif ".lora_B." in name:
            parameter.data.zero_()
    model.eval()
    return model


def shared_a(seed: int, module_name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the common start of one LoRA A, fp32 of `shape` = (rank, width_in), from public randomness only."""
    digest = hashlib.sha256(f"dpmerge shared A|{seed}|{module_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)
