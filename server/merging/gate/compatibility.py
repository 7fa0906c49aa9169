"""Whether adapters fit together: every mismatch by party, for whoever merges them, from the command line or Python.

What most of the parties share counts as right, of equals the first. Nothing is read here but what is in memory already.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import ADAPTER
from dpmerge.server.merging.adapters.bases import difference, same_name
from dpmerge.server.merging.adapters.deltas import LARGEST, Adapter, LowRankDelta, Modules, digest
from dpmerge.server.merging.adapters.settings import shown, stated

MAX_NAMED = 8  # names listed in one sentence; the rest is counted


def gather(
    adapters: Sequence[Adapter], *, strict: bool = True, device: torch.device | str | None = None
) -> tuple[Modules, list[str]]:
    """Refuse adapters that do not fit together, and line their modules up. Copies nothing.

    Args:
        adapters: At least one, with different party names.
        strict: As in `misfits`. Otherwise the change of a module that a party does not adapt is 0 there, and listed.
        device: Where factors are read to, and methods compute; None leaves them where they are.

    Returns:
        The factors per module, and a list "party: module" of what was taken as 0.

    Raises:
        DpmergeError: DPM-403 without adapters; DPM-402 with *every* mismatch.
    """
    if not adapters:
        raise nothing_to_merge()
    refusals = misfits(adapters, strict=strict)
    if refusals:
        fix = "merge adapters of one base model and one set of modules, each party once"
        raise (
            refusals[0] if len(refusals) == 1 else DpmergeError("DPM-402", "; ".join(r.problem for r in refusals), fix)
        )
    shapes = {name: item.shape for adapter in adapters for name, item in adapter.modules.items()}
    absent = [f"{a.party}: {name}" for name in sorted(shapes) for a in adapters if name not in a.modules]
    nothing = {name: LowRankDelta(torch.zeros(0, width), torch.zeros(out, 0)) for name, (out, width) in shapes.items()}
    rows = {name: tuple(a.modules.get(name, nothing[name]) for a in adapters) for name in sorted(shapes)}
    return rows if device is None else {n: tuple(f.on(device) for f in row) for n, row in rows.items()}, absent


def misfits(adapters: Sequence[Adapter], *, strict: bool) -> list[DpmergeError]:
    """Return everything that keeps adapters from being merged, each refusal with its own remedy.

    Args:
        adapters: In the order in which parties are named.
        strict: Whether it is a mismatch that parties adapt different modules or state different seeds of A.
    """
    found = [*_names(adapters), *_bases(adapters), *_shapes(adapters), *_kinds(adapters)]
    found += [*_sizes(adapters), *_heads(adapters)]
    return [*found, *_seeds(adapters), *_targets(adapters)] if strict else found


def nothing_to_merge() -> DpmergeError:
    """Return the refusal of a merge of nothing."""
    return DpmergeError("DPM-403", "no adapter to merge", "give at least one release or PEFT adapter folder")


def refused(party: str, problem: str, fix: str) -> DpmergeError:
    """Return the refusal of one party's adapter.

    Args:
        party: Whose adapter it is.
        problem: What is wrong with it.
        fix: What to do.
    """
    return DpmergeError("DPM-402", f"{party}: {problem}", fix)


def listed(names: Sequence[str]) -> str:
    """List names, the first `MAX_NAMED` of many."""
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _usual(values: Mapping[str, Hashable]) -> tuple[Any, str]:
    """Return the commonest value, the first of them if several are, and who has it."""
    value = Counter(values.values()).most_common(1)[0][0]
    return value, listed([party for party, own in values.items() if own == value])


def _unlike(values: Mapping[str, Hashable]) -> list[tuple[str, Any, Any, str]]:
    """Return every party that does not have the usual value: its name, its value, the usual one, and who has that."""
    if not values:
        return []
    usual, having = _usual(values)
    return [(party, own, usual, having) for party, own in values.items() if own != usual]


def _names(adapters: Sequence[Adapter]) -> list[DpmergeError]:
    counts = Counter(adapter.party for adapter in adapters)
    return [
        DpmergeError("DPM-402", f"{party!r} is no name of a party", "give it another, as in shop=FOLDER")
        for party in counts
        if not party or party != party.strip() or not party.isprintable()
    ] + [
        refused(party, f"{count} adapters have this name", f"name them, as in {party}-1=FOLDER; each party once")
        for party, count in counts.items()
        if count > 1
    ]


def _bases(adapters: Sequence[Adapter]) -> list[DpmergeError]:
    """Compare base models by hash where it is stated, else by the names that those of the usual hash have."""
    hashes = {adapter.party: adapter.base_sha256 for adapter in adapters if adapter.base_sha256}
    names = {adapter.party: adapter.base for adapter in adapters}
    known, having = _usual(hashes) if hashes else ("", "")
    alike = {names[party] for party, own in hashes.items() if own == known} or (
        {_usual_name(names)} if names else set()
    )
    called = listed([party for party, name in names.items() if name in alike])
    refusals = []
    for party, name in names.items():
        if not name or name[0] in ".~":
            unnamed = "set base_model_name_or_path in its adapter_config.json"
            refusals.append(refused(party, f"names no base model ({name!r})", unnamed))
        elif party in hashes and hashes[party] != known:
            problem = f"base model {name} has SHA-256 {hashes[party][:12]}… but {known[:12]}… at {having}"
            refusals.append(refused(party, problem, "leave it out, or give an adapter of the same base model"))
        elif party not in hashes and not any(same_name(name, other) for other in alike):
            hint = next((f" ({what})" for other in sorted(alike) if (what := difference(name, other))), "")
            fix = "leave it out, or give --base MODEL if all are adapters of MODEL"
            problem = f"base model {name} but {' or '.join(sorted(alike))} at {called}{hint}"
            refusals.append(refused(party, problem, fix))
    return refusals + _revisions(adapters)


def _usual_name(names: Mapping[str, str]) -> str:
    """Return the commonest name, with an organisation where the parties that have one agree on it."""
    usual, _ = _usual(names)
    full = Counter(name for name in names.values() if "/" in name and same_name(name, usual))
    return full.most_common(1)[0][0] if full else str(usual)


def _revisions(adapters: Sequence[Adapter]) -> list[DpmergeError]:
    """Compare the base model's revisions where several are stated, of parties without its hash."""
    stated_ones = {
        adapter.party: str(revision)
        for adapter in adapters
        if (revision := stated(adapter.config, "revision")) and not adapter.base_sha256 and not adapter.known_base
    }
    fix = "leave it out, or give --base MODEL if all are adapters of MODEL"
    return [
        refused(party, f"revision {shown(revision)} of the base model but {shown(usual)} at {having}", fix)
        for party, revision, usual, having in _unlike(stated_ones)
    ]


