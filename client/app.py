"""The Flower ClientApp of one party: a thin shell around `run_party`."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from dpmerge.client.party import append_log, run_party
from dpmerge.common.config import PartyPlan
from dpmerge.common.errors import CODES, DpmergeError
from dpmerge.common.files import replace_file
from dpmerge.common.model import load_base
from dpmerge.common.sources import terms_hash
from dpmerge.common.split_encoder import check_length
from dpmerge.common.wire import Outcome, pack_outcome, unpack_terms

PUBLIC_CODES = frozenset(
    {"DPM-101", "DPM-102", "DPM-103", "DPM-104", "DPM-201", "DPM-202", "DPM-204", "DPM-501", "DPM-505"}
)
"""Refusals whose text is made of the configuration, the assets, public data and public constants alone."""


@dataclass(frozen=True)
class Site:
    """What a party has at its own place, whatever the server asks.

    Attributes:
        plan: The party's own plan; the server's terms are compared with it, never put in its place.
        folder: Its ledger, checkpoint, release, progress and log.
        num_threads: Threads for torch.
    """

    plan: PartyPlan
    folder: Path
    num_threads: int


def client_app(site_of: Callable[[Context], Site]) -> ClientApp:
    """Return the ClientApp; `site_of` finds the site that a Flower node stands for."""
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        site = site_of(context)
        return Message(pack_outcome(answer(site, unpack_terms(message.content))), reply_to=message)

    return app


def answer(site: Site, server_terms: str) -> Outcome:
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
        if terms_hash(site.plan, base.sha256) != server_terms:
            raise DpmergeError(
                "DPM-204",
                f"the server works with another base model, LoRA layout or seed than party {party!r}",
                "agree on one federation file and one base model",
            )
        return Outcome(party, run_party(site.plan, base, site.folder, on_progress=_progress_file(site.folder)))
    except DpmergeError as error:
        append_log(site.folder, traceback.format_exc())
        if error.code in PUBLIC_CODES:
            return Outcome(party, {}, error.code, f"{error.problem}; {error.fix}")
        return Outcome(party, {}, error.code, f"{CODES[error.code]}; the details are in the party's own party.log")
    except Exception:
        append_log(site.folder, traceback.format_exc())
        return Outcome(party, {}, "DPM-599", "training failed; the traceback is in the party's own party.log")


def _progress_file(folder: Path) -> Callable[[str, int, int], None]:
    """Return a reporter that keeps the party's stage and counts in a small file of its own folder."""

    def report(stage: str, num_done: int, total: int) -> None:
        replace_file(folder / "progress.json", json.dumps({"stage": stage, "done": num_done, "total": total}))

    return report
