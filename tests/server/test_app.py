"""Judging replies: one at a time, each node once, and no reply can end the run or speak in another's row."""

import logging
import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from dpmerge.common.release.format import SIGNATURE, release_from_files
from dpmerge.common.release.introduction import Call, sign_failure, sign_hello
from dpmerge.common.release.manifest import manifest_hash, manifest_of, parse_signature
from dpmerge.common.release.receipt import check_receipt
from dpmerge.common.release.wire import Outcome, Terms, Verdict, pack_hello, pack_outcome, unpack_call, unpack_terms
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server import app as app_module
from dpmerge.server.app import (
    HELLO_TYPE,
    NO_PARTY,
    NO_REPLY,
    NOT_JUDGED,
    NOT_STORED,
    UNSIGNED,
    Collection,
    Slot,
    server_app,
)
from dpmerge.server.app import judge as judge_slot
from dpmerge.server.intake import reception as reception_module
from dpmerge.server.intake.receipts import Receipts
from dpmerge.server.intake.reception import Reception
from dpmerge.server.intake.spool import Spool
from dpmerge.server.intake.validation import ReleaseSpec
from tests.signed_releases import FEDERATION, KEY, KEYS, SERVER_KEY, STRANGER, signed_files, statement

SHOP = signed_files()
CINEMA = signed_files(told=statement("cinema"), key=STRANGER)


def reply(content: RecordDict | Error, *, node: int = 1) -> Message:
    return Message(content, reply_to=Message(RecordDict(), node, MessageType.TRAIN))


def release(party: str, files: dict[str, bytes], *, node: int = 1) -> Message:
    return reply(pack_outcome(Outcome(party, files)), node=node)


CALL = Call(FEDERATION, "5a" * 16)
SIGNERS = {"shop": KEY, "cinema": STRANGER}


def failure(party: str, *, node: int = 1, key: Any = None, call: Call = CALL, **told: str) -> Message:
    """Return a report of failure, signed by the party unless another key, or None, is said."""
    code, reason = told.get("code", "DPM-203"), told.get("reason", "no records")
    signed = sign_failure(party, call, code, reason, key or SIGNERS[party]) if key is not False else b""
    return reply(pack_outcome(Outcome(party, {}, code, reason, signed)), node=node)


def judge(message: Message, reception: Reception, collection: Collection, party: str = "shop") -> Verdict | None:
    return judge_slot(message, Slot(party, CALL), reception, collection)


@pytest.fixture(autouse=True)
def _server_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):  # without them Flower makes no message
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def collection() -> Collection:
    return Collection()


@pytest.fixture
def reception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reception:
    monkeypatch.setattr(reception_module, "validate", lambda party, files, _: release_from_files(files, party))
    parties: Any = dict.fromkeys(("shop", "cinema"))
    return Reception(
        federation=FEDERATION,
        release_spec=ReleaseSpec(parties=parties, base_sha256="c" * 64, adapter_config={}, shapes={}),
        keys=KEYS,
        key=SERVER_KEY,
        spool=Spool(tmp_path / "spool"),
        receipts=Receipts(tmp_path / "receipts"),
    )


def refuse_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(reception_module, "validate", fail)


def test_an_accepted_release_is_spooled_and_receipted(collection: Collection, reception: Reception) -> None:
    verdict = judge(release("shop", SHOP), reception, collection)
    assert verdict is not None
    manifest = manifest_of(parse_signature(SHOP[SIGNATURE], "shop"), "shop")
    receipt = check_receipt(verdict.receipt, manifest, manifest_hash(SHOP[SIGNATURE]), [SERVER_KEY.public])
    assert collection.accepted == reception.spool.hashes() == {"shop": receipt.spool_sha256}
    assert (collection.refused, collection.nameless) == ({}, [])


