"""The site's own rules, which hold whatever a federation asks for, and where its ledgers are.

    schema = 1
    state = "/var/lib/dpmerge"               # where ledgers live; $DPMERGE_STATE or ~/.local/state/dpmerge if not given
    noise = "secure"                         # the weakest noise allowed; the default
    base_models = ["…"]                      # SHA-256 of the base models that may be trained; any if not given
    server_keys = ["ed25519:…"]              # whose receipts are believed

    [dataset.reviews]                        # the id: one ledger, however many rows are added
    data = "reviews.csv"                     # relative to this file; or task = "trec6"
    epsilon_cap = 8.0
    delta = 1e-5
    unit = "record"                          # or "user"; the default is "record"

What the policy does not list is not trained on.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from dpmerge.client.budget import Cap
from dpmerge.client.ledger import Ledger
from dpmerge.common.accounting import MAX_EPSILON
from dpmerge.common.config import FileSource, PartyPlan, TaskSource
from dpmerge.common.config_rules import PARTY_NAME
from dpmerge.common.config_subspace import RANDOM, SubspaceSettings
from dpmerge.common.errors import DpmergeError, closest
from dpmerge.common.files import fsync_folder, is_within, place_of
from dpmerge.common.large_delta import MIN_DELTA
from dpmerge.common.mechanism import NoiseMode, PrivacyUnit
from dpmerge.common.signing import SHA256, PublicKey
from dpmerge.common.sources import task_name
from dpmerge.common.tasks import TASKS

LEDGERS = "ledgers"


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One data set of the site.

    Attributes:
        id: Names its ledger.
        source: The task's name, or the resolved path of the file or folder.
        cap: What all that is ever trained on it may cost together.
    """

    id: str
    source: str | Path
    cap: Cap


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A site's policy; see the module's text for what its parts mean.

    Attributes:
        state: The site's state folder.
        datasets: The data sets that may be used; no source of one lies in another's.
        noise: The weakest noise allowed.
        base_models: Allowed hashes; None allows any.
        server_keys: Whose receipts are believed.
    """

    state: Path
    datasets: tuple[DataSet, ...]
    noise: NoiseMode = "secure"
    base_models: frozenset[str] | None = None
    server_keys: tuple[PublicKey, ...] = field(default=())

    def dataset_of(self, source: TaskSource | FileSource) -> DataSet:
        """Return the data set that a plan's records belong to.

        Raises:
            DpmergeError: DPM-507 if the policy lists none.
        """
        wanted = source.task if isinstance(source, TaskSource) else place_of(source.path)
        for dataset in self.datasets:
            if dataset.source == wanted:
                return dataset
        what = f"task {wanted!r}" if isinstance(source, TaskSource) else f"the file {Path(source.path).name!r}"
        raise DpmergeError("DPM-507", f"{what} is no data set of this site", "have the policy's owner list it")

    def check(self, plan: PartyPlan, base_sha256: str) -> None:
        """Refuse a plan that the site does not allow, before any record is read.

        Raises:
            DpmergeError: DPM-507.
        """
        if not plan.privacy.private:
            raise DpmergeError("DPM-507", "private = false is not allowed by the policy", "state an epsilon")
        if self.noise == "secure" and plan.privacy.noise != "secure":
            problem = f"noise = {plan.privacy.noise!r} is weaker than the policy's 'secure'"
            raise DpmergeError("DPM-507", problem, 'set privacy.noise = "secure"')
        if plan.privacy.noise_seed is not None:
            raise DpmergeError("DPM-507", "noise_seed is set: whoever knows it can remove the noise", "remove it")
        self._check_public(plan.training.subspace)
        if self.base_models is not None and base_sha256 not in self.base_models:
            problem = f"the base model {base_sha256[:16]}… is not on the policy's list"
            raise DpmergeError("DPM-507", problem, "have the policy's owner list its hash in base_models")

    def _check_public(self, subspace: SubspaceSettings | None) -> None:
        """Refuse directions from a data set of the site: what is called public is used without noise or charge."""
        if subspace is None or subspace.public == RANDOM:
            return
        wanted = subspace.public if subspace.public in TASKS else place_of(subspace.public)
        for dataset in self.datasets:
            if _share_records(dataset.source, wanted):
                problem = f"subspace.public names records of the site's data set {dataset.id!r}"
                raise DpmergeError("DPM-507", problem, f'name public texts, or "{RANDOM}" for random directions')


@dataclass(frozen=True)
class Account:
    """Where a training is charged: a ledger, the data set's id in it, and the cap, if there is one."""

    ledger: Ledger
    dataset: str
    cap: Cap | None = None


def open_account(plan: PartyPlan, base_sha256: str, folder: Path, policy: Policy | None) -> Account:
    """Return where a party's training is charged, having checked that the site allows it.

    Args:
        plan: What is to be trained.
        base_sha256: Hash of the base model.
        folder: The party's folder of this run.
        policy: The site's; None charges a ledger in the folder, without a cap: a simulation's party is a role, and
            repeating an experiment must not use up an organisation's budget.

    Raises:
        DpmergeError: DPM-507 if the policy does not allow it.
    """
    if policy is not None:
        policy.check(plan, base_sha256)
    return account_of(plan, folder, policy)


