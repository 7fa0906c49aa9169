"""A federation file, and what each party has to do according to it.

`load_federation` reads TOML into frozen sections; `party_plan` resolves what holds for one party: its overrides, its
own ε, the declared population of its data. A plan is all that a party is sent; a resumed run compares its fingerprint.

>>> federation = parse_federation(
...     '''
...     [base]
...     model = "minilm-l6"
...     [training]
...     expected_batch_size = 100
...     [[party]]
...     name = "shop"
...     data = "reviews.csv"
...     labels = { "1" = "a bad product", "5" = "a great product" }
...     population = 3000
...     epsilon = 2
...     ''',
...     "shop.toml",
... )
>>> plan = party_plan(federation, "shop")
>>> plan.privacy.epsilon, plan.privacy.population, plan.training.expected_batch_size
(2.0, 3000, 100)
"""

import hashlib
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import rfc8785

from dpmerge.common.config.apart import OwnedFiles
from dpmerge.common.config.rules import Refused, build, unknown_key
from dpmerge.common.config.sections import (
    BaseSettings,
    IntakeSettings,
    LoraSettings,
    MergeSettings,
    PartySettings,
    PrivacySettings,
    RunSettings,
    TrainingSettings,
    merge_table,
)
from dpmerge.common.config.subspace import RANDOM, SubspaceSettings
from dpmerge.common.data.data_path import data_path
from dpmerge.common.errors import DpmergeError, closest
from dpmerge.common.files import open_regular
from dpmerge.common.privacy.bounds import default_delta, is_large

__all__ = [
    "BaseSettings",
    "Federation",
    "FileSource",
    "IntakeSettings",
    "LoraSettings",
    "MergeSettings",
    "PartyPlan",
    "PartySettings",
    "PrivacySettings",
    "RunSettings",
    "SubspaceSettings",
    "TaskSource",
    "TrainingSettings",
    "load_federation",
    "parse_federation",
    "party_plan",
    "plan_from_dict",
]

SECTIONS: dict[str, type[Any]] = {
    cls.section: cls
    for cls in (
        RunSettings,
        BaseSettings,
        LoraSettings,
        TrainingSettings,
        PrivacySettings,
        IntakeSettings,
        MergeSettings,
    )
}


