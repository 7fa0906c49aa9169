"""An interrupted training on disk: owner-only, bound to data and configuration, no pickle, gone at release.

It holds the noise cipher's *ratcheted* state. Whoever reads it learns noise that is still to come, never noise that
was drawn; it is erased when the release is made, because a stored state would let its finder subtract the noise.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dpmerge.client.subspace.coordinates import SubspaceState
from dpmerge.client.training.train import TrainingState
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import replace_file, temporary_of

_SUBSPACE_TENSORS = ("coordinates", "reference", "history", "scales")


def save_checkpoint(path: Path, state: TrainingState, binding: str) -> None:
    """Write the state so that a crash leaves either the old file or the new one, and overwrite the old one's bytes.

    Noise that is still to come follows from the state: an old checkpoint, recovered from the disk, would tell it all.
    """
    tensors: dict[str, Tensor] = {"theta": state.theta}
    if state.direction is not None:
        tensors["direction"] = state.direction
    if state.subspace is not None:
        tensors |= {f"subspace.{name}": getattr(state.subspace, name) for name in _SUBSPACE_TENSORS}
    scalars: dict[str, Any] = {}
    for key, value in state.optimizer["state"].get(0, {}).items():
        if isinstance(value, Tensor):
            tensors[f"optimizer.{key}"] = value.contiguous()
        else:
            scalars[key] = value
    text = {
        "binding": binding,
        "step": state.step,
        "groups": state.optimizer["param_groups"],
        "scalars": scalars,
        "sampler": state.sampler.hex(),
        "noise": state.noise.hex(),
        "l2_clip_norm": state.l2_clip_norm,
        "basis_sha256": None if state.subspace is None else state.subspace.basis_sha256,
    }
    data = save({k: v.contiguous() for k, v in tensors.items()}, metadata={"dpmerge": json.dumps(text)})
    old = _own(path) if path.exists() and not path.is_symlink() else None
    replace_file(path, data, mode=0o600, durable=True)
    if old is not None:
        with old:
            _zero(old)


def load_checkpoint(path: Path, binding: str) -> TrainingState:
    """Read the state back.

    Raises:
        DpmergeError: DPM-302 if the file is damaged or was written for other data or another configuration.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
            text = json.loads(file.metadata()["dpmerge"])
        bound_to, state = text["binding"], _state_of(tensors, text)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DpmergeError(
            "DPM-302",
            f"the checkpoint {path.name} cannot be read",
            "start anew in another output folder; that is a second charge on the same data",
        ) from error
    if bound_to != binding:
        raise DpmergeError(
            "DPM-302",
            f"the checkpoint {path.name} belongs to other records or settings",
            "resume with the records and settings it was made for, or start anew in another folder, as a second charge",
        )
    return state


def _state_of(tensors: dict[str, Tensor], text: dict[str, Any]) -> TrainingState:
    """Return the state that a checkpoint's tensors and text describe; a key that is missing is a KeyError."""
    moments = {key.removeprefix("optimizer."): value for key, value in tensors.items() if key.startswith("optimizer.")}
    per_parameter = {**moments, **text["scalars"]}
    subspace = None
    if (basis_sha256 := text.get("basis_sha256")) is not None:
        parts = {name: tensors[f"subspace.{name}"] for name in _SUBSPACE_TENSORS}
        subspace = SubspaceState(**parts, basis_sha256=basis_sha256)
    return TrainingState(
        step=text["step"],
        theta=tensors["theta"],
        optimizer={"state": {0: per_parameter} if per_parameter else {}, "param_groups": text["groups"]},
        direction=tensors.get("direction"),
        sampler=bytes.fromhex(text["sampler"]),
        noise=bytes.fromhex(text["noise"]),
        subspace=subspace,
        l2_clip_norm=text.get("l2_clip_norm"),
    )


def erase(path: Path) -> None:
    """Overwrite and remove a checkpoint and what an interrupted write of it left, if there are any.

    Overwriting is best effort on journaling or flash storage.
    """
    for file_path in (path, temporary_of(path)):
        if file_path.is_symlink():
            file_path.unlink()  # what it leads to is nothing of ours
        elif file_path.exists():
            with _own(file_path) as file:
                _zero(file)
            file_path.unlink()


def _own(path: Path) -> BinaryIO:
    """Open a file to overwrite it, never through a link."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "r+b")


def _zero(file: BinaryIO) -> None:
    file.write(b"\0" * os.fstat(file.fileno()).st_size)
    file.flush()
    os.fsync(file.fileno())
