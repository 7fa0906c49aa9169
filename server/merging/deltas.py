"""What is merged: low-rank weight changes τ = scaling · B A per module and party.

Reads releases, merged models and plain PEFT adapter folders alike. A module that a party does not adapt has delta 0,
which is a factor pair of rank 0; so ragged ranks, absent modules and shared or independent A all are the same case to
the methods. Factors of a folder stay in their file until a method looks at them, one party and module at a time.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.common.kinds import Unfit
from dpmerge.common.merge_record import MERGE_RECORD
from dpmerge.common.reading import NoPlainFile, TooLarge, names_in, read_file
from dpmerge.common.release import (
    ADAPTER,
    CONFIG,
    HEAD,
    MERGE,
    PEFT_PREFIX,
    PICKLES,
    STATEMENT,
    Head,
    Release,
    check_names,
    hash_of_hashes,
    release_around,
    release_from_files,
    release_hash,
)
from dpmerge.common.statement_form import form_problem
from dpmerge.common.untrusted import MAX_JSON_BYTES, ReleaseRefused, parse_json, parse_tensors
from dpmerge.server.merging.peft_config import check_patterns, check_plain_lora, scaling
from dpmerge.server.merging.stored import DTYPES, StoredTensor, frobenius, open_tensors

Source = Tensor | StoredTensor

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # organisation/model

MAX_NAMES = 10_000  # in an adapter's folder, which may hold checkpoints beside it
MAX_HEAD_BYTES = 1 << 28

LARGEST = torch.finfo(torch.float32).max  # of any number in a change, whoever made it


@dataclass(frozen=True, eq=False)
class Factors:
    """One low-rank weight change, τ = scaling · b a.

    `a` and `b` of what is stored are read at each look, so that holding factors costs nothing: look once.

    Attributes:
        source_a: [rank, in], or where it is stored.
        source_b: [out, rank], or where it is stored.
        scaling: alpha/rank, or alpha/√rank with rsLoRA; 1 for everything that a merge returns.

    >>> Factors(torch.ones(1, 2), torch.ones(3, 1), 2.0).delta()
    tensor([[2., 2.],
            [2., 2.],
            [2., 2.]])
    """

    source_a: Source
    source_b: Source
    scaling: float = 1.0

    @property
    def a(self) -> Tensor:
        """A, [rank, in]; fp32 if it comes from a file."""
        return self.source_a if isinstance(self.source_a, Tensor) else self.source_a.read()

    @property
    def b(self) -> Tensor:
        """B, [out, rank]; fp32 if it comes from a file."""
        return self.source_b if isinstance(self.source_b, Tensor) else self.source_b.read()

    @property
    def rank(self) -> int:
        """Number of rows of A: the rank that is stored, not the numerical one."""
        return self.source_a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight; reads nothing."""
        return self.source_b.shape[0], self.source_a.shape[1]

    @property
    def device(self) -> torch.device:
        """Where `a` and `b` are, or are read to."""
        return self.source_a.device

    def delta(self) -> Tensor:
        """Return the full weight change [out, in] in fp32."""
        return (self.b.float() * self.scaling) @ self.a.float()

    def on(self, device: torch.device | str) -> "Factors":
        """Return the same weight change with its factors, or where they are read to, on a device."""
        place = torch.device(device)
        return Factors(_on(self.source_a, place), _on(self.source_b, place), self.scaling)

    def norms(self) -> tuple[float, float]:
        """Return ‖A‖ and ‖B‖; of what is stored they are known from when the file was opened."""
        return _norm(self.source_a), _norm(self.source_b)

    def bound(self) -> float:
        """Return |scaling| ‖A‖ ‖B‖, which no number of the change exceeds; NaN or infinity if one is not finite."""
        return abs(self.scaling) * math.prod(self.norms())

    def a_sha256(self) -> bytes:
        """Return a hash of the numbers of A, by which parties that share it are known; reads nothing."""
        if isinstance(self.source_a, StoredTensor):
            return self.source_a.sha256
        return hashlib.sha256(self.source_a.float().cpu().contiguous().numpy().data).digest()