def account_of(plan: PartyPlan, folder: Path, policy: Policy | None) -> Account:
    """Return where a party's training is charged, or was: for whoever spends nothing more.

    Raises:
        DpmergeError: DPM-507 if the policy lists no such data set.
    """
    if policy is None:
        return Account(Ledger(folder / "ledger.jsonl"), task_name(plan))
    dataset = policy.dataset_of(plan.source)
    return Account(Ledger(ledger_path(policy.state, dataset.id)), dataset.id, dataset.cap)


def state_folder() -> Path:
    """Return where a site keeps what outlives its runs: $DPMERGE_STATE, or dpmerge below $XDG_STATE_HOME."""
    stated = os.environ.get("DPMERGE_STATE")
    if stated:
        return Path(stated).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "dpmerge"


def ledger_path(state: Path, dataset: str) -> Path:
    """Return the place of a data set's ledger, whose folder then exists, for its owner only."""
    folder = state / LEDGERS
    missing = [place for place in (folder, *folder.parents) if not place.is_dir()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in missing:
        fsync_folder(place.parent)  # a ledger whose folder a power cut takes away has charged nothing
    return folder / f"{dataset}.jsonl"


def load_policy(path: Path) -> Policy:
    """Read a site's policy.

    Raises:
        DpmergeError: DPM-101 if it cannot be read, DPM-102 for an unknown key, DPM-103 for a refused value.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as problem:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise DpmergeError("DPM-101", f"{path} cannot be read: {reason}", "write it as docs/ledger.md shows") from None
    where = path.name
    _check_keys(tables, ("schema", "state", "noise", "base_models", "server_keys", "dataset"), where)
    _check(tables.get("schema") == 1, "schema", tables.get("schema"), "1", where)
    noise, models = tables.get("noise", "secure"), tables.get("base_models")
    _check(noise in get_args(NoiseMode), "noise", noise, "secure or fast", where)
    _check(models is None or _are(models, SHA256.fullmatch), "base_models", models, "a list of SHA-256", where)
    keys, state = tables.get("server_keys", []), tables.get("state")
    _check(_are(keys, bool), "server_keys", keys, "a list of public keys", where)
    _check(state is None or (isinstance(state, str) and bool(state)), "state", state, "a folder", where)
    datasets = tables.get("dataset", {})
    _check(isinstance(datasets, dict), "dataset", datasets, "written as [dataset.ID]", where)
    return Policy(
        state=state_folder() if state is None else path.parent / Path(state).expanduser(),
        datasets=_different([_dataset(name, table, path) for name, table in datasets.items()], where),
        noise=cast(NoiseMode, noise),
        base_models=None if models is None else frozenset(models),
        server_keys=tuple(PublicKey.parse(key) for key in keys),
    )


def _dataset(name: str, table: Any, path: Path) -> DataSet:
    key, where = f"dataset.{name}", path.name
    _check(PARTY_NAME.fullmatch(name) is not None, key, name, f"an id that matches {PARTY_NAME.pattern}", where)
    _check(isinstance(table, dict), key, table, "a table", where)
    _check_keys(table, ("data", "task", "epsilon_cap", "delta", "unit"), f"[{key}] of {where}")
    data, task = table.get("data"), table.get("task")
    _check((data is None) != (task is None), key, table, "with either data or task", where)
    _check(isinstance(data or task, str), f"{key}.{'task' if data is None else 'data'}", data or task, "a text", where)
    cap, delta, unit = table.get("epsilon_cap"), table.get("delta"), table.get("unit", "record")
    _check(_is_real(cap) and 0 < cap <= MAX_EPSILON, f"{key}.epsilon_cap", cap, f"in (0, {MAX_EPSILON:g}]", where)
    _check(_is_real(delta) and MIN_DELTA <= delta < 1, f"{key}.delta", delta, f"in [{MIN_DELTA:g}, 1)", where)
    _check(unit in get_args(PrivacyUnit), f"{key}.unit", unit, "record or user", where)
    source = task if data is None else place_of(path.parent / Path(data).expanduser())
    return DataSet(id=name, source=source, cap=Cap(epsilon=float(cap), delta=float(delta), privacy_unit=unit))


def _different(datasets: list[DataSet], where: str) -> tuple[DataSet, ...]:
    for number, dataset in enumerate(datasets):
        for other in datasets[:number]:  # records with two ledgers could be spent twice, each time under its own cap
            is_apart = not _share_records(dataset.source, other.source)
            wanted = f"in one data set, not in {other.id} too"
            _check(is_apart, f"dataset.{dataset.id}", str(dataset.source), wanted, where)
    return tuple(datasets)


def _share_records(one: str | Path, other: str | Path) -> bool:
    """Whether two sources are one task, or one file or folder, or one lies in the other."""
    if isinstance(one, Path) and isinstance(other, Path):
        return is_within(one, other)
    return one == other


def _are(value: Any, accepts: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and accepts(item) for item in value)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            fix = f"use one of {', '.join(known)}{closest(key, known)}"
            raise DpmergeError("DPM-102", f"{key} in {where} is not a known key", fix)


def _check(holds: bool, key: str, value: object, wanted: str, where: str) -> None:
    if not holds:
        raise DpmergeError("DPM-103", f"{key} = {value!r} in {where} is refused", f"it must be {wanted}")
