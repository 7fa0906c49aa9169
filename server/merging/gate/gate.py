"""The merge gate: what every adapter is, and everything that keeps them from being merged, before any arithmetic.

A merge that stopped at the first mismatch would be asked for again once per mismatch. The gate reads all adapters,
every byte once, and lists every mismatch by party with its remedy; what a mismatch is, `fit` says.
"""

import hashlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.bases import local_folder, settled
from dpmerge.server.merging.adapters.deltas import Adapter, read_adapter
from dpmerge.server.merging.adapters.lazy_tensors import DTYPES
from dpmerge.server.merging.gate.compatibility import listed, misfits, nothing_to_merge, refused

_WORDS = {dtype: word for word, dtype in DTYPES.items()}  # torch's dtype → safetensors' word


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One adapter, as it is shown before a merge.

    Attributes:
        party: Whose it is.
        folder: Where it was read from.
        sha256: Hash of its files.
        base: The base model's name.
        base_sha256: The base model's hash, if a statement says it.
        shapes: Module → (out, in).
        ranks: The different ranks, ascending.
        scalings: The different factors on B A, ascending.
        dtypes: As stored, in safetensors' words.
        a_sha256: Hash of all A's; equal hashes are a shared A.
        a_seed: Seed of the shared A, if a statement says it.
        private: Whether the statement claims privacy; None without a statement.
        epsilon: The stated ε, not verified here.
        target_delta: The stated δ.
        unit: What one neighbour differs in, "record" or "user".
        statement: The privacy statement, empty without one.
    """

    party: str
    folder: str
    sha256: str
    base: str
    base_sha256: str | None
    shapes: Mapping[str, tuple[int, int]]
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    dtypes: tuple[str, ...]
    a_sha256: str
    a_seed: int | None
    private: bool | None
    epsilon: float | None
    target_delta: float | None
    unit: str | None
    statement: Mapping[str, Any]

    @property
    def claim(self) -> str:
        """The stated ε in words, rounded up."""
        if self.private is None:
            return "no statement"
        if not self.private:
            return "not private"
        return "not stated" if self.epsilon is None else f"{math.ceil(self.epsilon * 1000) / 1000:g}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with the names of the modules in place of their shapes, and without the statement."""
        names = {"target_delta": "delta"}
        values = {
            names.get(key, key): value for key, value in asdict(self).items() if key not in ("shapes", "statement")
        }
        return values | {"targets": sorted(self.shapes)}


@dataclass(frozen=True)
class Gate:
    """What was read, and why it cannot be merged.

    Attributes:
        adapters: The readable adapters, in the order given.
        entries: One per adapter.
        refusals: Every mismatch; merging is sound only if there is none.
        warnings: What is merged all the same and may not be meant, a sentence each.
    """

    adapters: tuple[Adapter, ...]
    entries: tuple[Entry, ...]
    refusals: tuple[DpmergeError, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())


def inspect_adapters(inputs: Sequence[tuple[str | None, Path]], *, strict: bool, base: str = "") -> Gate:
    """Read adapters and list everything that keeps them from being merged.

    Args:
        inputs: Per adapter a party name, or None for its own (a plain adapter's folder), and its folder.
        strict: Whether it is a mismatch that parties adapt different modules or state different seeds of A.
        base: The base model of all, an alias, a folder or a hub id, if the user says so; empty for what adapters say.

    Raises:
        DpmergeError: DPM-403 without inputs.
    """
    if not inputs:
        raise nothing_to_merge()
    read, refusals = list[tuple[Adapter, Path]](), list[DpmergeError]()
    for name, folder in inputs:
        try:
            adapter = read_adapter(folder, name or Path(os.path.realpath(folder)).name, base)
            read.append((adapter, folder))
        except DpmergeError as refusal:
            refusals.append(refusal)
        except OSError as problem:
            fix = "check the path and the permissions"
            refusals.append(DpmergeError("DPM-402", f"{folder} cannot be read: {problem.strerror}", fix))
        else:
            if name and name != adapter.party:
                fix = "give its folder without a name"
                refusals.append(refused(name, f"{folder} is a release of {adapter.party}", fix))
    adapters, warnings = settled([adapter for adapter, _ in read], base)
    refusals += misfits(adapters, strict=strict) + _on_base(adapters, base)
    entries = [_entry(adapter, folder) for adapter, (_, folder) in zip(adapters, read, strict=True)]
    return Gate(tuple(adapters), tuple(entries), tuple(refusals), tuple([*warnings, *_warnings(adapters)]))


def _on_base(adapters: Sequence[Adapter], base: str) -> list[DpmergeError]:
    """Hold the adapters against their base model, where it lies on this machine."""
    named = [item for item in adapters if base or not item.base_sha256]  # of others a hash says more than the name
    places = [base] if base else [str(item.config.get("base_model_name_or_path") or "") for item in named]
    folder = next((found for name in places if (found := local_folder(name))), None)
    if folder is None or not named:
        return []
    from dpmerge.server.merging.gate.on_base import misplaced  # transformers takes a second to import

    return misplaced(named, folder)


def _warnings(adapters: Sequence[Adapter]) -> list[str]:
    lines = []
    for adapter in adapters:
        still = [name for name, item in sorted(adapter.modules.items()) if item.scaling == 0]
        if still:
            lines.append(f"{adapter.party}: lora_alpha = 0 for {listed(still)}, so that nothing is merged there")
        if adapter.config.get("use_dora") is True:
            lines.append(
                f"{adapter.party}: DoRA's change is of full rank, and so is what is merged with it; see --rank"
            )
        if adapter.copies:
            names = listed(sorted(adapter.copies))
            lines.append(f"{adapter.party}: its copy of {names} is taken for the base model's own and is not written")
    return lines


def _entry(adapter: Adapter, folder: Path) -> Entry:
    digest = hashlib.sha256()
    for name, item in sorted(adapter.modules.items()):
        digest.update(f"{name}|{item.rank}|{item.shape[1]}|".encode() + item.a_sha256())
    factors = adapter.modules.values()
    stated = adapter.statement
    return Entry(
        party=adapter.party,
        folder=str(folder),
        sha256=adapter.sha256,
        base=adapter.base,
        base_sha256=adapter.base_sha256,
        shapes={name: item.shape for name, item in adapter.modules.items()},
        ranks=tuple(sorted({item.rank for item in factors})),
        scalings=tuple(sorted({item.scaling for item in factors})),
        dtypes=tuple(sorted({_WORDS[source.dtype] for item in factors for source in (item.source_a, item.source_b)})),
        a_sha256=digest.hexdigest(),
        a_seed=adapter.a_seed,
        private=bool(stated.get("private", True)) if stated else None,
        epsilon=_number(stated.get("epsilon")),
        target_delta=_number(stated.get("target_delta")),
        unit=str(stated["privacy_unit"]) if "privacy_unit" in stated else None,
        statement=stated,
    )


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= sys.float_info.max else None
