"""The Flower ClientApp of one party: a thin shell around `run_party`, and around the outbox when the answer comes."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from dpmerge.client.introduction import hello, with_report
from dpmerge.client.outbox import Signer, close
from dpmerge.client.party import append_log, run_party
from dpmerge.client.policy import Policy, account_of
from dpmerge.common.config import PartyPlan
from dpmerge.common.errors import CODES, DpmergeError
from dpmerge.common.files import replace_file
from dpmerge.common.model import load_base
from dpmerge.common.shown import shown
from dpmerge.common.signing import PublicKey, load_key
from dpmerge.common.sources import terms_hash
from dpmerge.common.split_encoder import check_length
from dpmerge.common.wire import (
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


@dataclass(frozen=True)
class Site:
    """What a party has at its own place, whatever the server asks.

    Attributes:
        plan: The party's own plan; the server's terms are compared with it, never put in its place.
        folder: Its checkpoint, outbox, progress and log.
        num_threads: Threads for torch.
        federation: The id of the federation that it takes part in.
        key_file: The party's signing key; the key itself is in no message and no pickled object.
        server_keys: Whose receipts it believes.
        policy: The site's rules and ledgers; None keeps an uncapped ledger in the folder, as simulations do.
    """

    plan: PartyPlan
    folder: Path
    num_threads: int
    federation: str
    key_file: Path
    server_keys: tuple[PublicKey, ...]
    policy: Policy | None = None


def client_app(site_of: Callable[[Context], Site]) -> ClientApp:
    """Return the ClientApp; `site_of` finds the site that a Flower node stands for."""
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        site, terms = site_of(context), unpack_terms(message.content)
        outcome = with_report(answer(site, terms), site.federation, terms.challenge, lambda: load_key(site.key_file))
        return Message(pack_outcome(outcome), reply_to=message)

    @app.query(HELLO)  # type: ignore[untyped-decorator]
    def introduce(message: Message, context: Context) -> Message:
        site, call = site_of(context), unpack_call(message.content)
        signed = hello(site.plan.party, site.federation, call, lambda: load_key(site.key_file))
        return Message(pack_hello(signed), reply_to=message)

    @app.query()  # type: ignore[untyped-decorator]
    def verdict(message: Message, context: Context) -> Message:
        settle(site_of(context), unpack_verdict(message.content))
        return Message(RecordDict(), reply_to=message)

    return app


def answer(site: Site, server: Terms) -> Outcome:
    """Train, or find the finished release, and return what goes up: its files, or a code and a public sentence.

    Whatever goes wrong, the other parties go on. A refusal that can only name the configuration is sent as it is; the
    text of any other could quote a record (a column name is one in a file without a header), so it stays in the
    party's log and a fixed sentence is sent.
    """
    torch.set_num_threads(site.num_threads)
    site.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    party = site.plan.party
    try:
        base = load_base(site.plan.base.model)
        check_length(base, site.plan.base.max_length)
        if Terms(terms_hash(site.plan, base.sha256), site.federation) != server:
            raise DpmergeError(
                "DPM-204",
                f"the server works for another federation, base model, LoRA layout or seed than party {party!r}",
                "agree on one federation file and one base model",
            )
        signer = Signer(site.federation, load_key(site.key_file))
        progress = _progress_file(site.folder)
        files = run_party(site.plan, base, site.folder, on_progress=progress, policy=site.policy, signer=signer)
        return Outcome(party, files)
    except DpmergeError as error:
        append_log(site.folder, traceback.format_exc())
        if error.code in PUBLIC_CODES:
            return Outcome(party, {}, error.code, f"{error.problem}; {error.fix}")
        return Outcome(party, {}, error.code, f"{CODES[error.code]}; the details are in the party's own party.log")
    except Exception:
        append_log(site.folder, traceback.format_exc())
        return Outcome(party, {}, "DPM-599", "training failed; the traceback is in the party's own party.log")


def settle(site: Site, verdict: Verdict) -> bool:
    """Store the server's receipt and close the ledger's entry, or note the refusal; return whether it is closed.

    Nothing that the server sends is believed but a receipt signed by its key for this very release. Whatever else
    comes leaves the outbox open: the same bytes are sent again the next time.
    """
    site.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        if not verdict.receipt:
            told = shown(f"{verdict.code}: {verdict.reason}", 1000)
            append_log(site.folder, f"the server refused the release: {told}\n")
            return False
        close(site.folder, verdict.receipt, account_of(site.plan, site.folder, site.policy), site.server_keys)
    except DpmergeError as error:
        append_log(site.folder, f"the server's answer was not taken: {error}\n")
        return False
    return True


def _progress_file(folder: Path) -> Callable[[str, int, int], None]:
    """Return a reporter that keeps the party's stage and counts in a small file of its own folder."""

    def report(stage: str, num_done: int, total: int) -> None:
        state = json.dumps({"stage": stage, "done": num_done, "total": total})  # counts of records are private
        replace_file(folder / "progress.json", state, mode=0o600)

    return report
