"""The release: what one party sends, once, and what a merged model is written as.

A release is a folder that `peft.PeftModel.from_pretrained` opens as it is, plus a head and the privacy statement:

    adapter_config.json        PEFT's configuration; the base model by name, never by a path of somebody's disk
    adapter_model.safetensors  LoRA factors under PEFT's own keys, fp32
    head.safetensors           "<party>.weight" and "<party>.bias"; kind, labels and feature scale in the metadata
    statement.json             the privacy statement; a merged model has merge.json in its place
    modules.safetensors        in a merged model: heads that adapters brought as whole modules, "<party>/<tensor>"
    signature.json             the signed manifest of all the others, `common/release/manifest.py`
    README.md                  a model card, in a party's upload a signed one
    explain.svg                a picture of what was merged, in a merged model that was asked for one

The same release always becomes the same bytes: keys are sorted, nothing carries a time. Nothing here is ever a pickle.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import rfc8785
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from dpmerge.common.config.rules import PARTY_NAME
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import fsync_folder, make_folder, naming
from dpmerge.common.untrusted.kinds import Unfit, exactly, list_of, record, table_of, text
from dpmerge.common.untrusted.parsing import MAX_JSON_BYTES, ReleaseRefused, parse_json, parse_tensors
from dpmerge.common.untrusted.reading import MAX_FOLDER_BYTES, NoPlainFile, TooLarge, names_in, read_file

CONFIG, ADAPTER, HEAD = "adapter_config.json", "adapter_model.safetensors", "head.safetensors"
STATEMENT, MERGE, SIGNATURE, README = "statement.json", "merge.json", "signature.json", "README.md"
PICTURE, MODULES = "explain.svg", "modules.safetensors"
FILES = frozenset({CONFIG, ADAPTER, HEAD, STATEMENT, MERGE, SIGNATURE, README, PICTURE, MODULES})
UNHASHED = frozenset({SIGNATURE, README, PICTURE})
PICKLES = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
Kept = TypeVar("Kept")
MERGED = "merged"  # stands for the party in a merged model, which is nobody's release
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
PEFT_PREFIX = "base_model.model."  # before a module's name in the keys of `adapter_model.safetensors`

MAX_CARD_BYTES = 1 << 16
MAX_PICTURE_BYTES = 1 << 26
_MAX_BYTES = {
    ADAPTER: MAX_FOLDER_BYTES,
    MODULES: MAX_FOLDER_BYTES,
    HEAD: MAX_FOLDER_BYTES,
    README: MAX_CARD_BYTES,
    PICTURE: MAX_PICTURE_BYTES,
}


def _scale(value: Any, path: str) -> None:
    """Accept a positive number; canonical JSON writes 8.0 as 8."""
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise Unfit(f"{path} is not a positive number")


_HEAD = record(
    {
        "kind": exactly("label-text", "linear"),
        "labels": list_of(text(255), least=2, most=10_000),
        "feature_scale": _scale,
    }
)
_HEADS = table_of(text(63, PARTY_NAME), _HEAD, most=10_000)


@dataclass(frozen=True, eq=False)
class Head:
    """A linear classifier over pooled features: logits = feature_scale · x Wᵀ + b, with x of unit norm.

    Attributes:
        kind: "label-text" (frozen, from the label descriptions, no private data in it) or "linear" (trained privately).
        labels: Class names, in the order of the rows of `weight`.
        weight: fp32 [classes, width].
        bias: fp32 [classes], or None.
        feature_scale: Positive factor on the features.
    """

    kind: str
    labels: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None = None
    feature_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("label-text", "linear"):
            raise ValueError(f"Expected kind={self.kind!r} in ('label-text', 'linear').")
        if len(self.labels) < 2 or len(set(self.labels)) != len(self.labels):
            raise ValueError(f"Expected labels={self.labels!r} to be at least two different names.")
        if self.weight.dim() != 2 or len(self.weight) != len(self.labels):
            raise ValueError(f"Expected weight of shape {tuple(self.weight.shape)} in [{len(self.labels)}, width].")
        if self.bias is not None and self.bias.shape != (len(self.labels),):
            raise ValueError(f"Expected bias of shape {tuple(self.bias.shape)} in [{len(self.labels)}].")
        if not 0 < self.feature_scale < float("inf"):
            raise ValueError(f"Expected feature_scale={self.feature_scale} in (0, inf).")


@dataclass(frozen=True, eq=False)
class Release:
    """One party's adapter, head and statement, or a merged model.

    Attributes:
        party: Who releases it; `MERGED` for a merged model.
        adapter: LoRA factors by PEFT's keys, A as [rank, in] and B as [out, rank].
        adapter_config: PEFT's configuration as a JSON object.
        heads: One head per party (in a release: its own).
        statement: The privacy statement; empty for a merged model.
        merge: What was merged and how; None for a party's release.
        modules: "<party>/<tensor's name>" → a tensor of a head that PEFT trained whole; of a merged model only.
    """

    party: str
    adapter: dict[str, Tensor]
    adapter_config: dict[str, Any]
    heads: dict[str, Head]
    statement: dict[str, Any] = field(default_factory=dict)
    merge: dict[str, Any] | None = None
    modules: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.party, *self.heads):
            if not PARTY_NAME.fullmatch(name):
                raise ValueError(f"Expected party={name!r} to match {PARTY_NAME.pattern}.")
        if bool(self.statement) == (self.merge is not None):
            raise ValueError(f"Expected release of {self.party!r} to have either a statement or a merge record.")
        if self.merge is not None and self.party != MERGED:
            raise ValueError(f"Expected party={self.party!r} of a merged model to be {MERGED!r}.")
        if self.modules and self.merge is None:
            raise ValueError(f"Expected release of {self.party!r} to have no modules of its own beside its head.")
        if self.statement and (self.statement.get("party") != self.party or set(self.heads) != {self.party}):
            raise ValueError(f"Expected statement and head of release {self.party!r} to be of that party.")
        base = self.adapter_config.get("base_model_name_or_path")
        if not isinstance(base, str) or not base or base[0] in "/.~" or "\\" in base:
            raise ValueError(f"Expected base_model_name_or_path={base!r} to be the base model's name, not a path.")


def adapter_key(module: str, factor: Literal["lora_A", "lora_B"]) -> str:
    """Return PEFT's key of a module's factor in `adapter_model.safetensors`.

    >>> adapter_key("encoder.layer.5.output.dense", "lora_B")
    'base_model.model.encoder.layer.5.output.dense.lora_B.weight'
    """
    return f"{PEFT_PREFIX}{module}.{factor}.weight"


def by_party(modules: Mapping[str, Kept]) -> dict[str, dict[str, Kept]]:
    """Sort the tensors of whole modules by party; what follows the last slash is the tensor's own.

    >>> by_party({"shop/score.weight": 1, "shop/score.bias": 2})
    {'shop': {'score.weight': 1, 'score.bias': 2}}
    """
    sorted_out: dict[str, dict[str, Kept]] = {}
    for key, kept in modules.items():
        party, _, name = key.rpartition("/")
        sorted_out.setdefault(party, {})[name] = kept
    return sorted_out


def to_files(release: Release) -> dict[str, bytes]:
    """Turn a release into its files; equal releases give equal bytes."""
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    for party, head in release.heads.items():
        about[party] = {"kind": head.kind, "labels": list(head.labels), "feature_scale": head.feature_scale}
        tensors[f"{party}.weight"] = head.weight
        if head.bias is not None:
            tensors[f"{party}.bias"] = head.bias
    # One metadata entry per file: safetensors writes several in an order that changes from run to run.
    files = {
        CONFIG: _json_bytes(release.adapter_config),
        ADAPTER: _tensor_bytes(release.adapter, {"format": "pt"}),
        HEAD: _tensor_bytes(tensors, {"heads": rfc8785.dumps(about).decode()}),
    }
    if release.merge is None:
        return files | {STATEMENT: _json_bytes(release.statement)}
    if release.modules:
        files[MODULES] = _tensor_bytes(release.modules, {"format": "pt"})
    return files | {MERGE: _json_bytes(release.merge)}


def release_from_files(files: Mapping[str, bytes], origin: str = "release") -> Release:
    """Parse and check the files of a release; `origin` (a party, a folder) opens every refusal.

    Raises:
        ReleaseRefused: For a file, a header, a key or a value that the format does not allow.
    """
    check_names(files, origin)
    adapter, _ = parse_tensors(files[ADAPTER], f"{origin}: {ADAPTER}")
    modules, _ = parse_tensors(files[MODULES], f"{origin}: {MODULES}") if MODULES in files else ({}, {})
    return release_around(adapter, files, origin, modules)


def release_around(
    adapter: dict[str, Tensor],
    files: Mapping[str, bytes],
    origin: str,
    modules: Mapping[str, Tensor] | None = None,
    max_json_bytes: int = MAX_JSON_BYTES,
) -> Release:
    """Parse and check all files of a release but the adapter and whole modules, for whom these stay on disk.

    Raises:
        ReleaseRefused: As `release_from_files`.
    """
    fix = "send the folder as dpmerge wrote it"
    tensors, metadata = parse_tensors(files[HEAD], f"{origin}: {HEAD}")
    config, statement, merge = (
        parse_json(files[name], f"{origin}: {name}", max_json_bytes) if name in files else None
        for name in (CONFIG, STATEMENT, MERGE)
    )
    heads = _heads(tensors, _about(metadata, origin), origin)
    party = MERGED if statement is None else str(statement.get("party"))
    if not PARTY_NAME.fullmatch(party) or (statement is not None and set(heads) != {party}):
        raise ReleaseRefused("party-mismatch", f"{origin}: statement of {party!r}, heads of {sorted(heads)}", fix)
    try:
        return Release(party, adapter, config or {}, heads, statement or {}, merge, dict(modules or {}))
    except ValueError as error:
        raise ReleaseRefused("config", f"{origin}: {error}", fix) from error


def release_hash(files: Mapping[str, bytes]) -> str:
    """Name a release by the SHA-256 of the canonical JSON of {file: SHA-256}.

    README.md and its picture are left out (a card may be edited), and so is signature.json (whoever signs it, the
    content is one).

    >>> release_hash({"a.json": b"{}", "README.md": b"x"}) == release_hash({"a.json": b"{}"})
    True
    """
    return hash_of_hashes({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})


def hash_of_hashes(hashes: Mapping[str, str]) -> str:
    """Name a release as `release_hash` does, by the SHA-256 of each of its files."""
    kept = {name: value for name, value in hashes.items() if name not in UNHASHED}
    return hashlib.sha256(rfc8785.dumps(kept)).hexdigest()


def write_release(folder: Path, release: Release) -> None:
    """Write a release so that the folder is either complete and on disk, or absent.

    Raises:
        DpmergeError: DPM-301 when the folder already holds something.
    """
    write_files(folder, to_files(release))


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a new folder, all of them or none; see `new_folder`."""
    with new_folder(folder) as temporary:
        for name in sorted(files):
            with (temporary / name).open("xb") as file:
                file.write(files[name])


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary sibling that takes the folder's place once the block has filled it and all is on disk.

    If the block fails nothing is left behind.

    Raises:
        DpmergeError: DPM-301 when the folder already holds something.
    """
    check_new_folder(folder)
    make_folder(folder.parent)
    temporary = _sibling(folder)
    temporary.mkdir()
    try:
        with naming(folder):
            yield temporary
        for path in sorted(temporary.iterdir()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        fsync_folder(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(folder.parent)


def replace_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder's files anew; the old ones are removed once the new ones are on disk, under another name."""
    fresh, old = _sibling(folder), _sibling(folder)
    write_files(fresh, files)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    fsync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written in a folder; for whoever holds the lock on it.

    Raises:
        OSError: If one cannot be removed.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def _sibling(folder: Path) -> Path:
    """Return a new name beside a folder, which `remove_leftovers` knows."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that holds something, or a place that is no folder; changes nothing.

    Raises:
        DpmergeError: DPM-301.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise DpmergeError("DPM-301", f"{folder} exists and is not empty", "choose another folder or remove it first")


def read_release(folder: Path) -> Release:
    """Read a release folder; see `release_from_files` for what is refused."""
    return release_from_files(release_files(folder), str(folder))


def release_files(folder: Path) -> dict[str, bytes]:
    """Read the bytes of a release folder, after its file names are checked."""
    if not folder.is_dir():
        raise ReleaseRefused("missing-file", f"{folder} is no folder", "name the folder of a release")
    names = names_in(folder, len(FILES))
    check_names(names, str(folder))
    try:
        files = {name: read_file(folder / name, _MAX_BYTES.get(name, MAX_JSON_BYTES)) for name in names}
    except (NoPlainFile, TooLarge) as refusal:
        reason = "size" if isinstance(refusal, TooLarge) else "path"
        raise ReleaseRefused(reason, refusal.problem, refusal.fix) from None
    except OSError as problem:
        fix = "check the path and the permissions"
        raise ReleaseRefused("missing-file", f"{folder} cannot be read: {problem.strerror}", fix) from None
    return files


def check_names(names: Collection[str], origin: str) -> None:
    """Refuse file names that are no part of a release, and a release that lacks one.

    Raises:
        ReleaseRefused: path, pickle, unknown-file or missing-file.
    """
    for name in sorted(names):
        if Path(name).suffix in PICKLES:
            raise ReleaseRefused("pickle", f"{origin}: {name!r}", "save the adapter as safetensors")
        if name != Path(name).name or "\\" in name or name.startswith("."):
            raise ReleaseRefused("path", f"{origin}: {name!r}", "send plain file names")
        if name not in FILES:
            raise ReleaseRefused("unknown-file", f"{origin}: {name!r}", f"send only {', '.join(sorted(FILES))}")
    kind = MERGE if MERGE in names else STATEMENT  # no release without a statement
    for name in (CONFIG, ADAPTER, HEAD, kind):
        if name not in names:
            raise ReleaseRefused("missing-file", f"{origin}: {name}", "send the folder as dpmerge wrote it")


def _about(metadata: dict[str, str], origin: str) -> dict[str, Any]:
    """Return what the head's metadata says of its heads, which has one form only."""
    where, written = f"{origin}: {HEAD}", metadata.get("heads", "").encode()
    about = parse_json(written, where)
    if metadata.keys() != {"heads"} or rfc8785.dumps(about) != written:
        raise ReleaseRefused("head", f"{where}: its metadata is not in canonical form", "send it as dpmerge wrote it")
    return about


