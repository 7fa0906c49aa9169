"""The Flower ServerApp: a call to every node, terms to who answers it with a listed key, release up, receipt down.

A slot is a party's, not a node's: whoever does not sign the call with the key of a party that is still missing is asked
nothing more, however many they are. Who a release is of, its own signature says. A report of failure is signed too;
what is unsigned changes nobody's row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from dpmerge.common.errors import DpmergeError
from dpmerge.common.printable import shown
from dpmerge.common.release.introduction import Call, check_failure, check_hello, new_call
from dpmerge.common.release.wire import (
    HELLO,
    Terms,
    Verdict,
    pack_call,
    pack_terms,
    pack_verdict,
    unpack_hello,
    unpack_outcome,
)
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.intake.reception import Reception

POLL_SECONDS = 0.2
VERDICT_SECONDS = 30.0
"""How long the app waits, after the last release, for parties to take their receipts: they can have them later too."""
CALL_AGAIN_SECONDS = 30.0
"""After which a node that did not say who it is, or was gone, may be asked once more."""
MAX_NOTES = 20
"""Words about replies that are nobody's; more of them are counted."""
HELLO_TYPE = f"{MessageType.QUERY}.{HELLO}"

# Fixed sentences: the texts of errors could hold anything, and these stand in the results of other parties too.
NO_REPLY = "a party's process ended without a reply"
NO_PARTY = "a node that did not sign as a party of this federation was asked nothing more"
UNSIGNED = "a report or a release without this party's signature was not counted"
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
        nameless: What is known of replies that are nobody's.
        warned: Party → what is odd about its accepted release.
        late: Whether the deadline ended the waiting before all had replied.
    """

    accepted: dict[str, str] = field(default_factory=dict)
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    nameless: list[str] = field(default_factory=list)
    warned: dict[str, str] = field(default_factory=dict)
    late: bool = False

    def accept(self, party: str, sha256: str) -> None:
        """Note an accepted release; what was said in that party's name before counts no more."""
        self.accepted[party] = sha256
        self.refused.pop(party, None)

    def refuse(self, party: str, code: str, reason: str) -> None:
        """Note why there is no release of a party, unless there is one."""
        if party not in self.accepted:
            self.refused[party] = (code, shown(reason, 1000))

    def note(self, words: str) -> None:
        """Note a reply that is nobody's, so often and no more."""
        if len(self.nameless) < MAX_NOTES:
            self.nameless.append(words)


@dataclass(frozen=True)
class Slot:
    """A node that has signed as a party, and the call that it answered."""

    party: str
    call: Call


