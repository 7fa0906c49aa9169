"""What is merged: low-rank weight changes τ = scaling · B A per module and party.

Reads releases, merged models and plain PEFT adapter folders alike. A module that a party does not adapt has delta 0,
which is a factor pair of rank 0; so ragged ranks, absent modules and shared or independent A all are the same case to
the methods. LowRankDelta of a folder stay in their file until a method looks at them, one party and module at a time.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import (
    ADAPTER,
    CONFIG,
    HEAD,
    MERGE,
    MODULES,
    PICKLES,
    SIGNATURE,
    STATEMENT,
    Head,
    Release,
    by_party,
    check_names,
    hash_of_hashes,
    release_around,
    release_from_files,
    release_hash,
)
from dpmerge.common.release.manifest import manifest_of, parse_signature
from dpmerge.common.release.merge_record import MERGE_RECORD
from dpmerge.common.statement.form import form_problem
from dpmerge.common.untrusted.kinds import Unfit
from dpmerge.common.untrusted.parsing import MAX_LOCAL_JSON_BYTES, ReleaseRefused, parse_json, parse_tensors
from dpmerge.common.untrusted.reading import NoPlainFile, TooLarge, names_in, read_file
from dpmerge.server.merging.adapters.bases import base_id, local_folder
from dpmerge.server.merging.adapters.contents import Contents, Source, read_contents
from dpmerge.server.merging.adapters.dora import Plain
from dpmerge.server.merging.adapters.lazy_tensors import DTYPES, frobenius, open_tensors

MAX_NAMES = 10_000  # in an adapter's folder, which may hold checkpoints beside it
MAX_HEAD_BYTES = 1 << 28

LARGEST = torch.finfo(torch.float32).max  # of any number in a change, whoever made it


@dataclass(frozen=True, eq=False)
class LowRankDelta:
    """One low-rank weight change, τ = scaling · b a.

    `a` and `b` of what is stored are read at each look, so that holding factors costs nothing: look once.

    Attributes:
        source_a: [rank, in], or where it is stored.
        source_b: [out, rank], or where it is stored.
        scaling: alpha/rank, or alpha/√rank with rsLoRA; 1 for everything that a merge returns.

    >>> LowRankDelta(torch.ones(1, 2), torch.ones(3, 1), 2.0).delta()
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

    def on(self, device: torch.device | str) -> "LowRankDelta":
        """Return the same weight change with its factors, or where they are read to, on a device."""
        place = torch.device(device)
        return LowRankDelta(_on(self.source_a, place), _on(self.source_b, place), self.scaling)

    def norms(self) -> tuple[float, float]:
        """Return ‖A‖ and ‖B‖; of what is stored they are known from when the file was opened."""
        return _norm(self.source_a), _norm(self.source_b)

    def bound(self) -> float:
        """Return |scaling| ‖A‖ ‖B‖, which no number of the change exceeds; NaN or infinity if one is not finite."""
        return abs(self.scaling) * math.prod(self.norms())

    def a_sha256(self) -> bytes:
        """Return a hash of the numbers of A, by which parties that share it are known; reads nothing."""
        return digest(self.source_a)


def digest(source: Source) -> bytes:
    """Return a hash of the numbers of a tensor as fp32; of what is stored, where the file kept one, reads nothing."""
    if not isinstance(source, Tensor):
        return source.sha256
    return hashlib.sha256(source.float().cpu().contiguous().numpy().data).digest()


def _norm(source: Source) -> float:
    return frobenius(source) if isinstance(source, Tensor) else source.norm


def _on(source: Source, device: torch.device) -> Source:
    return source.to(device) if isinstance(source, Tensor) else replace(source, device=device)


