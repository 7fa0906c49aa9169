"""Who may release what, and how often: signatures, federations, second releases, resends, clocks."""

import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

import pytest

from dpmerge.common.release.format import ADAPTER, README, SIGNATURE, STATEMENT, release_from_files
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.receipt import parse_receipt
from dpmerge.common.release.signing import SigningKey
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.intake import reception as module
from dpmerge.server.intake.receipts import Receipts
from dpmerge.server.intake.reception import Reception
from dpmerge.server.intake.spool import Spool
from dpmerge.server.intake.validation import ReleaseSpec
from tests.signed_releases import FEDERATION, KEY, KEYS, SERVER_KEY, STRANGER, signed_files, statement

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
SHOP = MappingProxyType(signed_files())
SECOND_KEY = SigningKey(bytes([9]) * 32)
OTHER_STATEMENT = statement() | {"tuning_disclosure": "again"}


@pytest.fixture
def reception(tmp_path, monkeypatch) -> Reception:
    monkeypatch.setattr(module, "validate", lambda party, files, _: release_from_files(files, party))
    return open_reception(tmp_path)


def open_reception(folder, **changes) -> Reception:
    parties: Any = dict.fromkeys(("shop", "cinema"))
    settings: dict[str, Any] = {
        "federation": FEDERATION,
        "release_spec": ReleaseSpec(
            parties=parties, base_sha256="c" * 64, adapter_config={}, shapes={}, max_bytes=1 << 20
        ),
        "keys": KEYS,
        "key": SERVER_KEY,
        "spool": Spool(folder / "spool"),
        "receipts": Receipts(folder / "receipts"),
    }
    return Reception(**settings | changes)


