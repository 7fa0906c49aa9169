"""The names in an adapter's file: modules as the base model calls them, and what each tensor is of its module."""

import re
from collections.abc import Collection, Iterable
from typing import Literal

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import ADAPTER
from dpmerge.server.merging.adapters.settings import HEAD_MODULES, shown

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What torch.compile, FSDP and activation checkpointing put into names, wherever they wrap."""
MAX_NAME = 384  # characters of a module's name

Part = Literal["A", "B", "embedding_A", "embedding_B", "magnitude_vector", "base", "saved"]

_PARTS = (
    re.compile(r"(.+)\.lora_(A|B)(?:\.default)?\.weight"),
    re.compile(r"(.+)\.lora_(embedding_[AB])(?:\.default)?"),
    re.compile(r"(.+)\.lora_(magnitude_vector)(?:\.default)?(?:\.weight)?"),
)
_BASE = re.compile(r"(.+)\.base_layer\.weight")

_EXPLAINED = {
    "trainable_tokens": ("replaces rows of the embedding", "train without trainable_token_indices"),
    "bias": ("is a trained bias", "train with bias = 'none' and lora_bias = false"),
}


def plain_name(stem: str) -> str:
    """Return a module's name in the base model: without PEFT's prefix, also repeated, and what libraries wrap around.

    >>> plain_name("module.base_model.model.base_model.model._orig_mod.layer.0._checkpoint_wrapped_module.query")
    'layer.0.query'
    """
    segments = [segment for segment in stem.split(".") if segment not in WRAPPERS]
    while segments[:1] == ["module"] and segments[1:3] == ["base_model", "model"]:
        segments = segments[1:]
    while segments[:2] == ["base_model", "model"] and len(segments) > 2:
        segments = segments[2:]
        if segments[:3] == ["module", "base_model", "model"]:
            segments = segments[1:]
    return ".".join(segments)


def unwrapped(names: Collection[str]) -> dict[str, str]:
    """Return what each name is without `module`, which DistributedDataParallel puts before all names of a model.

    It is taken off only where all names have it: a model may have a module of its own of this name.

    >>> unwrapped(["module.q", "module.k"]), unwrapped(["module.q", "k"])
    ({'module.q': 'q', 'module.k': 'k'}, {'module.q': 'module.q', 'k': 'k'})
    """
    plain = {name: name for name in names}
    while plain and all(name.startswith("module.") for name in plain.values()):
        plain = {name: rest.removeprefix("module.") for name, rest in plain.items()}
    return plain


def read_key(key: str, party: str) -> tuple[str, Part]:
    """Return what a tensor belongs to, by its key: the module's plain name, and which part of it.

    Of the part "saved", a whole module beside LoRA, it is the name of the tensor itself, such as `classifier.weight`.

    Args:
        key: A tensor's key, as PEFT wrote it.
        party: Whose adapter it is, for refusals.

    Raises:
        DpmergeError: DPM-402 for a key that has no place in a merge, or a name that no module of a base model has.
    """
    for pattern in _PARTS:
        if found := pattern.fullmatch(key):
            return _checked(plain_name(found[1]), key, party), found[2]  # type: ignore[return-value]  # by the pattern
    if found := _BASE.fullmatch(key):
        return _checked(plain_name(found[1]), key, party), "base"
    name = plain_name(key.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", "."))
    if HEAD_MODULES & set(name.split(".")[:-1]) and "lora_" not in name:
        return _checked(name, key, party), "saved"
    raise _out_of_place(key, party)


def escaped(name: str) -> str:
    r"""Return a pattern that matches a text as it is, in the forms that `patterns` takes.

    >>> escaped("layers.0.q-proj")
    'layers\\.0\\.q\\-proj'
    """
    return re.sub(r"[^\w\s]", r"\\\g<0>", name)


def has_tail(name: str, tails: Iterable[str]) -> bool:
    """Tell whether PEFT finds a module by a list of names: one of them is the name, or the end of it after a dot.

    Args:
        name: A module's dotted name.
        tails: Ends of dotted names.
    """
    return any(name == tail or name.endswith(f".{tail}") for tail in tails)


def _checked(name: str, key: str, party: str) -> str:
    segments = name.split(".")
    bad = [s for s in segments if not s or s[0] == "_" or s == "base_model" or not s.isprintable() or " " in s]
    if bad or len(name) > MAX_NAME:
        problem = f"{party}: {ADAPTER}: {shown(key)} names no module of a base model"
        problem += f": {shown(bad[0])} is left of what a library put around it" if bad and bad[0] else ""
        fix = "save the adapter from the model itself: unwrap it first, as with accelerate's unwrap_model"
        raise DpmergeError("DPM-402", problem, fix)
    return name


def _out_of_place(key: str, party: str) -> DpmergeError:
    where = f"{party}: {ADAPTER}: {shown(key)}"
    for mark, (what, fix) in _EXPLAINED.items():
        if mark in key:
            return DpmergeError("DPM-402", f"{where} {what} and has no place in a LoRA merge", fix)
    if re.search(r"(embed_tokens|lm_head|embeddings?|wte|shared|embed_out|output)\.weight$", key):
        fix = (
            "if the vocabulary was not changed, save it again with save_pretrained(…, save_embedding_layers=False); "
            "a changed vocabulary cannot be merged: its new rows are each party's own"
        )
        return DpmergeError("DPM-402", f"{where} is a whole embedding and has no place in a LoRA merge", fix)
    return DpmergeError("DPM-402", f"{where} has no place in a LoRA merge", "merge plain LoRA adapters")