def _norm(source: Source) -> float:
    return source.norm if isinstance(source, StoredTensor) else frobenius(source)


def _on(source: Source, device: torch.device) -> Source:
    return source.to(device) if isinstance(source, Tensor) else replace(source, device=device)


Modules = Mapping[str, tuple[Factors, ...]]
"""Per module the factors of every party, in one order of parties throughout."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """One input of a merge.

    Attributes:
        party: Who it comes from; a folder's name for a plain PEFT adapter.
        modules: Factors per module, named as in the base model.
        config: PEFT's configuration.
        sha256: Hash of its files, as of a release.
        base_sha256: The base model's hash, if a statement or the record of a merge says it.
        statement: The privacy statement; empty for an adapter without one.
        heads: Heads that came with it.
    """

    party: str
    modules: Mapping[str, Factors]
    config: dict[str, Any]
    sha256: str
    base_sha256: str | None = None
    statement: dict[str, Any] = field(default_factory=dict)
    heads: dict[str, Head] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The base model's name: a hub id as it is, of a path only its last part, which two machines can share.

        Empty where the configuration names none.
        """
        name = self.config.get("base_model_name_or_path")
        if not isinstance(name, str):
            return ""
        return name if HUB_ID.fullmatch(name) else name.replace("\\", "/").rstrip("/").rpartition("/")[2]

    @property
    def a_seed(self) -> int | None:
        """Seed of the shared A, if the statement says it."""
        training = self.statement.get("training")
        seed = training.get("seed") if isinstance(training, Mapping) else None
        return seed if type(seed) is int else None


def read_adapter(folder: Path, party: str | None = None) -> Adapter:
    """Open a release, a merged model, or a plain PEFT adapter folder, and check all of it.

    The factors stay in the file; every byte is read once here, to hash it and to see that all numbers are finite.

    Raises:
        DpmergeError: DPM-402 for a folder without a LoRA adapter in safetensors; DPM-401 for malformed files.
    """
    fix = "name a folder with a LoRA adapter in safetensors"
    if not folder.is_dir():
        raise DpmergeError("DPM-402", f"{folder} is no folder", fix)
    names = set(names_in(folder, MAX_NAMES))
    if ADAPTER not in names or CONFIG not in names:
        pickles = sorted(name for name in names if Path(name).suffix in PICKLES)
        problem = f"holds only pickled weights ({', '.join(pickles)})" if pickles else f"lacks {CONFIG} or {ADAPTER}"
        raise DpmergeError("DPM-402", f"{folder} {problem}", fix)
    known = names & {ADAPTER, CONFIG, HEAD, STATEMENT, MERGE}
    origin = party or folder.name
    released = STATEMENT in known or MERGE in known
    if released:
        check_names(known, origin)
    links = not released  # in the cache of the hub every file is a link; a release has none
    files = {name: _read(folder, name, origin, links=links) for name in sorted(known - {ADAPTER})}
    dtypes = ("F32",) if released else tuple(DTYPES)
    with _named(f"{origin}: {ADAPTER}"):
        tensors, sha256 = open_tensors(folder / ADAPTER, f"{origin}: {ADAPTER}", dtypes, links=links)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    digest = hash_of_hashes(hashes | {ADAPTER: sha256})
    if released:
        return _of_release(release_around({}, files, origin), tensors, origin, digest)
    config = parse_json(files[CONFIG], f"{origin}: {CONFIG}")
    return Adapter(origin, lora_factors(tensors, config, origin), config, digest)


def _read(folder: Path, name: str, origin: str, *, links: bool) -> bytes:
    with _named(f"{origin}: {name}"):
        return read_file(folder / name, MAX_HEAD_BYTES if name == HEAD else MAX_JSON_BYTES, links=links)


@contextmanager
def _named(origin: str) -> Iterator[None]:
    """Say of a file that is not read whose it is."""
    try:
        yield
    except NoPlainFile:
        fix = "copy the adapter's files into a folder"
        raise DpmergeError("DPM-402", f"{origin} is no regular file", fix) from None
    except TooLarge as refusal:
        raise ReleaseRefused("size", f"{origin}: {refusal.size} bytes", refusal.fix) from None