@dataclass
class Slots:
    """Which node speaks for which party, one node each; nobody else is given work.

    Attributes:
        reception: Knows the parties and their keys.
        calls: Node → its unanswered call.
        taken: Node → its slot.
        again: Node → when it may be called once more, by the monotonic clock.
    """

    reception: Reception
    calls: dict[int, Call] = field(default_factory=dict)
    taken: dict[int, Slot] = field(default_factory=dict)
    again: dict[int, float] = field(default_factory=dict)

    def to_call(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes to ask who they are, and note what each is asked."""
        now = time.monotonic()
        new = [n for n in nodes if n not in self.taken and n not in self.calls and self.again.get(n, 0.0) <= now]
        self.calls |= {node: new_call(self.reception.federation) for node in new}
        return new

    def answered(self, node: int, signed: bytes) -> Slot | None:
        """Return the slot that a node's answer gives it, if it gives one.

        Raises:
            ReleaseRefused: If the answer is not signed by a party that is still missing.
        """
        call = self.calls.pop(node)
        self.again[node] = time.monotonic() + CALL_AGAIN_SECONDS
        party = check_hello(signed, call, self.reception.keys, datetime.now(UTC))
        present = {slot.party for slot in self.taken.values()}
        if party not in self.reception.release_spec.parties or party in present:
            raise ReleaseRefused("unknown-party", f"{party} is not missing", "one node of a party is enough")
        self.taken[node] = Slot(party, call)
        return self.taken[node]


def server_app(
    terms: Terms,
    reception: Reception,
    collection: Collection,
    *,
    num_parties: int,
    stop: threading.Event,
    on_reply: Callable[[str], None] = lambda _party: None,
    on_late: Callable[[], None] = lambda: None,
    num_nodes: int | None = None,
) -> ServerApp:
    """Return the ServerApp; `collection` is filled while it runs.

    The run in which the deadline passes waits for nobody any longer. One whose app is made later waits for all: it is
    run for the late ones.

    Args:
        terms: What all parties must share, sent to each.
        reception: Where releases are checked, stored and receipted; it knows the parties, their keys and the deadline.
        collection: Filled with each party's fate.
        num_parties: How many parties to wait for.
        stop: When set, the app gives up waiting: whoever runs it is going away.
        on_reply: Called with each party's name when its reply has been judged.
        on_late: Called at the end if the deadline came before all had replied, whose nodes may be at work still.
        num_nodes: How many nodes there will ever be, where that is known, as in a simulation: once all of them have
            said who they are, no other party is waited for.
    """
    app = ServerApp()
    begun_late = reception.is_over(datetime.now(UTC))

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        run = _Run(grid, terms, reception, collection, on_reply)
        run.wait(num_parties=num_parties, num_nodes=num_nodes, stop=stop, begun_late=begun_late)
        if collection.late:
            on_late()

    return app


class _Run:
    """One run's messages: which are on their way, and what is done with an answer."""

    def __init__(
        self,
        grid: Grid,
        terms: Terms,
        reception: Reception,
        collection: Collection,
        on_reply: Callable[[str], None],
    ) -> None:
        self._grid, self._terms, self._reception, self._collection = grid, terms, reception, collection
        self._on_reply = on_reply
        self.slots = Slots(reception)
        self.greetings: dict[str, int] = {}
        self.releases: dict[str, int] = {}
        self.verdicts: set[str] = set()  # whose being taken is waited for, but not for ever

    def wait(self, *, num_parties: int, num_nodes: int | None, stop: threading.Event, begun_late: bool) -> None:
        """Call, listen and judge until all have replied, the deadline passes, or the app is to stop.

        Verdicts that are on their way are then waited for, but not for ever.
        """
        patience_ends = float("inf")
        while time.monotonic() < patience_ends and not stop.is_set():
            over = not begun_late and self._reception.is_over(datetime.now(UTC))
            if not over and len(self.slots.taken) < num_parties:
                self.call()
            self.listen()
            missing = bool(self.releases) or (len(self.slots.taken) < num_parties and not self.has_heard(num_nodes))
            self._collection.late = over and missing
            if over or not missing:
                if not self.verdicts:
                    break
                patience_ends = min(patience_ends, time.monotonic() + VERDICT_SECONDS)
            stop.wait(POLL_SECONDS)

    def call(self) -> None:
        """Ask new nodes who they are."""
        for node in self.slots.to_call(self._grid.get_node_ids()):
            self.greetings |= dict.fromkeys(self._push(node, HELLO_TYPE, pack_call(self.slots.calls[node])), node)

    def listen(self) -> None:
        """Take every answer that is there."""
        for reply in self._grid.pull_messages({*self.greetings, *self.releases, *self.verdicts}):
            request = reply.metadata.reply_to_message_id
            self.verdicts.discard(request)
            if (node := self.greetings.pop(request, None)) is not None:
                self._greeted(node, reply)
            elif (node := self.releases.pop(request, None)) is not None:
                self._replied(node, reply)

    def has_heard(self, num_nodes: int | None) -> bool:
        """Return whether all nodes that there will ever be have said who they are."""
        return num_nodes is not None and not self.greetings and len(self.slots.again) >= num_nodes

    def _greeted(self, node: int, reply: Message) -> None:
        try:
            slot = self.slots.answered(node, b"" if reply.has_error() else unpack_hello(reply.content))
        except ReleaseRefused:
            self._collection.note(NO_PARTY)
            return
        if slot is not None:
            terms = replace(self._terms, challenge=slot.call.challenge)
            self.releases |= dict.fromkeys(self._push(node, MessageType.TRAIN, pack_terms(terms)), node)

    def _replied(self, node: int, reply: Message) -> None:
        slot = self.slots.taken[node]
        verdict = judge(reply, slot, self._reception, self._collection)
        self._on_reply(slot.party)
        if verdict is not None:
            self.verdicts |= set(self._push(node, MessageType.QUERY, pack_verdict(verdict)))

    def _push(self, node: int, kind: str, content: RecordDict) -> list[str]:
        return [name for name in self._grid.push_messages([Message(content, node, kind)]) if name]


def judge(reply: Message, slot: Slot, reception: Reception, collection: Collection) -> Verdict | None:
    """Receive one reply's release or note why there is none; return what to tell the node, if it sent a release.

    One party's bad release never touches another's: every refusal is caught. It stands in the party's row only if the
    party signed what was refused, for this federation.

    Args:
        reply: What the node sent.
        slot: The party that the node speaks for, and the call that it answered.
        reception: Checks and stores releases.
        collection: Filled with the party's fate.
    """
    if reply.has_error():  # from the node or, where that is gone, from Flower itself
        collection.note(NO_REPLY)
        return None
    try:
        outcome = unpack_outcome(reply.content)
    except ValueError as error:
        collection.note(str(error))
        return None
    now = datetime.now(UTC)
    if not outcome.code:
        return _receive(slot.party, outcome.files, reception, collection, now)
    try:
        failure = check_failure(outcome.signed, slot.call, slot.party, reception.keys, now)
    except ReleaseRefused:
        collection.note(UNSIGNED)
    else:
        collection.refuse(slot.party, *failure)
    return None


def _receive(
    party: str, files: Mapping[str, bytes], reception: Reception, collection: Collection, now: datetime
) -> Verdict:
    """Check and store a release, and return what to tell its party."""
    try:
        received = reception.receive(party, files, now)
    except DpmergeError as error:
        verdict = Verdict(code=error.code, reason=f"{error.problem}; {error.fix}")
    except (OSError, MemoryError):
        _log.exception("the release of party %r could not be stored", party)
        verdict = Verdict(code="DPM-405", reason=NOT_STORED)
    except Exception:  # a defect of the checks, found by one party's bytes, must not cost the others their only upload
        _log.exception("the reply of party %r could not be judged", party)
        verdict = Verdict(code="DPM-401", reason=NOT_JUDGED)
    else:
        collection.accept(party, received.sha256)
        if received.warning:
            collection.warned[party] = received.warning
            _log.warning("%s", received.warning)
        return Verdict(receipt=received.receipt)
    if reception.is_signed(party, files, now):
        collection.refuse(party, verdict.code, verdict.reason)
    else:
        collection.note(UNSIGNED)
    return verdict
