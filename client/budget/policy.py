"""The site's own rules, which hold whatever a federation asks for, and where a training is charged.

What the policy does not list is not trained on. A federation file is written by somebody else: each of its settings is
fixed here, allowed by list, bounded, accounted, or harmless (docs/ledger.md has the table).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpmerge.client.budget.composition import Cap
from dpmerge.client.budget.ledger import RESERVATION, Bound, Ledger
from dpmerge.common.config.federation import FileSource, PartyPlan, PrivacySettings, TaskSource
from dpmerge.common.config.subspace import RANDOM, SubspaceSettings
from dpmerge.common.data.data_path import place_of, share_files
from dpmerge.common.data.tasks import TASKS
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import make_folder
from dpmerge.common.privacy.mechanism import NoiseMode
from dpmerge.common.public.corpus import listed_hash
from dpmerge.common.public.terms import task_name
from dpmerge.common.release.signing import PublicKey

LEDGERS = "ledgers"


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One data set of the site.

    Attributes:
        id: Names its ledger.
        source: The task's name, or the resolved path of the file or folder.
        cap: What all that is ever trained on it may cost together; its δ also bounds that of each training.
        user: Column that tells whose record it is; given exactly if the cap protects users.
        text: The only column that may be read as the text; None leaves it to the plan.
        label: The only column that may be read as the class; None leaves it to the plan.
        population: The only size that may be declared; None leaves it to the plan.
    """

    id: str
    source: str | Path
    cap: Cap
    user: str | None = None
    text: str | None = None
    label: str | None = None
    population: int | None = None

    def __post_init__(self) -> None:
        if (self.user is None) == (self.cap.privacy_unit == "user"):
            raise ValueError(f"Expected a user column of data set {self.id} exactly if its cap protects users.")

    @property
    def bound(self) -> Bound:
        """What its ledger must be bound to."""
        place = f"task {self.source}" if isinstance(self.source, str) else str(self.source)
        return Bound(dataset=self.id, place=place)

    def check(self, source: TaskSource | FileSource, privacy: PrivacySettings) -> None:
        """Refuse a plan that reads other columns, protects another unit, or states another δ or size than it may.

        Args:
            source: The records that it reads.
            privacy: What it promises for them.

        Raises:
            DpmergeError: DPM-507.
        """
        unit, delta = privacy.unit, privacy.delta
        if unit != self.cap.privacy_unit:
            problem = f"unit = {unit!r} where the cap of data set {self.id!r} protects each {self.cap.privacy_unit}"
            raise DpmergeError("DPM-507", problem, f'set privacy.unit = "{self.cap.privacy_unit}"')
        if isinstance(source, FileSource):
            for key in ("user", "text", "label"):
                allowed, named = getattr(self, key), getattr(source, key)
                if allowed not in (None, named):
                    problem = f"{key} = {named!r} is not the column that data set {self.id!r} is bound to"
                    raise DpmergeError("DPM-507", problem, f'set {key} = "{allowed}"')
        if delta is None or delta > self.cap.delta:
            problem = f"delta = {delta} is above {self.cap.delta:g}, the most that data set {self.id!r} allows"
            raise DpmergeError("DPM-507", problem, f"set privacy.delta to at most {self.cap.delta:g}")
        if self.population not in (None, privacy.population):
            problem = f"population = {privacy.population} is not what data set {self.id!r} declares"
            raise DpmergeError("DPM-507", problem, f"set population = {self.population}")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A site's policy; `client/budget/policy_file.py` reads it.

    Attributes:
        state: The site's state folder, absolute.
        datasets: The data sets that may be used; no two have a file in common.
        base_models: SHA-256 of the base models that may be trained.
        server_keys: Whose receipts are believed; at least one.
        noise: The weakest noise allowed.
        public_texts: SHA-256 of the files that may be used as public texts, besides the registry's tasks.
    """

    state: Path
    datasets: tuple[DataSet, ...]
    base_models: frozenset[str]
    server_keys: tuple[PublicKey, ...]
    noise: NoiseMode = "secure"
    public_texts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.state.is_absolute():
            raise ValueError(f"Expected state={self.state} to be absolute: who starts elsewhere has another ledger.")
        if not self.base_models or not self.server_keys:
            raise ValueError("Expected at least one base model and one server key in a policy.")

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

    def ledger_of(self, dataset: DataSet) -> Ledger:
        """Return a data set's ledger, whether or not it is there."""
        return Ledger(self.state / LEDGERS / f"{dataset.id}.jsonl")

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
        self.dataset_of(plan.source).check(plan.source, plan.privacy)
        if base_sha256 not in self.base_models:
            problem = f"the base model {base_sha256[:16]}… is not on the policy's list"
            raise DpmergeError("DPM-507", problem, "have the policy's owner list its hash in base_models")
        self._check_public(plan.training.subspace)

    def _check_public(self, subspace: SubspaceSettings | None) -> None:
        """Refuse directions from what nobody answers for: what is called public is used without noise or charge.

        Of a file nothing but its hash is looked at, and every refusal reads the same: it may be anything on this
        machine, and whether it can be read, or how many texts it has, is nobody's business.
        """
        if subspace is None or subspace.public == RANDOM:
            return
        if subspace.public in TASKS:
            owned = [dataset for dataset in self.datasets if dataset.source == subspace.public]
            if not owned:
                return
            problem = f"subspace.public names records of the site's data set {owned[0].id!r}"
        else:
            if listed_hash(subspace.public) in self.public_texts and not self._is_own(subspace.public):
                return
            problem = "subspace.public is no file that the policy lists as public texts"
        fix = f'name a task, "{RANDOM}", or a single file whose SHA-256 is in the policy\'s public_texts'
        raise DpmergeError("DPM-507", problem, fix)

    def _is_own(self, path: str) -> bool:
        own = [dataset.source for dataset in self.datasets if isinstance(dataset.source, Path)]
        return any(share_files(place_of(path), place) for place in own)