def test_whatever_a_reply_makes_the_checks_raise_is_its_partys_refusal(
    collection: Collection, reception: Reception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        refuse_with(patch, OverflowError("some bytes of the release"))
        monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
        answer = judge(release("shop", SHOP), reception, collection)
    assert answer == Verdict(code="DPM-401", reason=NOT_JUDGED)
    assert collection.refused == {"shop": ("DPM-401", NOT_JUDGED)}
    assert "some bytes of the release" in caplog.text  # the server's own log has the traceback
    judge(release("cinema", CINEMA, node=2), reception, collection, "cinema")
    assert list(collection.accepted) == list(reception.spool.hashes()) == ["cinema"]


def test_a_refusal_says_why_to_the_party_too(
    collection: Collection, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_with(monkeypatch, ReleaseRefused("norm", "shop: too large", "take smaller steps"))
    verdict = judge(release("shop", SHOP), reception, collection)
    assert collection.refused == {"shop": ("DPM-401", "shop: too large [norm]; take smaller steps")}
    assert verdict == Verdict(code="DPM-401", reason="shop: too large [norm]; take smaller steps")


def test_an_interrupt_is_no_refusal(
    collection: Collection, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_with(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        judge(release("shop", SHOP), reception, collection)


def test_a_signed_failure_stands_in_its_partys_row(collection: Collection, reception: Reception) -> None:
    judge(failure("shop"), reception, collection)
    assert (collection.accepted, collection.refused) == ({}, {"shop": ("DPM-203", "no records")})


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(lambda: failure("shop", key=False), id="unsigned"),
        pytest.param(lambda: failure("shop", key=STRANGER), id="by another key"),
        pytest.param(lambda: failure("cinema"), id="of another party"),
        pytest.param(lambda: failure("shop", call=Call(FEDERATION, "6b" * 16)), id="of another run"),
        pytest.param(lambda: failure("shop", call=Call("another-1f", "5a" * 16)), id="of another federation"),
        pytest.param(lambda: release("shop", SHOP | {"statement.json": b"{}"}), id="forged release"),
        pytest.param(lambda: release("shop", {}), id="no release"),
        pytest.param(lambda: release("shop", signed_files(federation="another-1f")), id="replayed release"),
        pytest.param(lambda: release("shop", CINEMA), id="another party's release"),
    ],
)
def test_what_the_party_did_not_sign_changes_no_row(collection: Collection, reception: Reception, message: Any) -> None:
    judge(message(), reception, collection)
    assert (collection.accepted, collection.refused, collection.nameless) == ({}, {}, [UNSIGNED])


@pytest.mark.parametrize("first", [True, False])
def test_nobody_speaks_a_party_out_of_its_release(collection: Collection, reception: Reception, first: bool) -> None:
    """A failure, be it the party's own, counts only while it has sent no release."""
    lies = [failure("shop", node=2), release("shop", SHOP | {"statement.json": b"{}"}, node=3)]
    truth = release("shop", SHOP, node=1)
    for message in [truth, *lies] if first else [*lies, truth]:
        judge(message, reception, collection)
    assert list(collection.accepted) == ["shop"]
    assert collection.refused == {}


def test_a_report_of_any_length_is_cut_and_safe_to_show(collection: Collection, reception: Reception) -> None:
    judge(failure("shop", reason="\x1b[2K" * (10 << 20)), reception, collection)
    reason = collection.refused["shop"][1]
    assert len(reason) <= 600
    assert reason.isprintable()


def test_flowers_own_words_about_an_error_reach_nobodys_row(collection: Collection, reception: Reception) -> None:
    for node in range(100):  # Flower answers for every node that is gone, under one name
        judge(reply(Error(0, "ValueError: record 17 says …"), node=node), reception, collection)
    assert collection.nameless == [NO_REPLY] * 20


@pytest.mark.parametrize("content", [{}, {"outcome": ConfigRecord()}, {"outcome": ConfigRecord({"party": "shop"})}])
def test_a_reply_of_another_form_is_nobodys(
    collection: Collection, reception: Reception, content: dict[str, ConfigRecord]
) -> None:
    assert judge(reply(RecordDict(content)), reception, collection) is None
    assert (collection.accepted, collection.refused, len(collection.nameless)) == ({}, {}, 1)


TERMS = Terms("ab" * 32, FEDERATION)
SOON = timedelta(seconds=0.5)


class Nodes:
    """A grid whose nodes appear, one at once, sign calls, and answer terms with a release, and verdicts, or never.

    Attributes:
        sent: Node → what it was sent, in order, calls left out.
        called: Nodes that were asked who they are, in order.
    """

    def __init__(
        self,
        releases: dict[int, tuple[str, dict[str, bytes]] | None],
        *,
        appear_at: int = 0,
        strangers: Iterable[int] = (),
    ) -> None:
        self._releases, self._looks_to_go, self._asked = releases, appear_at, dict[str, Message]()
        self._strangers, self._names, self.called = sorted(strangers), 0, list[int]()
        self.sent: dict[int, list[str]] = {}

    def get_node_ids(self) -> Iterable[int]:
        self._looks_to_go -= 1
        return [*self._strangers, *(node for node in self._releases if node == 1 or self._looks_to_go < 0)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            node, name = message.metadata.dst_node_id, f"message {self._names}"
            self._names += 1
            message.metadata.__dict__["_message_id"] = name
            self._asked[name] = message
            kind = message.metadata.message_type
            self.called.append(node) if kind == HELLO_TYPE else self.sent.setdefault(node, []).append(kind)
            names.append(name)
        return names

    def pull_messages(self, names: Iterable[str]) -> Iterable[Message]:
        for name in sorted(names & self._asked.keys()):
            message = self._asked[name]
            node = message.metadata.dst_node_id
            answer = self._releases.get(node)
            if message.metadata.message_type == HELLO_TYPE:
                del self._asked[name]
                yield Message(pack_hello(self.hello(node, unpack_call(message.content))), reply_to=message)
            elif answer is not None:
                del self._asked[name]
                is_train = message.metadata.message_type == MessageType.TRAIN
                yield Message(pack_outcome(Outcome(*answer)) if is_train else RecordDict(), reply_to=message)

    def hello(self, node: int, call: Call) -> bytes:
        """Sign as the party that the node is, a silent one as cinema; strangers sign as one that they are not."""
        if node in self._strangers:
            return sign_hello("shop", call, SIGNERS["cinema"])
        answer = self._releases[node]
        party = "cinema" if answer is None else answer[0]
        return sign_hello(party, call, SIGNERS[party])


def serve(nodes: Nodes, reception: Reception, *, num_parties: int = 2) -> tuple[Collection, list[str]]:
    """Run the app to its end; return what it collected, and whether it said that it ended late."""
    collection, late = Collection(), list[str]()
    app = server_app(
        TERMS,
        reception,
        collection,
        num_parties=num_parties,
        stop=threading.Event(),
        on_late=lambda: late.append("late"),
    )
    app(nodes, Context(1, 1, {}, RecordDict(), {}))  # type: ignore[arg-type]  # as much of a grid as the app uses
    return collection, late


def test_all_are_asked_as_they_appear_and_told(reception: Reception) -> None:
    nodes = Nodes({1: ("shop", SHOP), 2: ("cinema", CINEMA)}, appear_at=3)
    collection, late = serve(nodes, reception)
    assert sorted(collection.accepted) == ["cinema", "shop"]
    assert nodes.sent == {1: [MessageType.TRAIN, MessageType.QUERY], 2: [MessageType.TRAIN, MessageType.QUERY]}
    assert (collection.late, late) == (False, [])


@pytest.mark.parametrize("missing", ["silent", "absent"])
def test_at_the_deadline_nobody_is_waited_for_any_longer(missing: str, reception: Reception) -> None:
    nodes = Nodes({1: ("shop", SHOP)} | ({2: None} if missing == "silent" else {}))
    collection, late = serve(nodes, replace(reception, deadline=datetime.now(UTC) + SOON))
    assert list(collection.accepted) == ["shop"]
    assert nodes.sent[1] == [MessageType.TRAIN, MessageType.QUERY]
    assert (collection.late, late) == (True, ["late"])


def test_a_deadline_after_the_last_reply_means_nothing(reception: Reception) -> None:
    nodes = Nodes({1: ("shop", SHOP), 2: ("cinema", CINEMA)})
    collection, late = serve(nodes, replace(reception, deadline=datetime.now(UTC) + timedelta(hours=1)))
    assert sorted(collection.accepted) == ["cinema", "shop"]
    assert (collection.late, late) == (False, [])


def test_a_run_that_begins_after_the_deadline_is_for_the_late_ones(reception: Reception) -> None:
    nodes = Nodes({1: ("shop", SHOP), 2: ("cinema", CINEMA)}, appear_at=5)
    collection, late = serve(nodes, replace(reception, deadline=datetime.now(UTC) - SOON))
    assert sorted(collection.accepted) == ["cinema", "shop"]
    assert (collection.late, late) == (False, [])


def test_a_verdict_that_nobody_takes_does_not_hold_up_the_run_for_ever(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "VERDICT_SECONDS", 0.5)

    class Deaf(Nodes):
        def pull_messages(self, names: Iterable[str]) -> Iterable[Message]:
            return (m for m in super().pull_messages(names) if m.content)  # no verdict is ever said to be taken

    nodes = Deaf({1: ("shop", SHOP), 2: None})
    collection, late = serve(nodes, replace(reception, deadline=datetime.now(UTC) + SOON))
    assert list(collection.accepted) == ["shop"]
    assert late == ["late"]


@pytest.mark.parametrize("trouble", [OSError(28, "No space left on device"), MemoryError()])
def test_the_servers_own_trouble_asks_for_the_same_bytes_again(
    collection: Collection, reception: Reception, monkeypatch: pytest.MonkeyPatch, trouble: BaseException
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "accept", lambda *_: (_ for _ in ()).throw(trouble))
        verdict = judge(release("shop", SHOP), reception, collection)
    assert verdict == Verdict(code="DPM-405", reason=NOT_STORED)
    assert collection.refused == {"shop": ("DPM-405", NOT_STORED)}
    assert "same bytes" in NOT_STORED
    assert "same bytes" in NOT_JUDGED
    verdict = judge(release("shop", SHOP, node=2), reception, collection)
    assert verdict is not None
    assert verdict.receipt
    assert collection.refused == {}


def test_strangers_take_no_partys_slot_however_many_they_are(reception: Reception) -> None:
    nodes = Nodes({101: ("shop", SHOP), 102: ("cinema", CINEMA)}, strangers=range(2, 50))
    collection, _ = serve(nodes, reception)
    assert sorted(collection.accepted) == ["cinema", "shop"]
    assert sorted(nodes.sent) == [101, 102]
    assert len(nodes.called) == 50
    assert set(collection.nameless) == {NO_PARTY}
    assert len(collection.nameless) == 20


def test_a_party_has_one_slot_whatever_it_signs(reception: Reception) -> None:
    nodes = Nodes({1: ("shop", SHOP), 2: ("shop", SHOP), 3: ("cinema", CINEMA)})
    collection, _ = serve(nodes, reception)
    assert sorted(collection.accepted) == ["cinema", "shop"]
    assert sorted(nodes.sent) == [1, 3]


def test_a_hello_to_another_call_is_none(reception: Reception) -> None:
    class Replaying(Nodes):
        def hello(self, node: int, call: Call) -> bytes:
            return super().hello(node, Call(FEDERATION, "00" * 16) if node == 1 else call)

    nodes = Replaying({1: ("shop", SHOP), 2: ("shop", SHOP), 3: ("cinema", CINEMA)})
    collection, _ = serve(nodes, reception)
    assert sorted(collection.accepted) == ["cinema", "shop"]
    assert sorted(nodes.sent) == [2, 3]


def test_where_all_nodes_are_known_nobody_else_is_waited_for(reception: Reception) -> None:
    collection = Collection()
    app = server_app(TERMS, reception, collection, num_parties=2, stop=threading.Event(), num_nodes=2)
    nodes = Nodes({1: ("shop", SHOP)}, strangers=[2])
    app(nodes, Context(1, 1, {}, RecordDict(), {}))  # type: ignore[arg-type]  # as much of a grid as the app uses
    assert list(collection.accepted) == ["shop"]


def test_terms_carry_the_call_that_a_report_must_repeat(reception: Reception) -> None:
    class Failing(Nodes):
        def pull_messages(self, names: Iterable[str]) -> Iterable[Message]:
            for answer in super().pull_messages(names):
                asked = self.asked_with.get(answer.metadata.reply_to_message_id)
                if asked is None:
                    yield answer
                    continue
                call = Call(FEDERATION, unpack_terms(asked.content).challenge)
                answer.content = failure("shop", call=call).content
                yield answer

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            kept = list(messages)
            names = list(super().push_messages(kept))
            trains = zip(names, kept, strict=True)
            self.asked_with |= {n: m for n, m in trains if m.metadata.message_type == MessageType.TRAIN}
            return names

        asked_with: dict[str, Message]

    nodes = Failing({1: ("shop", SHOP)})
    nodes.asked_with = {}
    collection, _ = serve(nodes, reception, num_parties=1)
    assert collection.refused == {"shop": ("DPM-203", "no records")}


def test_a_defect_of_the_signature_check_does_not_end_the_run(
    collection: Collection, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OverflowError("in the check itself")

    monkeypatch.setattr(reception_module, "check_signed", fail)
    assert judge(release("shop", SHOP), reception, collection) == Verdict(code="DPM-401", reason=NOT_JUDGED)
    assert (collection.refused, collection.nameless) == ({}, [UNSIGNED])