def _kinds(adapters: Sequence[Adapter]) -> list[DpmergeError]:
    """Refuse a module that is an embedding at one party and none at another, and copies of its weight that differ."""
    everywhere = frozenset[str]().union(*(adapter.embeddings for adapter in adapters))
    fix = "leave it out: its base model is not the others', whatever its name says"
    refusals = [
        refused(adapter.party, f"{name} is no embedding but one at others", fix)
        for adapter in adapters
        for name in sorted(everywhere & adapter.modules.keys() - adapter.embeddings)
    ]
    for module in sorted({module for adapter in adapters for module in adapter.copies}):
        hashes = {a.party: digest(a.copies[module]) for a in adapters if module in a.copies}
        fix = "leave it out: its vocabulary was changed, or that layer trained"
        refusals += [
            refused(party, f"its copy of the base model's {module} is not that of {having}", fix)
            for party, _, _, having in _unlike(hashes)
        ]
    return refusals


def _shapes(adapters: Sequence[Adapter]) -> list[DpmergeError]:
    fix = "leave it out: its base model is not the others', whatever its name says"
    refusals = []
    for module in sorted({module for adapter in adapters for module in adapter.modules}):
        shapes = {adapter.party: adapter.modules[module].shape for adapter in adapters if module in adapter.modules}
        refusals += [
            refused(party, f"{module} is {shape} but {usual} at {having}", fix)
            for party, shape, usual, having in _unlike(shapes)
        ]
    return refusals


def _sizes(adapters: Sequence[Adapter]) -> list[DpmergeError]:
    fix = "leave it out: its training diverged, or the file is damaged"
    refusals = []
    for adapter in adapters:
        for module, item in sorted(adapter.modules.items()):
            if not (bound := item.bound()) <= LARGEST:
                problem = f"the change of {module} {'is too large for fp32' if bound > LARGEST else 'is not finite'}"
                refusals.append(refused(adapter.party, f"{ADAPTER}: {problem}", fix))
    return refusals


def _heads(adapters: Sequence[Adapter]) -> list[DpmergeError]:
    owners: dict[str, list[str]] = {}
    for adapter in adapters:
        for head in sorted({*adapter.heads, *adapter.saved}):
            owners.setdefault(head, []).append(adapter.party)
    fix = "merge each party's release once"
    return [
        refused(parties[-1], f"brings a head of {head}, and so does {listed(parties[:-1])}", fix)
        for head, parties in owners.items()
        if len(parties) > 1
    ]


def _seeds(adapters: Sequence[Adapter]) -> list[DpmergeError]:
    seeds = {adapter.party: adapter.a_seed for adapter in adapters if adapter.a_seed is not None}
    fix = "leave it out, or give --no-strict: different A's merge exactly, at a larger rank"
    return [
        refused(party, f"A was made from seed {seed} but {usual} at {having}", fix)
        for party, seed, usual, having in _unlike(seeds)
    ]


def _targets(adapters: Sequence[Adapter]) -> list[DpmergeError]:
    everything = {module for adapter in adapters for module in adapter.modules}
    fix = "give --no-strict to take its change there as 0"
    return [
        refused(adapter.party, f"does not adapt {listed(sorted(lacking))}, which others do", fix)
        for adapter in adapters
        if (lacking := everything - adapter.modules.keys())
    ]
