"""Bases on disk: public, made once per base model, adapter layout, head and public texts, then found again.

A file lies below the asset cache and is named by the SHA-256 of its identity, which it also records and is held to.
Those that were used longest ago are removed, so that all together stay below `MAX_BYTES`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dpmerge.client.subspace.basis import Basis
from dpmerge.common.data.assets import cache_root
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import replace_file

FOLDER = "subspaces"

MAX_BYTES = 2 * 10**9
"""35 bases of 256 directions in 55,296 coordinates."""

Identity = Mapping[str, str]
"""What a basis was made of: name of the part → hash or value."""


def cached_basis(identity: Identity, make: Callable[[], Basis]) -> Basis:
    """Return the basis of this identity from the cache, or make it and keep it there.

    A cache that may not be written (it can be shared and read-only) keeps nothing. A basis in use is in memory, so that
    another process may remove its file at any moment; the one that was asked for now stays.

    Raises:
        DpmergeError: As `load_basis` and `make`.
    """
    path = cache_path(identity)
    try:
        basis = load_basis(path, identity)
        with suppress(OSError):
            os.utime(path)  # as used now, also where the file system notes no reading
    except FileNotFoundError:
        basis = make()
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_basis(path, basis, identity)
            _prune(path)
    return basis


def cache_path(identity: Identity) -> Path:
    """Return where the cache holds a basis, if it does."""
    name = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
    return cache_root() / FOLDER / f"{name}.safetensors"


def _prune(kept: Path) -> None:
    """Remove the files that were used longest ago, until all are below `MAX_BYTES` or `kept` is the only one.

    Raises:
        OSError: If one cannot be looked at or removed, as when another process was faster.
    """
    found = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in kept.parent.glob("*.safetensors"))
    total = sum(size for _, size, _ in found)
    for _, size, file in found:
        if total > MAX_BYTES and file != kept:
            file.unlink()
            total -= size


def save_basis(path: Path, basis: Basis, identity: Identity) -> None:
    """Write a basis in one step.

    Raises:
        OSError: If the file cannot be written.
    """
    text = json.dumps({"identity": dict(identity), "sha256": _content_hash(basis)})
    tensors = {"rows": basis.rows.contiguous(), "coordinates": basis.coordinates.contiguous()}
    replace_file(path, save(tensors, metadata={"dpmerge": text}))


def load_basis(path: Path, identity: Identity) -> Basis:
    """Read a basis back.

    Raises:
        FileNotFoundError: If there is none.
        DpmergeError: DPM-505 if the file is damaged, or of another base model, layout, head or public data.
    """
    fix = f"remove it from {FOLDER} in the asset cache: it will be made again"  # no path: refusals go to the server
    try:
        with safe_open(path, framework="pt") as file:
            text = json.loads(file.metadata()["dpmerge"])
            # copied, since a product's last bits depend on how memory is aligned, and a file aligns nothing
            basis = Basis(file.get_tensor("rows").clone(), file.get_tensor("coordinates").clone())
            recorded, sha256 = text["identity"], text["sha256"]
            differing = [key for key in identity if recorded.get(key) != identity[key]]
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DpmergeError("DPM-505", f"the stored basis {path.name} cannot be read", fix) from error
    if differing:
        raise DpmergeError("DPM-505", f"the stored basis {path.name} is of another {', '.join(differing)}", fix)
    if _content_hash(basis) != sha256:
        raise DpmergeError("DPM-505", f"the stored basis {path.name} is damaged", fix)
    return basis


def _content_hash(basis: Basis) -> str:
    coordinates = basis.coordinates.contiguous().numpy()
    return hashlib.sha256(basis.sha256.encode() + coordinates.tobytes()).hexdigest()