def adapter_from_files(files: Mapping[str, bytes], party: str) -> Adapter:
    """Turn the files of a release, a merged model or a plain PEFT adapter into an `Adapter`.

    Args:
        files: File name → bytes.
        party: Name of an adapter that does not state one itself.

    Raises:
        DpmergeError: DPM-402 for what is no plain LoRA; DPM-401 for malformed files.
    """
    digest = release_hash(files)
    if STATEMENT in files or MERGE in files:
        release = release_from_files(files, party)
        return _of_release(release, release.adapter, party, digest)
    config = parse_json(files[CONFIG], f"{party}: {CONFIG}")
    tensors, _ = parse_tensors(files[ADAPTER], f"{party}: {ADAPTER}", DTYPES)
    in_fp32 = {key: tensor.float() for key, tensor in tensors.items()}
    return Adapter(party, lora_factors(in_fp32, config, party), config, digest)


def _of_release(release: Release, tensors: Mapping[str, Source], party: str, digest: str) -> Adapter:
    """Return a release as an input of a merge; a merged model is nobody's and takes the given name."""
    party = release.party if release.statement else party
    factors = lora_factors(tensors, release.adapter_config, party)
    _check_statement(release, tensors, party)
    stated = (release.statement or release.merge or {}).get("base_sha256")
    base_sha256 = stated if isinstance(stated, str) else None
    return Adapter(party, factors, release.adapter_config, digest, base_sha256, release.statement, release.heads)


def _check_statement(release: Release, tensors: Mapping[str, Source], party: str) -> None:
    """Refuse values of other kinds than a statement's or a merge record's, before anything is made of them.

    So is a statement of more noised values than the release has: what replays its noise makes room for them.
    """
    fix = "send the folder as dpmerge wrote it"
    if problem := form_problem(release.statement):
        raise ReleaseRefused("statement-inconsistent", f"{party}: {STATEMENT}: {problem}", fix)
    try:
        MERGE_RECORD(release.merge, MERGE) if release.merge is not None else None
    except Unfit as error:
        raise ReleaseRefused("config", f"{party}: {error}", fix) from error
    stated = release.statement.get("num_coordinates", 0)
    held = sum(math.prod(source.shape) for source in tensors.values())
    held += sum(t.numel() for head in release.heads.values() for t in (head.weight, head.bias) if t is not None)
    if stated > held:
        problem = f"{party}: {STATEMENT}: num_coordinates = {stated}, but the release has {held} values"
        raise ReleaseRefused("statement-inconsistent", problem, fix)


def lora_factors(tensors: Mapping[str, Source], config: Mapping[str, Any], party: str) -> dict[str, Factors]:
    """Pair up the LoRA tensors of an adapter, with each module's own scaling.

    Args:
        tensors: fp32 tensors under PEFT's keys, or where they are stored.
        config: PEFT's configuration: r, lora_alpha, use_rslora, rank_pattern, alpha_pattern.
        party: Named in every refusal.

    Raises:
        DpmergeError: DPM-402 for anything that is not LoRA on linear layers, or whose shapes contradict the
            configuration.
    """
    check_plain_lora(config, party)
    factors = {}
    pairs = {key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")}
    check_patterns(config, {stem.removeprefix(PEFT_PREFIX) for stem in pairs}, party)
    for stem in sorted(pairs):
        if f"{stem}.lora_B.weight" in tensors:
            name = stem.removeprefix(PEFT_PREFIX)
            a, b = tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"]
            factors[name] = Factors(a, b, scaling(name, a.shape, b.shape, config, party))
    for key in tensors:
        if not key.endswith((".lora_A.weight", ".lora_B.weight")) or key.rpartition(".lora_")[0] not in pairs:
            raise DpmergeError("DPM-402", f"{party}: {key} has no place in a LoRA merge", "merge plain LoRA adapters")
    if len(tensors) != 2 * len(factors) or not factors:
        problem = f"{party}: {len(tensors)} tensors form {len(factors)} pairs of lora_A and lora_B"
        raise DpmergeError("DPM-402", problem, "save the adapter again with PEFT")
    return factors