@dataclass(frozen=True)
class Account:
    """Where a training is charged, and what its statement may publish.

    Attributes:
        ledger: Of the data set.
        dataset: The data set's id in it.
        cap: If there is one.
        public_texts: SHA-256 of the files that the site answers for as public.
    """

    ledger: Ledger
    dataset: str
    cap: Cap | None = None
    public_texts: frozenset[str] = frozenset()


def open_account(plan: PartyPlan, base_sha256: str, folder: Path, policy: Policy | None) -> Account:
    """Return where a party's training is charged, having checked that the site allows it.

    Args:
        plan: What is to be trained.
        base_sha256: Hash of the base model.
        folder: The party's folder of this run.
        policy: The site's; None charges a ledger in the folder, without a cap, which is made here: a simulation's party
            is a role, and repeating an experiment must not use up an organisation's budget.

    Raises:
        DpmergeError: DPM-507 if the policy does not allow it; DPM-504 if the ledger is not where it must be, or is
            another data set's.
    """
    if policy is not None:
        policy.check(plan, base_sha256)
        return account_of(plan.party, plan.source, folder, policy)
    account = account_of(plan.party, plan.source, folder, None)
    if not account.ledger.exists():
        if (folder / RESERVATION).exists():
            fix = "restore it, or train into another folder, as a second charge"
            raise DpmergeError("DPM-504", "the party's folder was charged for, and its ledger is gone", fix)
        account.ledger.create()
    return account


def account_of(party: str, source: TaskSource | FileSource, folder: Path, policy: Policy | None) -> Account:
    """Return where a party's training is charged, or was: for whoever spends nothing more.

    Args:
        party: The party's name.
        source: Its records.
        folder: The party's folder of this run.
        policy: The site's; None for a simulation.

    Raises:
        DpmergeError: DPM-507 if the policy lists no such data set; DPM-504 if its ledger is not there, or is bound to
            another data set or place.
    """
    if policy is None:
        return Account(Ledger(folder / "ledger.jsonl"), task_name(party, source))
    dataset = policy.dataset_of(source)
    ledger = policy.ledger_of(dataset)
    ledger.check_bound(dataset.bound)
    return Account(ledger, dataset.id, dataset.cap, policy.public_texts)


def create_ledger(policy: Policy, dataset: DataSet) -> Ledger:
    """Begin a data set's ledger with nothing spent: an act of the policy's owner, never of a training.

    Raises:
        DpmergeError: DPM-504 if there is one.
    """
    folder = policy.state / LEDGERS
    make_folder(folder, mode=0o700)  # a ledger whose folder a power cut takes away has charged nothing
    return policy.ledger_of(dataset).create(dataset.bound)
