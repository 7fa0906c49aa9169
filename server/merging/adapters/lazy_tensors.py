"""Tensors left in their safetensors file until somebody looks at them.

A file is checked once, when it is opened: header, sizes, every number. After that a tensor is a place in it. A look
reads that place and nothing else, and closes the file again; so neither memory nor open files nor mapped pages (which
count as resident) grow with the number of parties.

A file that changes after it was opened gives other numbers, as it would under a memory map. One that is cut short is
refused instead of ending the process with a bus error.
"""

import hashlib
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dpmerge.common.untrusted.parsing import MAX_LOCAL_HEADER_BYTES, ReleaseRefused, parse_header
from dpmerge.common.untrusted.reading import opened

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_KEPT_HASH = re.compile(r"\.lora_(embedding_)?A\b|\.base_layer\.")
PART = 1 << 20  # numbers that are summed at a time

MAX_ADAPTER_BYTES = 1 << 32
"""Rank 64 on all linear layers of a model of 70 billion weights has 3.3 GB."""
MAX_TENSOR_BYTES = 1 << 29
"""A sparse file of zeros costs its sender nothing; one factor of rank 512 on a vocabulary of 256,000 fits."""

FIX = "send the file as dpmerge wrote it"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file, without its numbers.

    Attributes:
        path: The file.
        origin: File and key, for refusals.
        offset: Of its first byte in the file.
        shape: Its dimensions.
        dtype: As stored.
        norm: Of its numbers as one vector, finite.
        sha256: Of its numbers as fp32, whatever they are stored as; of what parties may share only: A's, and copies of
            the base model's weights.
        device: Where it is read to.
    """

    path: Path
    origin: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    norm: float
    sha256: bytes
    device: torch.device = torch.device("cpu")  # noqa: RUF009 -- immutable

    def read(self) -> Tensor:
        """Read it, as fp32.

        Raises:
            ReleaseRefused: truncated or missing-file, when the file is no longer what it was.
        """
        try:
            with opened(self.path, MAX_ADAPTER_BYTES, links=True) as file:
                file.seek(self.offset)
                tensor = _next(file, self.shape, self.dtype, self.origin)
        except OSError as error:
            raise ReleaseRefused("missing-file", f"{self.origin}: {error}", FIX) from error
        return tensor.to(self.device, torch.float32)


def open_tensors(
    path: Path, origin: str, dtypes: Collection[str] = tuple(DTYPES), *, links: bool = False
) -> tuple[dict[str, StoredTensor], str]:
    """Check a safetensors file as `parse_tensors` does, one tensor at a time, and leave the numbers in it.

    Args:
        path: The file.
        origin: Opens every refusal.
        dtypes: Those that are accepted, among `DTYPES`.
        links: Whether the file may be a link; see `opened`.

    Returns:
        The tensors by sorted key, and the file's SHA-256. All of it comes from reading every byte once.

    Raises:
        ReleaseRefused: As `parse_tensors`.
    """
    with opened(path, MAX_ADAPTER_BYTES, links=links) as file:
        head = file.read(8)
        head += file.read(min(int.from_bytes(head, "little"), MAX_LOCAL_HEADER_BYTES))
        header, _ = parse_header(head, os.fstat(file.fileno()).st_size, origin, dtypes, MAX_LOCAL_HEADER_BYTES)
        _check_sizes(header, origin)
        try:
            with safe_open(path, "pt"):
                start = 8 + int.from_bytes(head[:8], "little")  # offsets now agree with dtypes, shapes and size,
        except SafetensorError as error:
            raise ReleaseRefused("truncated", f"{origin}: {error}", FIX) from error
        digest, tensors = hashlib.sha256(head[:start]), {}
        file.seek(start)
        for key in sorted(header, key=lambda key: header[key]["data_offsets"]):  # and leave no gap between tensors
            entry, place = header[key], f"{origin}: {key}"
            shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
            tensor = _next(file, shape, dtype, place)
            digest.update(_bytes_of(tensor))
            sha256 = hashlib.sha256(_bytes_of(tensor.float())).digest() if _KEPT_HASH.search(key) else b""
            norm = frobenius(tensor)
            if not math.isfinite(norm):
                raise ReleaseRefused("non-finite", place, "find out why training diverged")
            tensors[key] = StoredTensor(path, place, start + entry["data_offsets"][0], shape, dtype, norm, sha256)
    return {key: tensors[key] for key in sorted(tensors)}, digest.hexdigest()


def _check_sizes(header: Mapping[str, Any], origin: str) -> None:
    for key, entry in header.items():
        if math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize > MAX_TENSOR_BYTES:
            raise ReleaseRefused("shape", f"{origin}: {key} has more than {MAX_TENSOR_BYTES} bytes", FIX)


def frobenius(tensor: Tensor) -> float:
    """Return the norm of all numbers, summed in float64: finite if and only if all of them are finite in fp32.

    >>> frobenius(torch.tensor([3.0, 4.0])), frobenius(torch.tensor([3.0, float("nan")]))
    (5.0, nan)
    """
    parts = torch.split(tensor.flatten(), PART)  # of each, torch makes a copy in float64
    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts))


def _next(file: BinaryIO, shape: tuple[int, ...], dtype: torch.dtype, origin: str) -> Tensor:
    """Read the tensor that begins where the file is.

    Raises:
        ReleaseRefused: truncated.
    """
    tensor = torch.empty(shape, dtype=dtype)
    buffer = _bytes_of(tensor)
    count = file.readinto(buffer)  # type: ignore[attr-defined]  # unbuffered files have it
    if count != buffer.nbytes:
        raise ReleaseRefused("truncated", f"{origin}: {count} of {buffer.nbytes} bytes", FIX)
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view
