"""The Flower ServerApp: one message down, one reply up; a release is on disk before the next is looked at.

Who a reply is of, only the reply says: until releases are signed, a node may speak in another party's name, once. What
is refused, and why, stands in the server's results; nothing is sent back to the party.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from dpmerge.common.errors import DpmergeError
from dpmerge.common.wire import Outcome, pack_terms, unpack_outcome
from dpmerge.server.intake import Expectation, validate
from dpmerge.server.spool import Spool

POLL_SECONDS = 0.2

# Fixed sentences: the texts of errors could hold anything, and these stand in the results of other parties too.
NO_REPLY = "a party's process ended without a reply"
SECOND_REPLY = "a node replied a second time and was not heard"
NOT_JUDGED = (
    "the checks could not judge this release; train with the federation's version and send its release as it is"
)

_log = logging.getLogger("flwr")  # Flower's log is the server's


@dataclass
class Collection:
    """What the server knows of every party once the replies are in.

    Attributes:
        accepted: Party → hash of the release in the spool.
        refused: Party → (code, reason).
        nameless: What is known of replies that do not say whose they are.
        nodes: Flower nodes that have replied; each is heard once.
    """

    accepted: dict[str, str] = field(default_factory=dict)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    nameless: list[str] = field(default_factory=list)
    nodes: set[int] = field(default_factory=set)


def server_app(
    terms: str,
    expectation: Expectation,
    spool: Spool,
    collection: Collection,
    *,
    num_parties: int,
    stop: threading.Event,
    on_reply: Callable[[str], None] = lambda _party: None,
) -> ServerApp:
    """Return the ServerApp; `collection` is filled while it runs.

    Args:
        terms: Hash of what all parties must share, sent to each.
        expectation: What a release must look like.
        spool: Where accepted bytes go.
        collection: Filled with each party's fate.
        num_parties: How many nodes to wait for.
        stop: When set, the app gives up waiting: whoever runs it is going away.
        on_reply: Called with each party's name when its reply has been judged.
    """
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        nodes = _wait_for_nodes(grid, num_parties, stop)
        messages = [Message(pack_terms(terms), node, MessageType.TRAIN) for node in nodes]
        waiting = set(grid.push_messages(messages))
        while waiting and not stop.is_set():
            for reply in grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                party = judge(reply, expectation, spool, collection)
                on_reply(party)
            stop.wait(POLL_SECONDS)

    return app


def judge(reply: Message, expectation: Expectation, spool: Spool, collection: Collection) -> str:
    """Validate one reply, spool it or note why not, and return the party's name ("" if the reply does not say).

    One party's bad release never touches another's: every refusal is caught here and recorded under the party that
    the reply names.
    """
    if reply.has_error():  # from the node or, where that is gone, from Flower itself
        collection.nameless.append(NO_REPLY)
        return ""
    node = reply.metadata.src_node_id
    if node in collection.nodes:
        collection.nameless.append(SECOND_REPLY)
        return ""
    collection.nodes.add(node)
    try:
        outcome = unpack_outcome(reply.content)
    except ValueError as error:
        collection.nameless.append(str(error))
        return ""
    try:
        accept(outcome, expectation, spool, collection)
    except DpmergeError as error:
        collection.refused[outcome.party] = (error.code, f"{error.problem}; {error.fix}")
    except Exception:  # a defect of the checks, found by one party's bytes, must not cost the others their only upload
        _log.exception("the reply of party %r could not be judged", outcome.party)
        collection.refused[outcome.party] = ("DPM-401", NOT_JUDGED)
    return outcome.party


def accept(outcome: Outcome, expectation: Expectation, spool: Spool, collection: Collection) -> None:
    """Validate and spool one outcome.

    Raises:
        DpmergeError: DPM-401 if the release is refused.
    """
    if outcome.code:
        collection.refused[outcome.party] = (outcome.code, outcome.reason)
        return
    validate(outcome.party, outcome.files, expectation)
    collection.accepted[outcome.party] = spool.accept(outcome.party, outcome.files)


def _wait_for_nodes(grid: Grid, num_parties: int, stop: threading.Event) -> list[int]:
    nodes: list[int] = []
    while len(nodes) < num_parties and not stop.wait(POLL_SECONDS):
        nodes = sorted(grid.get_node_ids())
    return nodes[:num_parties]
