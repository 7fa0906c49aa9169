"""The Flower ClientApp of one party: a thin shell around `run_party`, and around the outbox when the answer comes."""

from __future__ import annotations

import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import Timeout
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from dpmerge.client.budget.policy import Policy, account_of
from dpmerge.client.introduction import hello, with_report
from dpmerge.client.party.outbox import Signer, close
from dpmerge.client.party.party import run_party
from dpmerge.client.party.preparation import append_log
from dpmerge.common.config.federation import PartyPlan
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.encoder.split_encoder import INTERRUPTIONS, check_length
from dpmerge.common.errors import CODES, DpmergeError
from dpmerge.common.files import make_folder, replace_file
from dpmerge.common.printable import shown
from dpmerge.common.public.terms import terms_hash
from dpmerge.common.release.signing import PublicKey, load_key
from dpmerge.common.release.wire import (
    HELLO,
    Outcome,
    Terms,
    Verdict,
    pack_hello,
    pack_outcome,
    unpack_call,
    unpack_terms,
    unpack_verdict,
)

PUBLIC_CODES = frozenset(
    {"DPM-101", "DPM-102", "DPM-103", "DPM-104", "DPM-201", "DPM-202", "DPM-204", "DPM-501", "DPM-505"}
)
"""Refusals whose text is made of the configuration, the assets, public data and public constants alone."""
FAILED = "DPM-599"
FAILED_IN_WORDS = "training failed; the details are in the party's own party.log"
"""The one reply to all that goes wrong once a byte of a record was read."""
FAILURE = "failure.txt"
"""File in a party's folder with the reason of its last failure, for its owner: whoever simulates owns them all."""


@dataclass(frozen=True, kw_only=True)
class Participant(ABC):
    """What a party has at its own place, whatever the server asks.

    Attributes:
        plan: The party's own plan; the server's terms are compared with it, never put in its place.
        folder: Its checkpoint, outbox, progress and log.
        num_threads: Threads for torch.
        federation: The id of the federation that it takes part in.
        key_file: The party's signing key; the key itself is in no message and no pickled object.
        server_keys: The server's keys, by the agreement of the federation.
    """

    plan: PartyPlan
    folder: Path
    num_threads: int
    federation: str
    key_file: Path
    server_keys: tuple[PublicKey, ...]

    @property
    @abstractmethod
    def rules(self) -> Policy | None:
        """The site's policy; None keeps an uncapped ledger in the folder, which only a simulation may do."""

    @property
    @abstractmethod
    def receipt_keys(self) -> tuple[PublicKey, ...]:
        """Whose receipts are believed."""


@dataclass(frozen=True, kw_only=True)
class Site(Participant):
    """A site in a deployment: it has a policy, and there is no way to be one without.

    Attributes:
        policy: The site's rules, caps and ledgers.

    Raises:
        DpmergeError: DPM-507 if the policy is missing, or believes none of the server's keys.
    """

    policy: Policy

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):  # whoever calls without a type checker
            raise DpmergeError("DPM-507", "a site without a policy trains nothing", "write one; see docs/ledger.md")
        if not self.receipt_keys:
            problem = "none of the server's keys that were agreed on is in the policy's server_keys"
            raise DpmergeError("DPM-507", problem, "compare both with the key that the server's owner gives you")

    @property
    def rules(self) -> Policy:
        """The policy."""
        return self.policy

    @property
    def receipt_keys(self) -> tuple[PublicKey, ...]:
        """The keys that both the agreement and the policy name."""
        return tuple(key for key in self.server_keys if key in self.policy.server_keys)


def client_app(site_of: Callable[[Context], Site]) -> ClientApp:
    """Return the ClientApp of a deployment; `site_of` finds the site that a Flower node stands for."""

    def checked(context: Context) -> Site:
        site = site_of(context)
        if not isinstance(site, Site):
            raise TypeError(f"Expected a Site, whose policy holds, not a {type(site).__name__}.")
        return site

    return participant_app(checked)


