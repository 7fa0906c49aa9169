"""Reading bytes that somebody else wrote: size and shape checks before any parser runs, and one word per refusal.

A safetensors file begins with eight bytes that state the length of a JSON header. Both are checked here first, so that
a header of 100 MB, a repeated key, NaN, a number that is no float or a thousand brackets never reach a parser.
Nothing reads a pickle.
"""

import json
import re
from collections.abc import Collection
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from dpmerge.common.errors import DpmergeError

MAX_JSON_BYTES = 1 << 20
MAX_JSON_DEPTH = 32
MAX_JSON_INTEGER = 2**53  # beyond it not every integer is a float, and a larger one may not be any
MAX_JSON_FLOAT = 1e308
MAX_TENSOR_DIMENSIONS = 8  # torch itself stops at 64, with an error that no caller expects
MAX_KEY = 1000  # characters of a tensor's name
MAX_HEADER_BYTES = 1 << 20  # a 7-target adapter of an 80-layer model needs 200 kB
MAX_LOCAL_JSON_BYTES = 32 << 20  # of files that the user has at hand: mixtures of experts adapt 20,000 modules
MAX_LOCAL_HEADER_BYTES = 64 << 20  # safetensors itself stops at 100 MB

REASONS = {
    "path": "a file or party name that is not a plain name",
    "unknown-party": "a party that the federation does not list",
    "party-mismatch": "the files speak of another party than the one that sent them",
    "unsigned": "no signature where one is required",
    "signature": "a signature that is not this key's over this manifest, or not in the form that dpmerge writes",
    "key": "a key that the key list does not give to this party",
    "revoked": "a key that was revoked before the release was received",
    "manifest": "files other than those that the manifest lists, or of other hashes",
    "federation": "a release that was signed for another federation",
    "second-release": "other bytes than this party's accepted release",
    "late": "a release after the deadline of a federation that takes none then",
    "corrupted": "a spooled release whose bytes have changed since",
    "pickle": "a pickled file; only safetensors and JSON are read",
    "unknown-file": "a file that is no part of the format",
    "missing-file": "a required file is not there",
    "size": "more bytes than the limit",
    "json": "not a plain JSON object: unreadable, nested too deeply, a repeated key, NaN, a huge number, no Unicode",
    "form": "a file in other bytes than those in which its content is written",
    "header-too-large": "a safetensors header above the limit",
    "truncated": "a safetensors file whose bytes do not match its header",
    "config": "an adapter setting that differs from the federation's",
    "base-mismatch": "trained on another base model",
    "unknown-key": "a tensor that the federation's adapter does not have",
    "missing-key": "a tensor of the federation's adapter is not there",
    "dtype": "a tensor that is not fp32",
    "shape": "a tensor of another shape than the federation's",
    "non-finite": "NaN or infinity in a tensor",
    "shared-a": "a frozen, shared A that is not the federation's, bit for bit",
    "norm": "a weight change, or a head, larger than the stated bound",
    "head": "a head whose kind, labels or values differ from the federation's",
    "statement-inconsistent": "the statement's numbers do not reproduce its epsilon",
    "statement-terms": "a mechanism other than the agreed one",
    "epsilon-above-plan": "more epsilon than the agreed bound",
}


class ReleaseRefused(DpmergeError):
    """A DPM-401 whose `reason` is a stable word of `REASONS`, for the party and for programs.

    >>> print(ReleaseRefused("pickle", "shop: adapter_model.bin", "save the adapter as safetensors"))
    DPM-401: shop: adapter_model.bin [pickle]; save the adapter as safetensors
    """

    def __init__(self, reason: str, problem: str, fix: str) -> None:
        if reason not in REASONS:
            raise ValueError(f"Expected reason={reason!r} to be one of {sorted(REASONS)}.")
        super().__init__("DPM-401", f"{problem} [{reason}]", fix)
        self.reason, self._arguments = reason, (reason, problem, fix)

    def __reduce__(self) -> tuple[type["ReleaseRefused"], tuple[str, str, str]]:
        return ReleaseRefused, self._arguments


