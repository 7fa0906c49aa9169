"""Changes to the files of a release, each a function from files to files."""

import json
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, save

from dpmerge.common.release.format import ADAPTER, HEAD

Files = dict[str, bytes]


def tensors(change: Callable[[dict[str, torch.Tensor]], object], file: str = ADAPTER) -> Callable[[Files], Files]:
    def apply(files: Files) -> Files:
        values = load(files[file])
        change(values)
        metadata = {"format": "pt"}
        if file == HEAD:
            length = int.from_bytes(files[HEAD][:8], "little")
            metadata = json.loads(files[HEAD][8 : 8 + length])["__metadata__"]
        return files | {file: save(values, metadata)}

    return apply


def edit(file: str, **values: Any) -> Callable[[Files], Files]:
    return lambda files: files | {file: written(json.loads(files[file]) | values)}


def written(value: object) -> bytes:
    """Return JSON in the one form in which a release has it."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def put(key: str, value: torch.Tensor, file: str = ADAPTER) -> Callable[[Files], Files]:
    return tensors(lambda found: found.update({key: value}), file)


def scaled(key: str, factor: float, file: str = ADAPTER) -> Callable[[Files], Files]:
    return tensors(lambda found: found.update({key: found[key] * factor}), file)
