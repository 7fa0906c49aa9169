import json
import os
from datetime import UTC, datetime, timedelta

import pytest
import rfc8785

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import SIGNATURE
from dpmerge.common.release.manifest import manifest_hash, manifest_of, parse_signature
from dpmerge.common.release.receipt import check_receipt, minute_of
from dpmerge.common.release.signing import seal
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.intake.receipts import Receipts, make_receipt
from tests.signed_releases import SERVER_KEY, STRANGER, signed_files

NOW = datetime(2026, 3, 1, 12, 30, 59, tzinfo=UTC)


@pytest.fixture(scope="module")
def sent():
    """A signed manifest and its hash."""
    signature = signed_files()[SIGNATURE]
    return manifest_of(parse_signature(signature, "shop"), "shop"), manifest_hash(signature)


def issue(receipts, sent, *, time=NOW, key=SERVER_KEY):
    return receipts.issue(sent[0], manifest_sha256=sent[1], spool_sha256="e" * 64, time=time, key=key)


def test_a_party_gets_the_same_receipt_again_however_late_and_whatever_the_key(tmp_path, sent):
    first = issue(Receipts(tmp_path), sent)
    later = issue(Receipts(tmp_path), sent, time=NOW + timedelta(days=40), key=STRANGER)
    assert first == later == Receipts(tmp_path).find("shop")
    receipt = check_receipt(first, *sent, [SERVER_KEY.public])
    assert (receipt.time, receipt.spool_sha256) == ("2026-03-01T12:30:00Z", "e" * 64)
    assert receipt.received_at == NOW.replace(second=0)


def test_another_manifest_of_the_same_party_is_refused(tmp_path, sent):
    receipts = Receipts(tmp_path)
    first = issue(receipts, sent)
    with pytest.raises(ReleaseRefused) as refusal:
        issue(receipts, (sent[0], "f" * 64))
    assert refusal.value.reason == "second-release"
    assert receipts.find("shop") == first


def test_a_crash_before_the_receipt_is_on_disk_leaves_none(tmp_path, sent, monkeypatch):
    receipts = Receipts(tmp_path)

    def killed(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dpmerge.server.intake.receipts.replace_file", killed)
        with pytest.raises(KeyboardInterrupt):
            issue(receipts, sent)
    assert receipts.find("shop") is None
    assert check_receipt(issue(receipts, sent), *sent, [SERVER_KEY.public])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("party", "cinema"),
        ("federation", "another"),
        ("manifest_sha256", "f" * 64),
        ("ledger_head", "f" * 64),
        ("time", "2026-02-30T00:00:00Z"),
        ("time", "2026-03-01T12:30:59Z"),
        ("spool_sha256", 7),
        ("extra", "x"),
    ],
)
def test_a_receipt_for_anything_else_is_refused(sent, name, value):
    made = make_receipt(sent[0], manifest_sha256=sent[1], spool_sha256="e" * 64, time=NOW, key=SERVER_KEY)
    body = json.loads(made)["receipt"] | {name: value}
    with pytest.raises(DpmergeError, match="DPM-404"):
        check_receipt(seal(SERVER_KEY, "receipt", body), *sent, [SERVER_KEY.public])


def test_a_receipt_that_no_believed_server_signed_is_refused(sent):
    made = make_receipt(sent[0], manifest_sha256=sent[1], spool_sha256="e" * 64, time=NOW, key=STRANGER)
    stolen_name = rfc8785.dumps(json.loads(made) | {"key_id": SERVER_KEY.public.id})
    for data in (made, stolen_name, b"", b"{}", made[:-1], signed_files()[SIGNATURE]):
        with pytest.raises(DpmergeError, match="DPM-404"):
            check_receipt(data, *sent, [SERVER_KEY.public])


def test_times_without_a_zone_are_a_defect():
    with pytest.raises(ValueError, match="time zone"):
        minute_of(datetime(2026, 3, 1))


def test_the_same_receipt_again_is_on_disk_again(tmp_path, sent, monkeypatch):
    receipts, fsync, synced = Receipts(tmp_path), os.fsync, []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        issue(receipts, sent)
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    issue(receipts, sent)
    assert {str(tmp_path / "shop.json"), str(tmp_path)} <= set(synced)


@pytest.mark.parametrize("kind", ["pipe", "folder", "broken link"])
def test_a_receipt_that_is_no_plain_file_is_not_absent(tmp_path, kind):
    place = tmp_path / "shop.json"
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "folder":
            place.mkdir()
        case _:
            place.symlink_to(tmp_path / "nowhere")
    receipts = Receipts(tmp_path)
    assert receipts.parties() == {"shop"}
    with pytest.raises(DpmergeError, match=r"DPM-401: .*shop\.json is (no regular file|a link)"):
        receipts.find("shop")
