"""Judging replies: one at a time, each node once, and no reply can end the run or speak in another's row."""

import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from dpmerge.common.manifest import manifest_hash, manifest_of, parse_signature
from dpmerge.common.receipt import check_receipt
from dpmerge.common.release import SIGNATURE
from dpmerge.common.untrusted import ReleaseRefused
from dpmerge.common.wire import Outcome, Verdict, pack_outcome
from dpmerge.server import reception as reception_module
from dpmerge.server.app import NO_REPLY, NOT_JUDGED, SECOND_REPLY, Collection, judge
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
        expectation=Expectation(parties=parties, base_sha256="", adapter_config={}, shapes={}),
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
