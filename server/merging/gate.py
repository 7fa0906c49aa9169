"""The merge gate: what every adapter is, and everything that keeps them from being merged, before any arithmetic.

A merge that stopped at the first mismatch would be asked for again once per mismatch. The gate reads all adapters, one
module at a time, and lists every mismatch by party with its remedy. What most of the parties share counts as right.
"""

import hashlib
import math
import os
import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release import ADAPTER
from dpmerge.server.merging.deltas import LARGEST, Adapter, read_adapter
from dpmerge.server.merging.stored import DTYPES

_WORDS = {dtype: word for word, dtype in DTYPES.items()}  # torch's dtype → safetensors' word

MAX_NAMED = 8  # names listed in one sentence; the rest is counted


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
        delta: The stated δ.
        unit: What one neighbour differs in, "record" or "user".
        statement: The privacy statement, empty without one.
        overflowing: Modules whose change may hold numbers that fp32 does not.
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
    delta: float | None
    unit: str | None
    statement: Mapping[str, Any]
    overflowing: tuple[str, ...]

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
        values = {key: value for key, value in asdict(self).items() if key not in ("shapes", "statement")}
        return values | {"targets": sorted(self.shapes)}


@dataclass(frozen=True)
class Gate:
    """What was read, and why it cannot be merged.

    Attributes:
        adapters: The readable adapters, in the order given.
        entries: One per adapter.
        refusals: Every mismatch; merging is sound only if there is none.
    """

    adapters: tuple[Adapter, ...]
    entries: tuple[Entry, ...]
    refusals: tuple[DpmergeError, ...] = field(default=())


def inspect(inputs: Sequence[tuple[str | None, Path]], *, strict: bool) -> Gate:
    """Read adapters and list everything that keeps them from being merged.

    Args:
        inputs: Per adapter a party name, or None for its own (a plain adapter's folder), and its folder.
        strict: Whether it is a mismatch that parties adapt different modules or state different seeds of A.

    Raises:
        DpmergeError: DPM-403 without inputs.
    """
    if not inputs:
        raise DpmergeError("DPM-403", "no adapter to merge", "give at least one release or PEFT adapter folder")
    adapters, entries, refusals = [], [], []
    for name, folder in inputs:
        try:
            adapter = read_adapter(folder, name or Path(os.path.realpath(folder)).name)
            entries.append(_entry(adapter, folder))
            adapters.append(adapter)
        except DpmergeError as refusal:
            refusals.append(refusal)
        except OSError as problem:
            fix = "check the path and the permissions"
            refusals.append(DpmergeError("DPM-402", f"{folder} cannot be read: {problem.strerror}", fix))
        else:
            if name and name != adapter.party:
                fix = "give its folder without a name"
                refusals.append(_refused(name, f"{folder} is a release of {adapter.party}", fix))
    refusals += [*_names(entries), *_bases(entries), *_shapes(entries), *_overflows(entries), *_heads(adapters)]
    refusals += [*_seeds(entries), *_targets(entries)] if strict else []
    return Gate(tuple(adapters), tuple(entries), tuple(refusals))


def _entry(adapter: Adapter, folder: Path) -> Entry:
    digest = hashlib.sha256()
    shapes, ranks, scalings, dtypes, overflowing = {}, set(), set(), set(), []
    for name, item in sorted(adapter.modules.items()):
        a = item.a  # read from disk, once
        shapes[name] = item.shape
        ranks.add(item.rank)
        scalings.add(item.scaling)
        dtypes |= {_WORDS[source.dtype] for source in (item.source_a, item.source_b)}
        digest.update(f"{name}|{tuple(a.shape)}|".encode())
        digest.update(a.contiguous().cpu().numpy().data)
        lengths = [float(torch.linalg.vector_norm(factor, dtype=torch.float64)) for factor in (a, item.b)]
        if not abs(item.scaling) * math.prod(lengths) <= LARGEST:  # no entry is larger than this product
            overflowing.append(name)
    stated = adapter.statement
    return Entry(
        party=adapter.party,
        folder=str(folder),
        sha256=adapter.sha256,
        base=adapter.base,
        base_sha256=adapter.base_sha256 if isinstance(adapter.base_sha256, str) else None,
        shapes=shapes,
        ranks=tuple(sorted(ranks)),
        scalings=tuple(sorted(scalings)),
        dtypes=tuple(sorted(dtypes)),
        a_sha256=digest.hexdigest(),
        a_seed=_a_seed(stated),
        private=bool(stated.get("private", True)) if stated else None,
        epsilon=_number(stated.get("epsilon")),
        delta=_number(stated.get("target_delta")),
        unit=str(stated["privacy_unit"]) if "privacy_unit" in stated else None,
        statement=stated,
        overflowing=tuple(overflowing),
    )


