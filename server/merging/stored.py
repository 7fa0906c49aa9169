"""Tensors left in their safetensors file until somebody looks at them.

A file is checked once, when it is opened: header, sizes, every number. After that a tensor is a place in it. A look
reads that place and nothing else, and closes the file again; so neither memory nor open files nor mapped pages (which
count as resident) grow with the number of parties.

A file that changes after it was opened gives other numbers, as it would under a memory map. One that is cut short is
refused instead of ending the process with a bus error.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dpmerge.common.untrusted import MAX_HEADER_BYTES, ReleaseRefused, parse_header

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

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
        device: Where it is read to.
    """

    path: Path
    origin: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")  # noqa: RUF009 -- immutable

    def read(self) -> Tensor:
        """Read it, as fp32.

        Raises:
            ReleaseRefused: truncated or missing-file, when the file is no longer what it was.
        """
        tensor = torch.empty(math.prod(self.shape), dtype=self.dtype)
        buffer = tensor.view(torch.uint8).numpy().data
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                count = file.readinto(buffer)
        except OSError as error:
            raise ReleaseRefused("missing-file", f"{self.origin}: {error}", FIX) from error
        if count != buffer.nbytes:
            raise ReleaseRefused("truncated", f"{self.origin}: {count} of {buffer.nbytes} bytes", FIX)
        return tensor.view(self.shape).to(self.device, torch.float32)


def open_tensors(path: Path, origin: str, dtypes: Collection[str] = tuple(DTYPES)) -> dict[str, StoredTensor]:
    """Check a safetensors file as `parse_tensors` does, one tensor at a time, and leave the numbers in it.

    Args:
        path: The file.
        origin: Opens every refusal.
        dtypes: Those that are accepted, among `DTYPES`.

    Raises:
        ReleaseRefused: As `parse_tensors`.
    """
    with path.open("rb") as file:
        head = file.read(8 + MAX_HEADER_BYTES)
    header, _ = parse_header(head, path.stat().st_size, origin, dtypes)
    try:
        with safe_open(path, "pt"):
            start = 8 + int.from_bytes(head[:8], "little")  # offsets now agree with dtypes, shapes and size
    except SafetensorError as error:
        raise ReleaseRefused("truncated", f"{origin}: {error}", FIX) from error
    tensors = {}
    for key in sorted(header):
        entry = header[key]
        offset, shape = start + entry["data_offsets"][0], tuple(entry["shape"])
        tensors[key] = StoredTensor(path, f"{origin}: {key}", offset, shape, DTYPES[entry["dtype"]])
        if not torch.isfinite(tensors[key].read()).all():
            raise ReleaseRefused("non-finite", f"{origin}: {key}", "find out why training diverged")
    return tensors