def _heads(tensors: dict[str, Tensor], about: dict[str, Any], origin: str) -> dict[str, Head]:
    heads = {}
    try:
        _HEADS(about, "heads")
        for party, entry in about.items():
            weight, bias = tensors[f"{party}.weight"], tensors.get(f"{party}.bias")
            heads[party] = Head(entry["kind"], tuple(entry["labels"]), weight, bias, float(entry["feature_scale"]))
    except (KeyError, ValueError) as error:  # an Unfit is a ValueError
        raise ReleaseRefused("head", f"{origin}: {HEAD}: {error}", "send the file as dpmerge wrote it") from error
    known = {f"{party}.{part}" for party in heads for part in ("weight", "bias")}
    for key in tensors.keys() - known:
        raise ReleaseRefused("unknown-key", f"{origin}: {HEAD}: {key}", "send the file as dpmerge wrote it")
    return heads


def _json_bytes(value: dict[str, Any]) -> bytes:
    def plain(item: object) -> list[Any]:
        if isinstance(item, (set, frozenset)):  # PEFT keeps target modules in a set
            return sorted(item)
        raise ValueError(f"Expected {item!r} to be a JSON value.")

    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False, default=plain)
    return text.encode() + b"\n"


def _tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    for key, tensor in tensors.items():
        if tensor.dtype != torch.float32 or not torch.isfinite(tensor).all():
            raise ValueError(f"Expected {key} of dtype {tensor.dtype} to be finite fp32.")
    # clone: safetensors refuses views that share memory, such as the slices of one flat parameter vector
    plain = {key: tensors[key].detach().cpu().clone(memory_format=torch.contiguous_format) for key in sorted(tensors)}
    data: bytes = save_tensors(plain, metadata)
    return data
