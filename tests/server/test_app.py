"""Judging replies: one at a time, each node once, and no reply can end the run or speak in another's row."""

import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from dpmerge.common.untrusted import ReleaseRefused
from dpmerge.common.wire import Outcome, pack_outcome
from dpmerge.server import app
from dpmerge.server.app import NO_REPLY, NOT_JUDGED, SECOND_REPLY, Collection, judge
from dpmerge.server.intake import Expectation
from dpmerge.server.spool import Spool

NOBODY = Expectation(parties={}, base_sha256="", adapter_config={}, shapes={})


def reply(content: RecordDict | Error, *, node: int = 1) -> Message:
    return Message(content, reply_to=Message(RecordDict(), node, MessageType.TRAIN))


def release(party: str, *, node: int = 1) -> Message:
    return reply(pack_outcome(Outcome(party, {"statement.json": party.encode()})), node=node)


@pytest.fixture(autouse=True)
def _server_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):  # without them Flower makes no message
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def collection() -> Collection:
    return Collection()


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spool:
    monkeypatch.setattr(app, "validate", lambda *_: None)  # what it refuses is test_intake's matter
    return Spool(tmp_path)


def refuse_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(app, "validate", fail)


def test_an_accepted_release_is_spooled_under_its_party(collection: Collection, spool: Spool) -> None:
    assert judge(release("shop"), NOBODY, spool, collection) == "shop"
    assert collection.accepted == spool.hashes()
    assert (collection.refused, collection.nameless) == ({}, [])


def test_whatever_a_reply_makes_the_checks_raise_is_its_partys_refusal(
    collection: Collection, spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        refuse_with(patch, OverflowError("some bytes of the release"))
        monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
        assert judge(release("shop"), NOBODY, spool, collection) == "shop"
    assert collection.refused == {"shop": ("DPM-401", NOT_JUDGED)}
    assert "some bytes of the release" in caplog.text  # the server's own log has the traceback
    judge(release("bank", node=2), NOBODY, spool, collection)
    assert list(collection.accepted) == list(spool.hashes()) == ["bank"]


def test_a_refusal_says_why(collection: Collection, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_with(monkeypatch, ReleaseRefused("norm", "shop: too large", "take smaller steps"))
    judge(release("shop"), NOBODY, spool, collection)
    assert collection.refused == {"shop": ("DPM-401", "shop: too large [norm]; take smaller steps")}


def test_an_interrupt_is_no_refusal(collection: Collection, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_with(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        judge(release("shop"), NOBODY, spool, collection)


@pytest.mark.parametrize("second", ["shop", "bank"])
def test_a_node_is_heard_once(collection: Collection, spool: Spool, second: str) -> None:
    judge(release("shop", node=7), NOBODY, spool, collection)
    assert judge(release(second, node=7), NOBODY, spool, collection) == ""
    assert list(collection.accepted) == list(spool.hashes()) == ["shop"]
    assert (collection.refused, collection.nameless) == ({}, [SECOND_REPLY])
    judge(release("bank", node=8), NOBODY, spool, collection)
    assert sorted(collection.accepted) == ["bank", "shop"]


def test_a_second_reply_may_not_follow_a_failure_either(collection: Collection, spool: Spool) -> None:
    judge(reply(pack_outcome(Outcome("shop", {}, "DPM-203", "no records"))), NOBODY, spool, collection)
    judge(release("shop"), NOBODY, spool, collection)
    assert collection.accepted == {}
    assert collection.refused == {"shop": ("DPM-203", "no records")}


def test_flowers_own_words_about_an_error_reach_nobodys_row(collection: Collection, spool: Spool) -> None:
    for node in (1, 1, 2):  # Flower answers for every node that is gone, under one name
        judge(reply(Error(0, "ValueError: record 17 says …"), node=node), NOBODY, spool, collection)
    assert collection.nameless == [NO_REPLY] * 3


@pytest.mark.parametrize("content", [{}, {"outcome": ConfigRecord()}, {"outcome": ConfigRecord({"party": "shop"})}])
def test_a_reply_of_another_form_is_nobodys(
    collection: Collection, spool: Spool, content: dict[str, ConfigRecord]
) -> None:
    assert judge(reply(RecordDict(content)), NOBODY, spool, collection) == ""
    assert (collection.accepted, collection.refused, len(collection.nameless)) == ({}, {}, 1)
