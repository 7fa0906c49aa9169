"""Which base model an adapter is of: what its name says, what lies on this machine, and what the user says.

A name is evidence and a hash is proof. Two names of models that lie on this machine are compared by their weights;
otherwise organisation and name must both agree, unless one of them is a path, which names no organisation.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from dpmerge.common.data.assets import ASSETS, model_folder
from dpmerge.common.errors import DpmergeError

if TYPE_CHECKING:
    from dpmerge.server.merging.adapters.deltas import Adapter

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # organisation/model
_CACHED = re.compile(r"(?:^|/)models--([^/]+)/snapshots/[^/]+$")
_QUANTISED = re.compile(
    r"(?i)(?:-unsloth)?(?:[-_]bnb)?[-_](?P<how>4bit|8bit|int4|int8|nf4|fp8|awq|gptq|gguf|w4a16|w8a8)(?:[-_][\w.-]*)?$"
)
_BLOB = re.compile(r"[0-9a-f]{64}")  # the hub's cache names a weight file by its SHA-256


def base_id(name: object) -> str:
    """Return a base model's name as others can read it: a hub id as it is, also of a path into the hub's cache.

    Of any other path it is the last part, which two machines can share; of what is no text, nothing.

    >>> base_id("/home/x/.cache/huggingface/hub/models--alice--chat-model/snapshots/0a1b"), base_id("/data/tiny/")
    ('alice/chat-model', 'tiny')
    """
    if not isinstance(name, str):
        return ""
    plain = name.replace("\\", "/").rstrip("/")
    if cached := _CACHED.search(plain):
        return cached[1].replace("--", "/", 1)
    return name if HUB_ID.fullmatch(name) else plain.rpartition("/")[2]


def same_name(one: str, other: str) -> bool:
    """Tell whether two names from `base_id` can be of one model; an organisation that only one has is no matter.

    Args:
        one: A base model's name, as an adapter states it.
        other: Another.

    >>> same_name("alice/chat", "chat"), same_name("alice/chat", "bob/chat")
    (True, False)
    """
    if "/" in one and "/" in other:
        return one.casefold() == other.casefold()
    return one.rpartition("/")[2] == other.rpartition("/")[2]


def quantised_copy(name: str) -> tuple[str, str] | None:
    """Return what a quantised model is a copy of, without its organisation, and how it is stored; None for any other.

    >>> quantised_copy("unsloth/llama-3-8b-unsloth-bnb-4bit"), quantised_copy("meta/llama-3-8b")
    (('llama-3-8b', '4bit'), None)
    """
    last = name.rpartition("/")[2]
    found = _QUANTISED.search(last)
    return (last[: found.start()], found["how"].lower()) if found and found.start() else None


def difference(name: str, usual: str) -> str:
    """Say in what two base models differ, where their names tell; empty otherwise.

    Args:
        name: The name that one adapter gives.
        usual: The name that others give.
    """
    for one, other in ((name, usual), (usual, name)):
        copy, original = quantised_copy(one), quantised_copy(other)
        if copy and same_name(copy[0].casefold(), (original[0] if original else other).casefold().rpartition("/")[2]):
            return f"{one} is a {copy[1]} copy of {original[0] if original else other}, whose weights it rounds"
    return ""


def local_folder(name: str) -> Path | None:
    """Return where a base model lies on this machine: an asset, a folder, or in the hub's cache; nothing is fetched."""
    if name in ASSETS:
        try:
            return Path(model_folder(name))
        except DpmergeError:
            return None
    try:
        if (Path(name).expanduser() / "config.json").is_file():
            return Path(name).expanduser()
        found = try_to_load_from_cache(name, "config.json") if HUB_ID.fullmatch(name) else None
    except (OSError, ValueError, HFValidationError):  # no name that a folder or a model could have
        return None
    return Path(found).parent if isinstance(found, str) else None


@lru_cache(maxsize=16)
def fingerprint(folder: Path) -> str:
    """Return a hash of a model's weights, by which copies in two places are known; empty without safetensors."""
    digest, files = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    for file in files:
        blob = file.resolve().name
        if not _BLOB.fullmatch(blob):
            with file.open("rb") as opened:
                blob = hashlib.file_digest(opened, "sha256").hexdigest()
        digest.update(f"{file.name}:{blob};".encode())
    return digest.hexdigest() if files else ""


def settled(adapters: Sequence["Adapter"], base: str) -> tuple[list["Adapter"], list[str]]:
    """Settle which base models are one: what `--base` says, or else what lies on this machine with equal weights.

    Args:
        adapters: As read.
        base: Alias, folder or hub id that the user gave; empty if none.

    Returns:
        The adapters, with `known_base` where it was settled, and a line for every name that was overruled.
    """
    if base:
        name = base_id(base)
        overruled = [item for item in adapters if item.base and not same_name(item.base, name)]
        notes = [
            f"{item.party}: merged as an adapter of {name}, as --base says, and not of {item.base}"
            + (f" ({what})" if (what := difference(item.base, name)) else "")
            for item in overruled
        ]
        return [replace(item, known_base=name) for item in adapters], notes
    names = Counter(item.base for item in adapters if item.base)
    if len(names) < 2:
        return list(adapters), []
    usual: dict[str, str] = {}  # weights → the commonest of the names of what has them
    for item in sorted(adapters, key=lambda item: -names[item.base]):
        usual.setdefault(_weights(item), item.base)
    return [
        replace(item, known_base=usual[weights]) if (weights := _weights(item)) and item.base else item
        for item in adapters
    ], []


def _weights(adapter: "Adapter") -> str:
    folder = local_folder(str(adapter.config.get("base_model_name_or_path") or ""))
    return fingerprint(folder) if folder else ""