Modules = Mapping[str, tuple[LowRankDelta, ...]]
"""Per module the factors of every party, in one order of parties throughout."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """One input of a merge.

    Attributes:
        party: Who it comes from; a folder's name for a plain PEFT adapter.
        modules: LowRankDelta per module, named as in the base model.
        config: PEFT's configuration.
        sha256: Hash of its files, as of a release.
        base_sha256: The base model's hash, if a statement or the record of a merge says it.
        statement: The privacy statement; empty for an adapter without one.
        heads: Heads that came with it.
        embeddings: Those of `modules` that are embeddings, of which τ is the change of the weight's transpose.
        copies: Module → a copy of the base model's own weight, which PEFT saves beside LoRA on an embedding.
        saved: Party → tensor's name → a tensor of a head that was trained whole, `modules_to_save`.
        known_base: The base model's name where somebody settled it, in place of what the configuration says.
    """

    party: str
    modules: Mapping[str, LowRankDelta]
    config: dict[str, Any]
    sha256: str
    base_sha256: str | None = None
    statement: dict[str, Any] = field(default_factory=dict)
    heads: dict[str, Head] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()
    copies: Mapping[str, Source] = field(default_factory=dict)
    saved: Mapping[str, Mapping[str, Source]] = field(default_factory=dict)
    known_base: str = ""

    @property
    def base(self) -> str:
        """The base model's name: a hub id as it is, of a path only its last part, which two machines can share.

        Empty where the configuration names none.
        """
        return self.known_base or base_id(self.config.get("base_model_name_or_path"))

    @property
    def a_seed(self) -> int | None:
        """Seed of the shared A, if the statement says it."""
        training = self.statement.get("training")
        seed = training.get("seed") if isinstance(training, Mapping) else None
        return seed if type(seed) is int else None


def read_adapter(folder: Path, party: str | None = None, base: str = "") -> Adapter:
    """Open a release, a merged model, or a plain PEFT adapter folder, and check all of it.

    The factors stay in the file; every byte is read once here, to hash it and to see that all numbers are finite.

    Args:
        folder: Where it is.
        party: Its name, unless it has its own.
        base: The base model, for adapters that need its weights; empty for the one that they name.

    Raises:
        DpmergeError: DPM-402 for a folder without a LoRA adapter in safetensors; DPM-401 for malformed files.
    """
    names = _names_in_adapter(folder)
    known = names & {ADAPTER, CONFIG, HEAD, STATEMENT, MERGE, MODULES}
    origin = party or folder.name
    released = STATEMENT in known or MERGE in known
    if released:
        check_names(known, origin)
    links = not released  # in the cache of the hub every file is a link; a release has none
    if not released:
        known -= {MODULES}  # somebody else's file of this name
    files = {name: _read(folder, name, origin, links=links) for name in sorted(known - {ADAPTER, MODULES})}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    found: dict[str, Mapping[str, Plain]] = {ADAPTER: {}, MODULES: {}}
    for name, dtypes in ((ADAPTER, ("F32",) if released else tuple(DTYPES)), (MODULES, ("F32",))):
        if name in known:
            with _named(f"{origin}: {name}"):
                found[name], hashes[name] = open_tensors(folder / name, f"{origin}: {name}", dtypes, links=links)
    if STATEMENT in known and SIGNATURE in names:
        _check_signed(_read(folder, SIGNATURE, origin, links=False), hashes, origin)
    tensors, saved = found[ADAPTER], found[MODULES]
    sha256 = hash_of_hashes(hashes)
    if released:
        release = release_around({}, files, origin, max_json_bytes=MAX_LOCAL_JSON_BYTES)
        return _of_release(release, tensors, saved, origin, sha256)
    config = parse_json(files[CONFIG], f"{origin}: {CONFIG}", MAX_LOCAL_JSON_BYTES)
    return _of_peft(tensors, config, origin, sha256, base)


def _names_in_adapter(folder: Path) -> set[str]:
    """List a folder, which must hold an adapter in safetensors."""
    fix = "name a folder with a LoRA adapter in safetensors"
    if not folder.is_dir():
        raise DpmergeError("DPM-402", f"{folder} is no folder", fix)
    names = set(names_in(folder, MAX_NAMES))
    if ADAPTER not in names or CONFIG not in names:
        pickles = sorted(name for name in names if Path(name).suffix in PICKLES)
        problem = f"holds only pickled weights ({', '.join(pickles)})" if pickles else f"lacks {CONFIG} or {ADAPTER}"
        raise DpmergeError("DPM-402", f"{folder} {problem}", fix)
    return names


def _check_signed(signature: bytes, hashes: Mapping[str, str], origin: str) -> None:
    """Refuse a release that is not what its own signature lists; by whom it must be signed, only a key list tells."""
    manifest = manifest_of(parse_signature(signature, origin), origin)
    for name, digest in sorted(hashes.items()):
        if manifest.files.get(name) != digest:
            fix = f"merge the files as they were signed, or remove {SIGNATURE} to merge them as nobody's"
            raise ReleaseRefused("manifest", f"{origin}: {name} is not what {SIGNATURE} lists", fix)


def _read(folder: Path, name: str, origin: str, *, links: bool) -> bytes:
    with _named(f"{origin}: {name}"):
        return read_file(folder / name, MAX_HEAD_BYTES if name == HEAD else MAX_LOCAL_JSON_BYTES, links=links)


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
    sha256 = release_hash(files)
    if STATEMENT in files or MERGE in files:
        release = release_from_files(files, party)
        return _of_release(release, release.adapter, release.modules, party, sha256)
    config = parse_json(files[CONFIG], f"{party}: {CONFIG}")
    tensors, _ = parse_tensors(files[ADAPTER], f"{party}: {ADAPTER}", DTYPES)
    return _of_peft({key: tensor.float() for key, tensor in tensors.items()}, config, party, sha256)


def _of_peft(tensors: Mapping[str, Plain], config: dict[str, Any], party: str, sha256: str, base: str = "") -> Adapter:
    needed = config.get("use_dora") is True
    place = local_folder(base or str(config.get("base_model_name_or_path") or "")) if needed else None
    found = read_contents(tensors, config, party, place)
    saved = {party: found.saved} if found.saved else {}
    return Adapter(
        party, _factors(found), config, sha256, embeddings=found.embeddings, copies=found.copies, saved=saved
    )


def _of_release(
    release: Release, tensors: Mapping[str, Plain], saved: Mapping[str, Source], party: str, sha256: str
) -> Adapter:
    """Return a release as an input of a merge; a merged model is nobody's and takes the given name."""
    party = release.party if release.statement else party
    found = read_contents(tensors, release.adapter_config, party)
    _check_statement(release, tensors, party)
    stated = (release.statement or release.merge or {}).get("base_sha256")
    return Adapter(
        party,
        _factors(found),
        release.adapter_config,
        sha256,
        stated if isinstance(stated, str) else None,
        release.statement,
        release.heads,
        found.embeddings,
        found.copies,
        by_party(saved) if release.merge is not None else {},
    )


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


def lora_factors(tensors: Mapping[str, Plain], config: Mapping[str, Any], party: str) -> dict[str, LowRankDelta]:
    """Return the change of every module of an adapter; see `read_contents`.

    Args:
        tensors: Key → tensor, as PEFT wrote them.
        config: adapter_config.json.
        party: Whose adapter it is, for refusals.
    """
    return _factors(read_contents(tensors, config, party))


def _factors(found: Contents) -> dict[str, LowRankDelta]:
    return {name: LowRankDelta(*pair) for name, pair in found.pairs.items()}
