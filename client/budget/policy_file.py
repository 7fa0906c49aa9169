"""The file of a site's policy.

schema = 1
state = "/var/lib/dpmerge"               # where ledgers live
noise = "secure"                         # the weakest noise allowed; the default
base_models = ["…"]                      # SHA-256 of the base models that may be trained
server_keys = ["ed25519:…"]              # whose receipts are believed
public_texts = ["…"]                     # SHA-256 of files of public texts (`sha256sum FILE`); none if not given

[dataset.reviews]                        # the id: one ledger, however many rows are added
data = "reviews.csv"                     # relative to this file; or task = "trec6"
epsilon_cap = 8.0
delta = 1e-5
unit = "user"                            # or "record", the default
user = "author"                          # needed for unit = "user"
text = "body"                            # the only columns and the only size that a plan may state,
label = "stars"                          # if they are given
population = 3000
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from dpmerge.client.budget.composition import Cap
from dpmerge.client.budget.policy import DataSet, Policy
from dpmerge.common.config.rules import PARTY_NAME
from dpmerge.common.data.data_path import SPLIT_MARK, place_of, share_files
from dpmerge.common.errors import DpmergeError, closest
from dpmerge.common.files import open_regular
from dpmerge.common.privacy.bounds import MAX_EPSILON, MIN_DELTA
from dpmerge.common.privacy.mechanism import NoiseMode, PrivacyUnit
from dpmerge.common.release.signing import SHA256, PublicKey
from dpmerge.common.untrusted.kinds import same

COLUMNS = ("user", "text", "label")


def load_policy(path: Path) -> Policy:
    """Read a site's policy.

    Raises:
        DpmergeError: DPM-101 if it cannot be read, DPM-102 for an unknown key, DPM-103 for a value that is missing or
            refused.
    """
    try:
        with open_regular(path) as file:
            tables = tomllib.loads(file.read().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as problem:  # ValueErrors are wrong bytes, and wrong TOML
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise DpmergeError("DPM-101", f"{path} cannot be read: {reason}", "write it as docs/ledger.md shows") from None
    where = path.name
    known = ("schema", "state", "noise", "base_models", "server_keys", "public_texts", "dataset")
    _check_keys(tables, known, where)
    _check(same(tables.get("schema"), 1), "schema", tables.get("schema"), "1", where)
    noise: Any = tables.get("noise", "secure")
    models: Any = tables.get("base_models")
    keys: Any = tables.get("server_keys")
    _check(noise in get_args(NoiseMode), "noise", noise, "secure or fast", where)
    _check(bool(models) and _are(models, SHA256.fullmatch), "base_models", models, "a list of SHA-256", where)
    _check(bool(keys) and _are(keys, bool), "server_keys", keys, "a list of public keys", where)
    texts, datasets = tables.get("public_texts", []), tables.get("dataset", {})
    _check(_are(texts, SHA256.fullmatch), "public_texts", texts, "a list of SHA-256, as sha256sum prints them", where)
    _check(isinstance(datasets, dict), "dataset", datasets, "written as [dataset.ID]", where)
    return Policy(
        state=_state(tables.get("state"), path),
        datasets=_different([_dataset(name, table, path) for name, table in datasets.items()], where),
        noise=cast(NoiseMode, noise),
        base_models=frozenset(models),
        server_keys=tuple(PublicKey.parse(key) for key in keys),
        public_texts=frozenset(texts),
    )


def _state(state: Any, path: Path) -> Path:
    """Return where the ledgers are: the same place whoever starts a training, from wherever."""
    is_fixed = isinstance(state, str) and bool(state) and not state.startswith("~") and "\0" not in state
    _check(is_fixed, "state", state, "a folder, absolute or relative to this file, and nobody's home", path.name)
    return path.absolute().parent.joinpath(state).resolve()


def _dataset(name: str, table: Any, path: Path) -> DataSet:
    key, where = f"dataset.{name}", path.name
    _check(PARTY_NAME.fullmatch(name) is not None, key, name, f"an id that matches {PARTY_NAME.pattern}", where)
    _check(isinstance(table, dict), key, table, "a table", where)
    known = ("data", "task", "epsilon_cap", "delta", "unit", *COLUMNS, "population")
    _check_keys(table, known, f"[{key}] of {where}")
    cap, delta, unit = table.get("epsilon_cap"), table.get("delta"), table.get("unit", "record")
    _check(_is_real(cap) and 0 < cap <= MAX_EPSILON, f"{key}.epsilon_cap", cap, f"in (0, {MAX_EPSILON:g}]", where)
    _check(_is_real(delta) and MIN_DELTA <= delta < 1, f"{key}.delta", delta, f"in [{MIN_DELTA:g}, 1)", where)
    _check(unit in get_args(PrivacyUnit), f"{key}.unit", unit, "record or user", where)
    columns = {column: table.get(column) for column in COLUMNS}
    for column, named in columns.items():
        is_free = named is None or (isinstance(named, str) and bool(named))
        _check(is_free and ("task" not in table or named is None), f"{key}.{column}", named, "a column of data", where)
    is_named = (columns["user"] is not None) == (unit == "user")
    _check(is_named, f"{key}.user", columns["user"], 'the column that tells users, with unit = "user" only', where)
    population = table.get("population")
    is_size = population is None or (type(population) is int and population > 0)
    _check(is_size, f"{key}.population", population, "a whole number above 0", where)
    return DataSet(
        id=name,
        source=_source(table, path, key),
        cap=Cap(epsilon=float(cap), delta=float(delta), privacy_unit=unit),
        population=population,
        **columns,
    )


def _source(table: Mapping[str, Any], path: Path, key: str) -> str | Path:
    data, task = table.get("data"), table.get("task")
    _check((data is None) != (task is None), key, dict(table), "with either data or task", path.name)
    if data is None:
        _check(isinstance(task, str), f"{key}.task", task, "a text", path.name)
        return str(task)
    is_whole = isinstance(data, str) and bool(data) and SPLIT_MARK not in data and "\0" not in data
    _check(is_whole, f"{key}.data", data, "a file or a whole folder: its splits have one ledger", path.name)
    return place_of(path.absolute().parent / os.path.expanduser(data))


def _different(datasets: list[DataSet], where: str) -> tuple[DataSet, ...]:
    for number, dataset in enumerate(datasets):
        for other in datasets[:number]:  # records with two ledgers could be spent twice, each time under its own cap
            is_apart = not _share_records(dataset.source, other.source)
            wanted = f"in one data set, not in {other.id} too"
            _check(is_apart, f"dataset.{dataset.id}", str(dataset.source), wanted, where)
    return tuple(datasets)


def _share_records(one: str | Path, other: str | Path) -> bool:
    if isinstance(one, Path) and isinstance(other, Path):
        return share_files(one, other)
    return one == other


def _are(value: Any, accepts: Callable[[str], object]) -> bool:
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
        problem = f"{key} is missing in {where}" if value is None else f"{key} = {value!r} in {where} is refused"
        raise DpmergeError("DPM-103", problem, f"it must be {wanted}")