@dataclass(frozen=True, kw_only=True)
class Federation:
    """A whole federation file, checked: if it exists, every party has a valid plan.

    Args:
        folder: Where relative data paths start; not part of what `to_dict` gives.
    """

    section: ClassVar[str] = ""
    base: BaseSettings
    parties: tuple[PartySettings, ...]
    run: RunSettings = field(default_factory=RunSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    intake: IntakeSettings = field(default_factory=IntakeSettings)
    merge: MergeSettings = field(default_factory=MergeSettings)
    folder: Path = field(default_factory=Path)

    def __post_init__(self) -> None:
        if not self.parties:
            raise Refused("", "party", None, "is missing", "describe each organisation in a [[party]] table")
        names = [party.name for party in self.parties]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise Refused(f"party[{index}]", "name", name, "is taken by another party", "give each its own name")
        _check_apart(self)
        for index in range(len(names)):
            _resolve(self, index)
        quorum = self.intake.min_parties
        if quorum > len(names):
            fix = "ask for at most all of them"
            raise Refused("intake", "min_parties", quorum, f"is more than the {len(names)} parties there are", fix)

    @property
    def files(self) -> tuple[Path, ...]:
        """The data files and folders that parties and settings name, absolute and without a split."""
        stated = [path for party in self.parties for path in (party.data, party.test) if path]
        return tuple(_file(self.folder, path) for path in (*stated, *_public_files(self).values()))

    def with_merge(self, merge: MergeSettings) -> "Federation":
        """The same federation with another `[merge]`."""
        return replace(self, merge=merge)

    def to_dict(self) -> dict[str, object]:
        """The federation as JSON-able tables, in the layout of the file; settings that are absent stay absent."""
        tables = {name: _plain(getattr(self, name)) for name in SECTIONS}
        tables["merge"] = self.merge.to_dict()
        return tables | {"party": [_plain(party) for party in self.parties]}


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    """Records from the public registry."""

    task: str


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """A party's own records: absolute paths (a folder may end in "::split"), columns, labels and their descriptions.

    `user` is set exactly when the plan's privacy unit is a user.
    """

    path: str
    text: str
    label: str
    labels: Mapping[str, str]
    test: str | None = None
    user: str | None = None


_NAME_PUBLIC_TEXTS = f'name public texts that no party has, or "{RANDOM}" for random directions'
_NAME_PUBLIC_TEST = "name a public file; accuracy on private records would be a query on them"


@dataclass(frozen=True, kw_only=True)
class PartyPlan:
    """All that one party needs to know to train and release.

    `privacy.population` and `privacy.delta` are always set; `privacy.epsilon` is set exactly when `privacy.private`; δ
    is below 1 / population unless `privacy.allow_large_delta`; neither a subspace nor a test file is the party's own
    data: however the plan was made.
    """

    party: str
    base: BaseSettings
    lora: LoraSettings
    training: TrainingSettings
    privacy: PrivacySettings
    source: TaskSource | FileSource
    seed: int

    def __post_init__(self) -> None:
        _check_delta("privacy", self.privacy)
        subspace = self.training.subspace
        if subspace is not None and _is_own(subspace.public, self.source):
            complaint = f"is the data of party {self.party}"
            raise Refused("training", "subspace.public", subspace.public, complaint, _NAME_PUBLIC_TEXTS)
        if isinstance(self.source, FileSource) and self.source.test is not None:
            own = OwnedFiles([(self.party, self.source.path)])
            if own.owner_of(self.source.test, split_may_differ=True) is not None:
                raise Refused("source", "test", self.source.test, "is the private data itself", _NAME_PUBLIC_TEST)

    def to_dict(self) -> dict[str, object]:
        """The plan as JSON-able tables; `plan_from_dict` is the way back."""
        return {key.name: _plain(getattr(self, key.name)) for key in fields(self)}

    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the plan's canonical JSON (RFC 8785): equal plans, equal fingerprints."""
        return hashlib.sha256(rfc8785.dumps(self.to_dict())).hexdigest()  # type: ignore[arg-type]  # JSON-able by construction


def load_federation(path: Path | str) -> Federation:
    """Read a federation file; relative data paths start at its folder.

    Raises:
        DpmergeError: DPM-101 unreadable or not TOML, DPM-102 unknown key, DPM-103 refused value, DPM-104 unknown name,
            DPM-203 a data file that does not exist.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        fix = "check the path, or write a first one with `dpmerge config init`"
        raise DpmergeError("DPM-101", f"{path} cannot be read: {reason}", fix) from None
    federation = parse_federation(text, str(path), folder=path.parent)
    _check_files(federation, str(path))
    return federation


def parse_federation(text: str, where: str, *, folder: Path = Path()) -> Federation:
    """Read the text of a federation file without touching the disk.

    Args:
        text: TOML.
        where: What errors call the file.
        folder: Where relative data paths start.

    Raises:
        DpmergeError: As `load_federation`, except for files that do not exist.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:  # numbers of 5,000 digits and a thousand brackets too
        raise DpmergeError("DPM-101", f"{where} is not TOML: {problem}", "correct the line; see toml.io") from None
    with _placed_in(where):
        for key in tables:
            if key not in SECTIONS and key != "party":
                raise unknown_key("", key, [*SECTIONS, "party"])
        tables["merge"] = merge_table(tables.get("merge", {}))
        sections = {name: build(cls, tables.get(name, {}), name) for name, cls in SECTIONS.items()}
        parties = tables.get("party", [])
        if not isinstance(parties, list):
            raise Refused("", "party", None, "is not a list of tables", "write [[party]], with two brackets")
        built = tuple(build(PartySettings, table, f"party[{index}]") for index, table in enumerate(parties))
        return Federation(**sections, parties=built, folder=folder)


def party_plan(federation: Federation, name: str) -> PartyPlan:
    """What holds for the party `name`: its overrides over the federation's defaults.

    Raises:
        DpmergeError: DPM-104 if there is no such party.
    """
    names = [party.name for party in federation.parties]
    if name not in names:
        fix = f"use one of {', '.join(names)}{closest(name, names)}"
        raise DpmergeError("DPM-104", f"party {name!r} is not in this federation", fix)
    return _resolve(federation, names.index(name))


def plan_from_dict(tables: Mapping[str, Any]) -> PartyPlan:
    """The plan that `PartyPlan.to_dict` wrote, checked again.

    Raises:
        DpmergeError: DPM-102 or DPM-103 if it is not one.
    """
    with _placed_in("the party's plan"):
        sections = {name: build(SECTIONS[name], tables[name], name) for name in ("base", "lora", "training", "privacy")}
        source = tables["source"]
        kind: type[TaskSource | FileSource] = TaskSource if "task" in source else FileSource
        return PartyPlan(party=tables["party"], seed=tables["seed"], source=build(kind, source, "source"), **sections)


@contextmanager
def _placed_in(where: str) -> Iterator[None]:
    """Name the file in every refusal raised inside."""
    try:
        yield
    except Refused as refusal:
        raise refusal.at(refusal.section, where) from None


def _resolve(federation: Federation, index: int) -> PartyPlan:
    party, section = federation.parties[index], f"party[{index}]"
    try:
        training = replace(federation.training, **party.training)
    except Refused as refusal:
        raise refusal.at(f"{section}.training") from None
    if training.subspace is not None:
        place = f"{section}.training" if "subspace" in party.training else "training"
        training = replace(training, subspace=_subspace(federation, training.subspace, place))
    privacy = _resolve_privacy(federation, party, section)
    _check_unit(party, privacy.unit, section)
    batch, population = training.expected_batch_size, privacy.population
    if population is not None and batch > population:
        place = f"{section}.training" if "expected_batch_size" in party.training else "training"
        complaint = f"exceeds the declared population {population} of party {party.name}"
        raise Refused(place, "expected_batch_size", batch, complaint, "sample at most the population per step")
    source = _source(party, federation.folder)
    return PartyPlan(
        party=party.name,
        base=replace(federation.base, model=_model(federation)),
        lora=federation.lora,
        training=training,
        privacy=privacy,
        source=source,
        seed=federation.run.seed,
    )


def _subspace(federation: Federation, subspace: SubspaceSettings, section: str) -> SubspaceSettings:
    """The settings with an absolute path; refused if they name a party's task."""
    if subspace.public != RANDOM and not _is_task(subspace.public):
        return replace(subspace, public=_absolute(federation.folder, subspace.public))
    owner = next((party.name for party in federation.parties if party.task == subspace.public), None)
    if owner is not None:
        complaint = f"is the data of party {owner}"
        raise Refused(section, "subspace.public", subspace.public, complaint, _NAME_PUBLIC_TEXTS)
    return subspace


def _is_own(public: str, source: TaskSource | FileSource) -> bool:
    """Whether public texts are a party's own data, or its test data."""
    if isinstance(source, TaskSource):
        return public == source.task
    if public == RANDOM or _is_task(public):
        return False
    own = [("", path) for path in (source.path, source.test) if path is not None]
    return OwnedFiles(own).owner_of(public) is not None


def _check_apart(federation: Federation) -> None:
    """Refuse test files and public texts that are, under whatever name, the data of any party of the federation.

    Raises:
        Refused: DPM-103 with the party whose data it is.
    """
    publics, folder = _public_files(federation), federation.folder
    if not publics and not any(party.test for party in federation.parties):
        return
    data = [(party.name, _absolute(folder, party.data)) for party in federation.parties if party.data]
    private = OwnedFiles(data)
    for index, party in enumerate(federation.parties):
        if not party.test:
            continue
        owner = private.owner_of(_absolute(folder, party.test), split_may_differ=True)
        if owner is not None:
            whose = "itself" if owner == party.name else f"of party {owner}"
            raise Refused(f"party[{index}]", "test", party.test, f"is the private data {whose}", _NAME_PUBLIC_TEST)
    tests = [(party.name, _absolute(folder, party.test)) for party in federation.parties if party.test]
    owned = OwnedFiles([*data, *tests]) if publics else private
    for section, path in publics.items():
        owner = owned.owner_of(_absolute(folder, path))
        if owner is not None:
            raise Refused(section, "subspace.public", path, f"is the data of party {owner}", _NAME_PUBLIC_TEXTS)


def _is_task(name: str) -> bool:
    from dpmerge.common.data.tasks import TASKS

    return name in TASKS


def _public_files(federation: Federation) -> dict[str, str]:
    """Path of each setting that names a file of public texts → the file, as stated."""
    stated = {"training": federation.training.subspace}
    stated |= {f"party[{i}].training": party.training.get("subspace") for i, party in enumerate(federation.parties)}
    return {
        section: subspace.public
        for section, subspace in stated.items()
        if subspace and subspace.public != RANDOM and not _is_task(subspace.public)
    }


def _resolve_privacy(federation: Federation, party: PartySettings, section: str) -> PrivacySettings:
    """The party's own words first; a stated ε means private, and private = false drops an inherited ε."""
    own: dict[str, Any] = dict(party.privacy)
    own |= {key: party.stated(key) for key in ("private", "epsilon", "population") if party.stated(key) is not None}
    if own.get("private") is False:
        own["epsilon"] = None
    elif "epsilon" in own:
        own["private"] = True
    if "population" not in own and party.task is not None:
        own["population"] = _declared_population(party.task, section)
    try:
        privacy = replace(federation.privacy, **own)
    except Refused as refusal:
        raise refusal.at(f"{section}.privacy") from None
    if privacy.private and privacy.epsilon is None:
        fix = "state a privacy budget, for example epsilon = 3.0, here or in [privacy], or say private = false"
        raise Refused(section, "epsilon", None, "is missing", fix)
    if privacy.population is None:
        fix = (
            "declare the public, rounded size of the data, for example population = 3000; it is never read off the file"
        )
        raise Refused(section, "population", None, "is missing", fix)
    if privacy.delta is None:
        privacy = replace(privacy, delta=default_delta(privacy.population))
    _check_delta(f"{section}.privacy" if "delta" in own else "privacy", privacy)
    return privacy


def _check_delta(section: str, privacy: PrivacySettings) -> None:
    """Refuse a δ that publishing one record in the clear would meet, unless it is asked for by name."""
    population, delta = privacy.population, privacy.delta
    if population is None or delta is None:
        raise Refused(section, "delta", delta, "is not resolved", "state delta and population")
    if privacy.private and is_large(delta, population) and not privacy.allow_large_delta:
        fix = f"leave delta out, which gives {default_delta(population):g}; tests may say allow_large_delta = true"
        raise Refused(section, "delta", delta, f"is not below 1 / population (1 / {population})", fix)


def _check_unit(party: PartySettings, unit: str, section: str) -> None:
    """Users are protected where they are known, and known only where they are protected."""
    if unit == "user" and party.task is not None:
        fix = 'bring own data with a user column, or state unit = "record"'
        raise Refused(section, "task", party.task, 'tells no users, and privacy.unit is "user"', fix)
    if unit == "user" and party.user is None:
        fix = 'name the column that tells whose record it is, for example user = "author"'
        raise Refused(section, "user", None, 'is missing: privacy.unit is "user"', fix)
    if unit == "record" and party.user is not None:
        fix = 'state unit = "user" in [privacy] to protect all records of a user together, or remove user'
        raise Refused(section, "user", party.user, 'is stated although privacy.unit is "record"', fix)


def _declared_population(task: str, section: str) -> int:
    from dpmerge.common.data.tasks import TASKS  # here, so that a site with its own data does not read the registry

    if task not in TASKS:
        fix = f"use one of {', '.join(TASKS)}{closest(task, TASKS)}, or give your own data"
        raise Refused(section, "task", task, "is not in the registry", fix, code="DPM-104")
    return TASKS[task].population


def _source(party: PartySettings, folder: Path) -> TaskSource | FileSource:
    if party.task is not None:
        return TaskSource(task=party.task)
    if party.data is None or party.labels is None:
        raise ValueError(f"Expected party={party.name!r} to have a task, or data with labels.")
    return FileSource(
        path=_absolute(folder, party.data),
        text=party.text or "text",
        label=party.label or "label",
        labels=party.labels,
        test=_absolute(folder, party.test) if party.test else None,
        user=party.user,
    )


def _model(federation: Federation) -> str:
    """A local folder as an absolute path, since parties may run elsewhere; an alias or a hub id as it is."""
    path = _absolute(federation.folder, federation.base.model)
    return path if os.path.isfile(os.path.join(path, "config.json")) else federation.base.model


def _absolute(folder: Path, path: str) -> str:
    return str((folder / os.path.expanduser(path)).absolute())  # which leaves the ~ of an unknown user as it is


def _file(folder: Path, path: str) -> Path:
    return data_path(_absolute(folder, path)).place


def _check_files(federation: Federation, where: str) -> None:
    """Refuse a path that leads nowhere now, rather than in the middle of a run."""
    for index, party in enumerate(federation.parties):
        for key in ("data", "test"):
            path = getattr(party, key)
            if path and (wrong := _unreadable(_file(federation.folder, path))):
                fix = "correct the path; it starts at the folder of the federation file"
                raise Refused(f"party[{index}]", key, path, wrong, fix, code="DPM-203", where=where)
    for section, path in _public_files(federation).items():
        if wrong := _unreadable(_file(federation.folder, path)):
            fix = f'name a task, an existing file of public texts, or "{RANDOM}"{_closest_task(path)}'
            raise Refused(section, "subspace.public", path, wrong, fix, code="DPM-203", where=where)


def _unreadable(path: Path) -> str:
    """Return what is wrong with a place that should hold a file or a folder; nothing if it does."""
    if not os.path.exists(path):  # Path.exists raises for a name too long
        return "does not exist"
    return "" if os.path.isfile(path) or os.path.isdir(path) else "is neither a file nor a folder"


def _closest_task(name: str) -> str:
    from dpmerge.common.data.tasks import TASKS

    return closest(name, TASKS)


def _plain(value: Any) -> Any:
    """Tables, lists and plain values, without what is absent or empty."""
    if isinstance(value, tuple):
        return list(value)
    if not hasattr(value, "__dataclass_fields__"):
        return value
    pairs = asdict(value).items()
    return {key: _plain(item) for key, item in pairs if item is not None and item != {}}