REFUSED = {
    "stranger": ("unknown-party", "bank", SHOP),
    "200 MB": ("size", "shop", SHOP | {ADAPTER: bytes(2 << 20)}),
    "traversal": ("path", "shop", SHOP | {"../x.json": b"{}"}),
    "pickle": ("pickle", "shop", SHOP | {"adapter_model.bin": b"\x80\x04."}),
    "unsigned": ("unsigned", "shop", {name: data for name, data in SHOP.items() if name != SIGNATURE}),
    "unknown key": ("key", "shop", signed_files(key=SigningKey(bytes([8]) * 32))),
    "another party's key": ("key", "shop", signed_files(key=STRANGER)),
    "another party's release": ("key", "cinema", SHOP),
    "in another party's name": ("party-mismatch", "cinema", signed_files(key=STRANGER)),
    "for another base": ("base-mismatch", "shop", signed_files(told=statement() | {"base_sha256": "d" * 64})),
    "another federation's": ("federation", "shop", signed_files(federation="another-1f")),
    "a file more": ("manifest", "shop", SHOP | {"merge.json": b"{}"}),
    "a byte of the card": ("manifest", "shop", SHOP | {README: SHOP[README] + b" "}),
    "cut off": ("manifest", "shop", SHOP | {ADAPTER: SHOP[ADAPTER][:-1]}),
    "signature cut off": ("json", "shop", SHOP | {SIGNATURE: SHOP[SIGNATURE][:-1]}),
    "nested signature": ("json", "shop", SHOP | {SIGNATURE: b'{"a":' * 1000}),
    "signature bomb": ("size", "shop", SHOP | {SIGNATURE: b" " * (1 << 17)}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_this_partys_signed_release_reaches_neither_spool_nor_receipts(case, reception, monkeypatch):
    reason, party, files = REFUSED[case]
    monkeypatch.setattr(module, "validate", lambda *_: pytest.fail("its contents were parsed"))
    with pytest.raises(ReleaseRefused) as refusal:
        reception.receive(party, files, NOW)
    assert refusal.value.reason == reason, str(refusal.value)
    assert reception.spool.hashes() == {}
    assert reception.receipts.find(party) is None


def test_the_same_bytes_get_the_same_receipt_whenever_and_through_whichever_server_process(reception, tmp_path):
    first = reception.receive("shop", SHOP, NOW)
    again = open_reception(tmp_path).receive("shop", SHOP, NOW + timedelta(days=400))
    assert again == first
    assert reception.spool.releases() == {"shop": dict(SHOP)}


SECOND = {
    "other content": signed_files(told=OTHER_STATEMENT),
    "the same content on another ledger": signed_files(ledger_head="cd" * 32),
    "the same content by a second key": signed_files(key=SECOND_KEY),
}


@pytest.mark.parametrize("case", SECOND)
@pytest.mark.parametrize("crashed", [False, True])
def test_a_second_manifest_is_refused_even_before_the_first_was_receipted(case, crashed, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "validate", lambda party, files, _: release_from_files(files, party))
    keys = KeyList({**KEYS.keys, "shop": (KEY.public, SECOND_KEY.public)})
    reception = open_reception(tmp_path, keys=keys)
    with monkeypatch.context() as patch:
        if crashed:
            patch.setattr(Receipts, "issue", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) if crashed else nullcontext():
            reception.receive("shop", SHOP, NOW)
    with pytest.raises(ReleaseRefused) as refusal:
        reception.receive("shop", SECOND[case], NOW)
    assert refusal.value.reason == "second-release"
    assert reception.spool.releases() == {"shop": dict(SHOP)}
    receipt, _ = parse_receipt(reception.receive("shop", SHOP, NOW).receipt, "shop")
    assert receipt.spool_sha256 == reception.spool.hashes()["shop"]


def test_what_a_crash_left_in_the_spool_does_not_stand_in_for_what_is_sent_later(reception, monkeypatch):
    """The same content under two signatures: the spool must hold the one that the receipt is for."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "dpmerge.server.intake.spool.replace_file", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            reception.receive("shop", SHOP, NOW)
    sent = signed_files(ledger_head="cd" * 32)
    reception.receive("shop", sent, NOW)
    assert reception.spool.releases() == {"shop": sent}


def test_a_revoked_key_signs_nothing_new_and_what_it_signed_before_is_resent(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "validate", lambda party, files, _: release_from_files(files, party))
    revoked = KeyList(KEYS.keys, {KEY.public.id: NOW + timedelta(hours=1)})
    late = NOW + timedelta(hours=2)
    with pytest.raises(ReleaseRefused) as refusal:
        open_reception(tmp_path / "a", keys=revoked).receive("shop", SHOP, late)
    assert refusal.value.reason == "revoked"
    early = open_reception(tmp_path / "b", keys=revoked)
    assert early.receive("shop", SHOP, NOW) == early.receive("shop", SHOP, late)
    with pytest.raises(ReleaseRefused) as refusal:
        early.receive("shop", signed_files(ledger_head="cd" * 32), late)
    assert refusal.value.reason == "revoked"


DEADLINE = NOW + timedelta(hours=1)
LATE = DEADLINE + timedelta(seconds=1)


@pytest.mark.parametrize("crashed", [False, True])
def test_after_the_deadline_only_what_was_in_time_is_received_and_for_ever(crashed, tmp_path, monkeypatch):
    """In time is what is in the spool, whether or not a crash came before its receipt."""
    monkeypatch.setattr(module, "validate", lambda party, files, _: release_from_files(files, party))
    reception = open_reception(tmp_path, deadline=DEADLINE, late="refuse")
    with monkeypatch.context() as patch:
        if crashed:
            patch.setattr(Receipts, "issue", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) if crashed else nullcontext():
            reception.receive("shop", SHOP, DEADLINE)
    monkeypatch.setattr(module, "validate", lambda *_: pytest.fail("its contents were parsed"))
    late_comers = {
        "cinema": signed_files(told=statement("cinema"), key=STRANGER),
        "shop": signed_files(ledger_head="cd" * 32),
    }
    for party, files in late_comers.items():
        with pytest.raises(ReleaseRefused) as refusal:
            reception.receive(party, files, LATE)
        assert refusal.value.reason == "late"
        assert str(refusal.value).count("2026-03-01 13:30") == 2
    monkeypatch.setattr(module, "validate", lambda party, files, _: release_from_files(files, party))
    first = reception.receive("shop", SHOP, LATE)
    assert reception.receive("shop", SHOP, LATE + timedelta(days=400)) == first
    assert reception.spool.releases() == {"shop": dict(SHOP)}


def test_a_late_release_is_kept_for_the_next_merge_where_that_is_the_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "validate", lambda party, files, _: release_from_files(files, party))
    reception = open_reception(tmp_path, deadline=DEADLINE)
    assert (reception.is_over(DEADLINE), reception.is_over(LATE)) == (False, True)
    receipt, _ = parse_receipt(reception.receive("shop", SHOP, LATE).receipt, "shop")
    assert receipt.spool_sha256 == reception.spool.hashes()["shop"]


def test_without_a_deadline_nothing_is_late(reception):
    assert not reception.is_over(datetime.max.replace(tzinfo=UTC))


def test_contents_are_judged_after_the_signature_and_refused_without_a_trace(reception, monkeypatch):
    def refuse(*_):
        raise ReleaseRefused("norm", "shop", "smaller steps")

    monkeypatch.setattr(module, "validate", refuse)
    with pytest.raises(ReleaseRefused, match="norm"):
        reception.receive("shop", SHOP, NOW)
    assert (reception.spool.hashes(), reception.receipts.find("shop")) == ({}, None)
    monkeypatch.setattr(module, "validate", lambda party, files, _: release_from_files(files, party))
    other = signed_files(told=OTHER_STATEMENT)
    assert reception.receive("shop", other, NOW).sha256 in reception.spool.hashes().values()
    assert STATEMENT in reception.spool.releases()["shop"]


def test_what_the_receipts_refuse_is_not_spooled(reception):
    reception.receive("shop", SHOP, NOW)
    for path in (reception.spool._parties / "shop", *sorted(reception.spool._releases.iterdir())):
        path.unlink() if path.is_file() else shutil.rmtree(path)  # the spool was lost, the receipt was not
    with pytest.raises(ReleaseRefused) as refusal:
        reception.receive("shop", signed_files(told=OTHER_STATEMENT), NOW)
    assert refusal.value.reason == "second-release"
    assert reception.spool.releases() == {}
    reception.receive("shop", SHOP, NOW)
    assert reception.spool.releases() == {"shop": dict(SHOP)}


def test_a_key_revoked_for_the_time_of_the_receipt_takes_its_release_out_of_merges(reception):
    cinema = signed_files(told=statement("cinema"), key=STRANGER)
    reception.receive("shop", SHOP, NOW)
    reception.receive("cinema", cinema, NOW)
    for since, merged in ((NOW + timedelta(hours=1), ["cinema", "shop"]), (NOW - timedelta(hours=1), ["cinema"])):
        keys = KeyList(KEYS.keys, {KEY.public.id: since})
        kept, left_out = replace(reception, keys=keys).releases()
        assert sorted(kept) == merged
        assert [refusal.reason for refusal in left_out.values()] == ["revoked"] * (2 - len(merged))
    kept, left_out = replace(reception, keys=KeyList({"cinema": KEYS.keys["cinema"]})).releases()
    assert (sorted(kept), left_out["shop"].reason) == (["cinema"], "key")


def test_a_damaged_release_is_left_out_and_the_others_are_merged(reception):
    digest = reception.receive("shop", SHOP, NOW).sha256
    reception.receive("cinema", signed_files(told=statement("cinema"), key=STRANGER), NOW)
    (reception.spool._releases / digest / README).write_bytes(b"changed")
    kept, left_out = reception.releases()
    assert (sorted(kept), left_out["shop"].reason) == (["cinema"], "corrupted")
    reception.receive("shop", SHOP, NOW)
    assert sorted(reception.releases()[0]) == ["cinema", "shop"]


@pytest.mark.parametrize("lost", ["gone", "folder", "pipe"])
def test_a_party_with_a_receipt_and_no_release_is_named_and_the_others_are_merged(reception, lost):
    reception.receive("shop", SHOP, NOW)
    reception.receive("cinema", signed_files(told=statement("cinema"), key=STRANGER), NOW)
    entry = reception.spool._parties / "shop"
    entry.unlink()
    if lost == "folder":
        entry.mkdir()
    elif lost == "pipe":
        os.mkfifo(entry)
    kept, left_out = reception.releases()
    assert (sorted(kept), left_out["shop"].reason) == (["cinema"], "corrupted")
    if lost == "gone":
        reception.receive("shop", SHOP, NOW)
        assert sorted(reception.releases()[0]) == ["cinema", "shop"]


def test_a_damaged_entry_is_healed_by_the_bytes_that_were_receipted_and_by_no_others(reception):
    receipt = reception.receive("shop", SHOP, NOW).receipt
    (reception.spool._parties / "shop").write_bytes(b"damaged")
    with pytest.raises(ReleaseRefused) as refusal:
        reception.receive("shop", signed_files(told=OTHER_STATEMENT), NOW)
    assert refusal.value.reason == "second-release"
    assert reception.receive("shop", SHOP, NOW).receipt == receipt
    assert reception.spool.releases() == {"shop": dict(SHOP)}