def parse_json(data: bytes, origin: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Parse a small JSON object; what could do harm to whoever uses it later is refused here.

    That is deep nesting, repeated keys, NaN, integers beyond ±2**53, floats beyond ±1e308, and texts that are no
    Unicode because they hold half a surrogate pair.
    """
    if len(data) > max_bytes:
        raise ReleaseRefused("size", f"{origin}: {len(data)} bytes", f"keep it under {max_bytes} bytes")
    try:
        text = data.decode()
        _check_depth(text)
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_integer, parse_float=_float
        )
        json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair, as every writer later would
    except ValueError as error:
        raise ReleaseRefused("json", f"{origin}: {error}", "send the file as dpmerge wrote it") from error
    if not isinstance(value, dict):
        raise ReleaseRefused("json", f"{origin}: not an object", "send the file as dpmerge wrote it")
    return value


def parse_header(
    data: bytes, size: int, origin: str, dtypes: Collection[str] = ("F32",), max_bytes: int = MAX_HEADER_BYTES
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Parse and check the header of a safetensors file: ({key: {dtype, shape, data_offsets}}, metadata).

    Offsets are left to the parser of safetensors, which compares them with dtypes, shapes and the file's size.

    Args:
        data: The file, or its first 8 + `max_bytes` bytes.
        size: Bytes of the whole file.
        origin: Opens every refusal.
        dtypes: Those that are accepted, as safetensors writes them.
        max_bytes: Bound on the header.
    """
    fix = "send the file as dpmerge wrote it"
    length = int.from_bytes(data[:8], "little")
    if size >= 8 and length > max_bytes:
        smaller = f"adapt fewer modules: their names and shapes may take {max_bytes} bytes"
        raise ReleaseRefused("header-too-large", f"{origin}: header of {length} bytes", smaller)
    if size < 8 + length:
        raise ReleaseRefused("truncated", f"{origin}: {size} bytes", fix)
    header = parse_json(data[8 : 8 + length], origin, max_bytes)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ReleaseRefused("json", f"{origin}: __metadata__ is not an object of texts", fix)
    for key, entry in header.items():
        if len(key) > MAX_KEY:
            raise ReleaseRefused("unknown-key", f"{origin}: {key}", fix)
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if not isinstance(dtype, str) or dtype not in dtypes:
            raise ReleaseRefused("dtype", f"{origin}: {key} is {dtype}", f"store it as {' or '.join(dtypes)}")
        sizes = shape if isinstance(shape, list) else [0]
        if len(sizes) > MAX_TENSOR_DIMENSIONS or not all(type(size) is int and size > 0 for size in sizes):
            # beside a 0 any size fits the file, and torch overflows on it; without one the parser counts the bytes
            problem = f"{origin}: {key} does not have at most {MAX_TENSOR_DIMENSIONS} dimensions, none of them empty"
            raise ReleaseRefused("shape", problem, fix)
    return header, metadata


def parse_tensors(
    data: bytes, origin: str, dtypes: Collection[str] = ("F32",)
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parse a safetensors file: (tensors by sorted key, metadata).

    The length and the JSON of the header are checked before the parser sees them; then keys, dtypes and values.
    """
    _, metadata = parse_header(data, len(data), origin, dtypes)
    fix = "send the file as dpmerge wrote it"
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise ReleaseRefused("truncated", f"{origin}: {error}", fix) from error
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ReleaseRefused("non-finite", f"{origin}: {key}", "find out why training diverged")
    return {key: tensors[key] for key in sorted(tensors)}, metadata


# Possessive, and content with a string that never ends: a scan that gave characters back would start again at each
# of its quotes, in time quadratic in the length of the file.
_JSON_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def _check_depth(text: str) -> None:
    depth = 0
    for token in _JSON_TOKEN.finditer(text):
        depth += 1 if token[0] in "[{" else -1 if token[0] in "]}" else 0
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a repeated key")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _integer(text: str) -> int:
    value = int(text)  # Python itself refuses more than 4300 digits
    if abs(value) > MAX_JSON_INTEGER:
        raise ValueError(f"an integer of {len(text)} digits, beyond ±2**53")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not abs(value) <= MAX_JSON_FLOAT:
        raise ValueError(f"a number beyond ±{MAX_JSON_FLOAT:g}")
    return value
