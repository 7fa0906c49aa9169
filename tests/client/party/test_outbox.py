"""The outbox: whole or absent, the same bytes at every try, and closed by this release's receipt only."""

import os
from datetime import UTC, datetime

import pytest
from filelock import FileLock, Timeout

from dpmerge.client.budget.ledger import Ledger, reservation_id
from dpmerge.client.budget.policy import Account
from dpmerge.client.party import outbox
from dpmerge.client.party.outbox import RELEASE, Signer, close, outbox_files, put
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import README, SIGNATURE
from dpmerge.common.release.manifest import manifest_hash, manifest_of, parse_signature
from dpmerge.common.release.receipt import RECEIPT
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.intake.receipts import make_receipt
from tests.signed_releases import FEDERATION, HEAD, KEY, SERVER_KEY, STRANGER, release, signed_files

SIGNER = Signer(FEDERATION, KEY)
NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


@pytest.fixture
def account(tmp_path):
    account = Account(Ledger(tmp_path / "ledger.jsonl").create(), "reviews")
    reserved = account.ledger.reserve(
        dataset="reviews", binding="b", charge={"epsilon": 1.0}, reservation=reservation_id(tmp_path)
    )
    put(tmp_path, release(), HEAD, SIGNER)
    account.ledger.released(reserved, "e" * 64)
    return account


def receipt_for(files, key=SERVER_KEY, time=NOW):
    signature = files[SIGNATURE]
    manifest = manifest_of(parse_signature(signature, "shop"), "shop")
    sha256 = manifest_hash(signature)
    return make_receipt(manifest, manifest_sha256=sha256, spool_sha256="e" * 64, time=time, key=key)


def kinds(account):
    return [entry["kind"] for entry in account.ledger.entries()]


def test_what_is_sent_is_what_was_written(account, tmp_path):
    assert outbox_files(tmp_path, SIGNER) == signed_files() == outbox_files(tmp_path, SIGNER)


@pytest.mark.parametrize("name", [README, SIGNATURE, "statement.json"])
def test_changed_bytes_are_not_sent(account, tmp_path, name):
    path = tmp_path / RELEASE / name
    path.write_bytes(path.read_bytes().replace(b"shop", b"shob"))
    with pytest.raises(ReleaseRefused):
        outbox_files(tmp_path, SIGNER)


def test_another_federations_release_is_not_sent(account, tmp_path):
    with pytest.raises(DpmergeError, match="DPM-302"):
        outbox_files(tmp_path, Signer("another-1f", KEY))


def test_an_unsigned_release_is_not_sent_where_signatures_are_asked_for(tmp_path):
    put(tmp_path, release(), HEAD, None)
    assert SIGNATURE not in outbox_files(tmp_path, None)
    with pytest.raises(DpmergeError, match="without signature"):
        outbox_files(tmp_path, SIGNER)


def test_a_receipt_closes_the_ledgers_entry_once(account, tmp_path):
    receipt = receipt_for(signed_files())
    for _ in range(2):
        close(tmp_path, receipt, account, [SERVER_KEY.public])
        assert kinds(account) == ["reserve", "released", "receipt"]
    assert (tmp_path / RECEIPT).read_bytes() == receipt


@pytest.mark.parametrize(
    "receipt",
    [
        receipt_for(signed_files(), key=STRANGER),
        receipt_for(signed_files(ledger_head="cd" * 32)),
        receipt_for(signed_files(federation="another-1f")),
        b"",
    ],
    ids=["a stranger's", "of another manifest", "of another federation", "empty"],
)
def test_what_is_no_receipt_for_this_release_leaves_the_outbox_open(account, tmp_path, receipt):
    with pytest.raises(DpmergeError, match="DPM-404"):
        close(tmp_path, receipt, account, [SERVER_KEY.public])
    assert not (tmp_path / RECEIPT).exists()
    assert kinds(account) == ["reserve", "released"]


def test_a_crash_while_writing_leaves_no_outbox(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            put(tmp_path, release(), HEAD, SIGNER)
    assert not (tmp_path / RELEASE).exists()
    put(tmp_path, release(), HEAD, SIGNER)
    assert outbox.outbox_files(tmp_path, SIGNER) == signed_files()


def test_another_receipt_of_a_server_that_lost_its_own_changes_nothing(account, tmp_path):
    first, later = receipt_for(signed_files()), receipt_for(signed_files(), time=NOW.replace(hour=20))
    assert first != later
    close(tmp_path, first, account, [SERVER_KEY.public])
    close(tmp_path, later, account, [SERVER_KEY.public])
    assert (tmp_path / RECEIPT).read_bytes() == first
    assert kinds(account) == ["reserve", "released", "receipt"]
    (tmp_path / RECEIPT).unlink()
    close(tmp_path, later, account, [SERVER_KEY.public])  # not what the ledger recorded: not put in its place
    assert not (tmp_path / RECEIPT).exists()
    close(tmp_path, first, account, [SERVER_KEY.public])
    assert (tmp_path / RECEIPT).read_bytes() == first


def test_an_answer_does_not_wait_for_a_training(account, tmp_path, monkeypatch):
    monkeypatch.setattr(outbox, "CLOSE_SECONDS", 0.1)
    with FileLock(tmp_path / "party.lock"), pytest.raises(Timeout):
        close(tmp_path, receipt_for(signed_files()), account, [SERVER_KEY.public])
    assert kinds(account) == ["reserve", "released"]
    close(tmp_path, receipt_for(signed_files()), account, [SERVER_KEY.public])
    assert kinds(account) == ["reserve", "released", "receipt"]


def test_what_is_sent_is_on_disk_whoever_wrote_it(account, tmp_path, monkeypatch):
    fsync, synced = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    outbox_files(tmp_path, SIGNER)
    assert {str(tmp_path / RELEASE), str(tmp_path / RELEASE / SIGNATURE), str(tmp_path)} <= set(synced)
