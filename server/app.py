"""The Flower ServerApp: terms down, release up, receipt down; a release is on disk before the next is looked at.

Who a release is of, its signature says, whichever node it came from. A report of failure carries no signature: it can
put words into the row of a party that has no accepted release, and nothing more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from dpmerge.common.errors import DpmergeError
from dpmerge.common.wire import Terms, Verdict, pack_terms, pack_verdict, unpack_outcome
from dpmerge.server.reception import Reception

POLL_SECONDS = 0.2
VERDICT_SECONDS = 30.0
"""How long the app waits, after the last release, for parties to take their receipts: they can have them later too."""

# Fixed sentences: the texts of errors could hold anything, and these stand in the results of other parties too.
NO_REPLY = "a party's process ended without a reply"
SECOND_REPLY = "a node replied a second time and was not heard"
NOT_JUDGED = (
    "the checks could not judge this release; keep it, and send the same bytes again once the server is mended: "
    "another training would be a second charge"
)
NOT_STORED = (
    "the server could not store this release, which is not the party's fault; keep it, and send the same bytes again "
    "later"
)

_log = logging.getLogger("flwr")  # Flower's log is the server's


@dataclass
class Collection:
    """What the server knows of every party once the replies are in.

    Attributes:
        accepted: Party → hash of the release in the spool.
        refused: Party → (code, reason); nobody whose release was accepted.
        nameless: What is known of replies that do not say whose they are.
        nodes: Flower nodes that have replied; each is heard once.
        late: Whether the deadline ended the waiting before all had replied.
    """

    accepted: dict[str, str] = field(default_factory=dict)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    nameless: list[str] = field(default_factory=list)
    nodes: set[int] = field(default_factory=set)
    late: bool = False

    def accept(self, party: str, sha256: str) -> None:
        """Note an accepted release; what was said in that party's name before counts no more."""
        self.accepted[party] = sha256
        self.refused.pop(party, None)

    def refuse(self, party: str, code: str, reason: str) -> None:
        """Note why there is no release of a party, unless there is one."""
        if party not in self.accepted:
            self.refused[party] = (code, reason)


def server_app(
    terms: Terms,
    reception: Reception,
    collection: Collection,
    *,
    num_parties: int,
    stop: threading.Event,
    on_reply: Callable[[str], None] = lambda _party: None,
    on_late: Callable[[], None] = lambda: None,
) -> ServerApp:
    """Return the ServerApp; `collection` is filled while it runs.

    The run in which the deadline passes waits for nobody any longer. One whose app is made later waits for all: it is
    run for the late ones.

    Args:
        terms: What all parties must share, sent to each.
        reception: Where releases are checked, stored and receipted; it knows the deadline.
        collection: Filled with each party's fate.
        num_parties: How many nodes to wait for.
        stop: When set, the app gives up waiting: whoever runs it is going away.
        on_reply: Called with each party's name when its reply has been judged.
        on_late: Called at the end if the deadline came before all had replied, whose nodes may be at work still.
    """
    app = ServerApp()
    begun_late = reception.is_over(datetime.now(UTC))

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        asked: set[int] = set()
        releases: set[str] = set()
        verdicts: set[str] = set()  # messages whose being taken is waited for, but not for ever
        patience_ends = float("inf")
        while time.monotonic() < patience_ends and not stop.is_set():
            over = not begun_late and reception.is_over(datetime.now(UTC))
            if not over and len(asked) < num_parties:
                nodes = sorted(set(grid.get_node_ids()) - asked)[: num_parties - len(asked)]
                releases |= set(grid.push_messages([Message(pack_terms(terms), n, MessageType.TRAIN) for n in nodes]))
                asked.update(nodes)
            for reply in grid.pull_messages(releases | verdicts):
                if reply.metadata.reply_to_message_id in verdicts:
                    verdicts.discard(reply.metadata.reply_to_message_id)
                    continue
                releases.discard(reply.metadata.reply_to_message_id)
                party, verdict = judge(reply, reception, collection)
                on_reply(party)
                if verdict is not None:
                    down = Message(pack_verdict(verdict), reply.metadata.src_node_id, MessageType.QUERY)
                    verdicts |= set(grid.push_messages([down]))
            missing = bool(releases) or len(asked) < num_parties
            collection.late = over and missing
            if over or not missing:
                if not verdicts:
                    break
                patience_ends = min(patience_ends, time.monotonic() + VERDICT_SECONDS)
            stop.wait(POLL_SECONDS)
        if collection.late:
            on_late()

    return app


def judge(reply: Message, reception: Reception, collection: Collection) -> tuple[str, Verdict | None]:
    """Receive one reply's release or note why there is none.

    One party's bad release never touches another's: every refusal is caught here and recorded under the party that
    the reply names.

    Returns:
        The party's name ("" if the reply does not say), and what to tell the node, if it sent a release.
    """
    if reply.has_error():  # from the node or, where that is gone, from Flower itself
        collection.nameless.append(NO_REPLY)
        return "", None
    node = reply.metadata.src_node_id
    if node in collection.nodes:
        collection.nameless.append(SECOND_REPLY)
        return "", None
    collection.nodes.add(node)
    try:
        outcome = unpack_outcome(reply.content)
    except ValueError as error:
        collection.nameless.append(str(error))
        return "", None
    party = outcome.party
    if outcome.code:
        collection.refuse(party, outcome.code, outcome.reason)
        return party, None
    try:
        received = reception.receive(party, outcome.files, datetime.now(UTC))
    except DpmergeError as error:
        return party, _refusal(collection, party, error.code, f"{error.problem}; {error.fix}")
    except (OSError, MemoryError):
        _log.exception("the release of party %r could not be stored", party)
        return party, _refusal(collection, party, "DPM-405", NOT_STORED)
    except Exception:  # a defect of the checks, found by one party's bytes, must not cost the others their only upload
        _log.exception("the reply of party %r could not be judged", party)
        return party, _refusal(collection, party, "DPM-401", NOT_JUDGED)
    collection.accept(party, received.sha256)
    return party, Verdict(receipt=received.receipt)


def _refusal(collection: Collection, party: str, code: str, reason: str) -> Verdict:
    collection.refuse(party, code, reason)
    return Verdict(code=code, reason=reason)