def participant_app(participant_of: Callable[[Context], Participant]) -> ClientApp:
    """Return a ClientApp for participants of any kind: what a simulation runs."""
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        site, terms = participant_of(context), unpack_terms(message.content)
        outcome = with_report(answer(site, terms), site.federation, terms.challenge, lambda: load_key(site.key_file))
        return Message(pack_outcome(outcome), reply_to=message)

    @app.query(HELLO)  # type: ignore[untyped-decorator]
    def introduce(message: Message, context: Context) -> Message:
        site, call = participant_of(context), unpack_call(message.content)
        signed = hello(site.plan.party, site.federation, call, lambda: load_key(site.key_file))
        return Message(pack_hello(signed), reply_to=message)

    @app.query()  # type: ignore[untyped-decorator]
    def verdict(message: Message, context: Context) -> Message:
        settle(participant_of(context), unpack_verdict(message.content))
        return Message(RecordDict(), reply_to=message)

    return app


def answer(site: Participant, server: Terms) -> Outcome:
    """Train, or find the finished release, and return what goes up: its files, or a code and a public sentence.

    Whatever goes wrong, the other parties go on. Until the first byte of a record is read, a refusal that can only name
    the configuration is sent as it is, and of any other its code. From then on every failure, of whatever kind, is one
    and the same reply: which one it was, or that it was another one, could tell of a record. What it was is in the
    party's log.
    """
    torch.set_num_threads(site.num_threads)
    make_folder(site.folder, mode=0o700)
    (site.folder / FAILURE).unlink(missing_ok=True)
    reading: list[bool] = []
    try:
        return Outcome(site.plan.party, _files(site, server, before_records=lambda: reading.append(True)))
    except BaseException as error:  # what a tokenizer's own code panics with is no Exception
        if isinstance(error, INTERRUPTIONS):
            raise
        _keep(site.folder, error)
        if not reading and isinstance(error, DpmergeError):
            return Outcome(site.plan.party, {}, error.code, _in_public(error))
        return Outcome(site.plan.party, {}, FAILED, FAILED_IN_WORDS)


def _files(site: Participant, server: Terms, before_records: Callable[[], None]) -> Mapping[str, bytes]:
    """Return the release, once the server's terms are those of the plan."""
    base = load_base(site.plan.base.model)
    check_length(base, site.plan.base.max_length)
    if Terms(terms_hash(site.plan, base.sha256), site.federation) != server:
        raise DpmergeError(
            "DPM-204",
            f"the server works for another federation, base model, LoRA layout or seed than party {site.plan.party!r}",
            "agree on one federation file and one base model",
        )
    return run_party(
        site.plan,
        base,
        site.folder,
        on_progress=_progress_file(site.folder),
        before_records=before_records,
        policy=site.rules,
        signer=Signer(site.federation, load_key(site.key_file)),
    )


def _in_public(error: DpmergeError) -> str:
    """Return what a refusal from before the first record says to others."""
    if error.code in PUBLIC_CODES:
        return f"{error.problem}; {error.fix}"
    return f"{CODES[error.code]}; the details are in the party's own party.log"


def _keep(folder: Path, error: BaseException) -> None:
    """Note a failure where its owner finds it: the traceback in the log, a refusal's own words in a file.

    Whatever goes wrong here, a full disk or no memory, changes nothing about the reply.
    """
    words = str(error) if isinstance(error, DpmergeError) else repr(error)
    with suppress(Exception):
        append_log(folder, "".join(traceback.format_exception(error)))
    with suppress(Exception):
        replace_file(folder / FAILURE, words.encode("utf-8", "backslashreplace"), mode=0o600)


def settle(site: Participant, verdict: Verdict) -> bool:
    """Store the server's receipt and close the ledger's entry, or note the refusal; return whether it is closed.

    Nothing that the server sends is believed but a receipt signed by its key for this very release. Whatever else
    comes leaves the outbox open: the same bytes are sent again the next time.
    """
    make_folder(site.folder, mode=0o700)
    try:
        if not verdict.receipt:
            told = shown(f"{verdict.code}: {verdict.reason}", 1000)
            append_log(site.folder, f"the server refused the release: {told}\n")
            return False
        close(
            site.folder,
            verdict.receipt,
            account_of(site.plan.party, site.plan.source, site.folder, site.rules),
            site.receipt_keys,
        )
    except (DpmergeError, Timeout) as error:
        append_log(site.folder, f"the server's answer was not taken: {error}\n")
        return False
    return True


def _progress_file(folder: Path) -> Callable[[str, int, int], None]:
    """Return a reporter that keeps the party's stage and counts in a small file of its own folder."""

    def report(stage: str, num_done: int, total: int) -> None:
        state = json.dumps({"stage": stage, "done": num_done, "total": total})  # counts of records are private
        replace_file(folder / "progress.json", state, mode=0o600)

    return report
