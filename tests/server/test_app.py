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

from dpmerge.common.manifest import manifest_hash, manifest_of, parse_signature
from dpmerge.common.receipt import check_receipt
from dpmerge.common.release import SIGNATURE
from dpmerge.common.untrusted import ReleaseRefused
from dpmerge.common.wire import Outcome, Terms, Verdict, pack_outcome
from dpmerge.server import app as app_module
from dpmerge.server import reception as reception_module
from dpmerge.server.app import NO_REPLY, NOT_JUDGED, NOT_STORED, SECOND_REPLY, Collection, judge, server_app
from dpmerge.server.intake import Expectation
from dpmerge.server.receipts import Receipts
from dpmerge.server.reception import Reception
from dpmerge.server.spool import Spool
from tests.signed_releases import FEDERATION, KEYS, SERVER_KEY, STRANGER, signed_files, statement

SHOP = signed_files()
CINEMA = signed_files(told=statement("cinema"), key=STRANGER)


def reply(content: RecordDict | Error, *, node: int = 1) -> Message:
    return Message(content, reply_to=Message(RecordDict(), node, MessageType.TRAIN))


def release(party: str, files: dict[str, bytes], *, node: int = 1) -> Message:
    return reply(pack_outcome(Outcome(party, files)), node=node)


def failure(party: str, *, node: int = 1) -> Message:
    return reply(pack_outcome(Outcome(party, {}, "DPM-203", "no records")), node=node)


@pytest.fixture(autouse=True)
def _server_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):  # without them Flower makes no message
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def collection() -> Collection:
    return Collection()


@pytest.fixture
def reception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reception:
    monkeypatch.setattr(reception_module, "validate", lambda *_: None)  # what it refuses is test_intake's matter
    parties: Any = dict.fromkeys(("shop", "cinema"))
    return Reception(
        federation=FEDERATION,
        expectation=Expectation(parties=parties, base_sha256="c" * 64, adapter_config={}, shapes={}),
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
    party, verdict = judge(release("shop", SHOP), reception, collection)
    assert party == "shop"
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
    assert answer == ("shop", Verdict(code="DPM-401", reason=NOT_JUDGED))
    assert collection.refused == {"shop": ("DPM-401", NOT_JUDGED)}
    assert "some bytes of the release" in caplog.text  # the server's own log has the traceback
    judge(release("cinema", CINEMA, node=2), reception, collection)
    assert list(collection.accepted) == list(reception.spool.hashes()) == ["cinema"]


def test_a_refusal_says_why_to_the_party_too(
    collection: Collection, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_with(monkeypatch, ReleaseRefused("norm", "shop: too large", "take smaller steps"))
    _, verdict = judge(release("shop", SHOP), reception, collection)
    assert collection.refused == {"shop": ("DPM-401", "shop: too large [norm]; take smaller steps")}
    assert verdict == Verdict(code="DPM-401", reason="shop: too large [norm]; take smaller steps")


def test_an_interrupt_is_no_refusal(
    collection: Collection, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_with(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        judge(release("shop", SHOP), reception, collection)


@pytest.mark.parametrize(("party", "files"), [("shop", SHOP), ("cinema", CINEMA)])
def test_a_node_is_heard_once(
    collection: Collection, reception: Reception, party: str, files: dict[str, bytes]
) -> None:
    judge(release("shop", SHOP, node=7), reception, collection)
    assert judge(release(party, files, node=7), reception, collection) == ("", None)
    assert list(collection.accepted) == list(reception.spool.hashes()) == ["shop"]
    assert (collection.refused, collection.nameless) == ({}, [SECOND_REPLY])
    judge(release("cinema", CINEMA, node=8), reception, collection)
    assert sorted(collection.accepted) == ["cinema", "shop"]


def test_a_second_reply_may_not_follow_a_failure_either(collection: Collection, reception: Reception) -> None:
    judge(failure("shop"), reception, collection)
    judge(release("shop", SHOP), reception, collection)
    assert collection.accepted == {}
    assert collection.refused == {"shop": ("DPM-203", "no records")}


@pytest.mark.parametrize("first", [True, False])
def test_nobody_speaks_a_party_out_of_its_release(collection: Collection, reception: Reception, first: bool) -> None:
    """A failure or a forged release in its name counts only while the party itself has sent nothing."""
    lies = [failure("shop", node=2), release("shop", SHOP | {"statement.json": b"{}"}, node=3)]
    truth = release("shop", SHOP, node=1)
    for message in [truth, *lies] if first else [*lies, truth]:
        judge(message, reception, collection)
    assert list(collection.accepted) == ["shop"]
    assert collection.refused == {}


def test_flowers_own_words_about_an_error_reach_nobodys_row(collection: Collection, reception: Reception) -> None:
    for node in (1, 1, 2):  # Flower answers for every node that is gone, under one name
        judge(reply(Error(0, "ValueError: record 17 says …"), node=node), reception, collection)
    assert collection.nameless == [NO_REPLY] * 3


@pytest.mark.parametrize("content", [{}, {"outcome": ConfigRecord()}, {"outcome": ConfigRecord({"party": "shop"})}])
def test_a_reply_of_another_form_is_nobodys(
    collection: Collection, reception: Reception, content: dict[str, ConfigRecord]
) -> None:
    assert judge(reply(RecordDict(content)), reception, collection) == ("", None)
    assert (collection.accepted, collection.refused, len(collection.nameless)) == ({}, {}, 1)


TERMS = Terms("ab" * 32, FEDERATION)
SOON = timedelta(seconds=0.5)


class Nodes:
    """A grid whose nodes appear, the first at once, and answer terms with a release, and verdicts; or never.

    Attributes:
        sent: Node → what it was sent, in order.
    """

    def __init__(self, releases: dict[int, tuple[str, dict[str, bytes]] | None], *, appear_at: int = 0) -> None:
        self._releases, self._looks_to_go, self._asked = releases, appear_at, dict[str, Message]()
        self.sent: dict[int, list[str]] = {}

    def get_node_ids(self) -> Iterable[int]:
        self._looks_to_go -= 1
        return [node for node in self._releases if node == 1 or self._looks_to_go < 0]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            node, name = message.metadata.dst_node_id, f"message {sum(map(len, self.sent.values()))}"
            message.metadata.__dict__["_message_id"] = name
            self._asked[name] = message
            self.sent.setdefault(node, []).append(message.metadata.message_type)
            names.append(name)
        return names

    def pull_messages(self, names: Iterable[str]) -> Iterable[Message]:
        for name in sorted(names & self._asked.keys()):
            message = self._asked[name]
            answer = self._releases[message.metadata.dst_node_id]
            if answer is not None:
                del self._asked[name]
                is_train = message.metadata.message_type == MessageType.TRAIN
                yield Message(pack_outcome(Outcome(*answer)) if is_train else RecordDict(), reply_to=message)


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
        _, verdict = judge(release("shop", SHOP), reception, collection)
    assert verdict == Verdict(code="DPM-405", reason=NOT_STORED)
    assert collection.refused == {"shop": ("DPM-405", NOT_STORED)}
    assert "same bytes" in NOT_STORED
    assert "same bytes" in NOT_JUDGED
    _, verdict = judge(release("shop", SHOP, node=2), reception, collection)
    assert verdict is not None
    assert verdict.receipt
    assert collection.refused == {}