def _a_seed(statement: Mapping[str, Any]) -> int | None:
    training = statement.get("training")
    seed = training.get("seed") if isinstance(training, Mapping) else None
    return seed if type(seed) is int else None


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= sys.float_info.max else None


def _refused(party: str, problem: str, fix: str) -> DpmergeError:
    return DpmergeError("DPM-402", f"{party}: {problem}", fix)


def _usual(values: Mapping[str, Hashable]) -> tuple[Any, str]:
    """Return the commonest value, the first of them if several are, and who has it."""
    value = Counter(values.values()).most_common(1)[0][0]
    return value, some([party for party, own in values.items() if own == value])


def some(names: Sequence[str]) -> str:
    """List names, the first `MAX_NAMED` of many."""
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _names(entries: Sequence[Entry]) -> list[DpmergeError]:
    counts = Counter(entry.party for entry in entries)
    return [
        DpmergeError("DPM-402", f"{party!r} is no name of a party", "give it another, as in shop=FOLDER")
        for party in counts
        if not party or party != party.strip() or not party.isprintable()
    ] + [
        _refused(party, f"{count} adapters have this name", f"name them, as in {party}-1=FOLDER; each party once")
        for party, count in counts.items()
        if count > 1
    ]


def _bases(entries: Sequence[Entry]) -> list[DpmergeError]:
    """Compare base models by hash where it is stated, else by the name that those of the usual hash have."""
    hashes = {entry.party: entry.base_sha256 for entry in entries if entry.base_sha256}
    names = {entry.party: entry.base.rpartition("/")[2] for entry in entries}
    known, having = _usual(hashes) if hashes else ("", "")
    alike = {names[party] for party, own in hashes.items() if own == known} or {_usual(names)[0]} if names else set()
    called = some([party for party, name in names.items() if name in alike])
    fix = "leave it out, or give an adapter of the same base model"
    refusals = []
    for party, name in names.items():
        if not name or name[0] in ".~":
            unnamed = "set base_model_name_or_path in its adapter_config.json"
            refusals.append(_refused(party, f"names no base model ({name!r})", unnamed))
        elif party in hashes and hashes[party] != known:
            problem = f"base model {name} has SHA-256 {hashes[party][:12]}… but {known[:12]}… at {having}"
            refusals.append(_refused(party, problem, fix))
        elif party not in hashes and name not in alike:
            refusals.append(_refused(party, f"base model {name} but {' or '.join(sorted(alike))} at {called}", fix))
    return refusals


def _shapes(entries: Sequence[Entry]) -> list[DpmergeError]:
    refusals = []
    for module in sorted({module for entry in entries for module in entry.shapes}):
        shapes = {entry.party: entry.shapes[module] for entry in entries if module in entry.shapes}
        usual, having = _usual(shapes)
        for party, shape in shapes.items():
            if shape != usual:
                fix = "leave it out: its base model is not the others', whatever its name says"
                refusals.append(_refused(party, f"{module} is {shape} but {usual} at {having}", fix))
    return refusals


def _targets(entries: Sequence[Entry]) -> list[DpmergeError]:
    everything = {module for entry in entries for module in entry.shapes}
    return [
        _refused(
            entry.party,
            f"does not adapt {some(sorted(everything - entry.shapes.keys()))}, which others do",
            "give --no-strict to take its change there as 0",
        )
        for entry in entries
        if everything - entry.shapes.keys()
    ]


def _overflows(entries: Sequence[Entry]) -> list[DpmergeError]:
    fix = "leave it out: its training diverged, or the file is damaged"
    return [
        _refused(entry.party, f"{ADAPTER}: the change of {module} is too large for fp32", fix)
        for entry in entries
        for module in entry.overflowing
    ]


def _seeds(entries: Sequence[Entry]) -> list[DpmergeError]:
    seeds = {entry.party: entry.a_seed for entry in entries if entry.a_seed is not None}
    if len(set(seeds.values())) < 2:
        return []
    usual, having = _usual(seeds)
    fix = "leave it out, or give --no-strict: different A's merge exactly, at a larger rank"
    return [
        _refused(party, f"A was made from seed {seed} but {usual} at {having}", fix)
        for party, seed in seeds.items()
        if seed != usual
    ]


def _heads(adapters: Sequence[Adapter]) -> list[DpmergeError]:
    owners: dict[str, list[str]] = {}
    for adapter in adapters:
        for head in adapter.heads:
            owners.setdefault(head, []).append(adapter.party)
    fix = "merge each party's release once"
    return [
        _refused(parties[-1], f"brings a head of {head}, and so does {some(parties[:-1])}", fix)
        for head, parties in owners.items()
        if len(parties) > 1
    ]
