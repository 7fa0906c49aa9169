"""The outbox: a finished release in the party's folder, sent as often as it takes, until a receipt closes it.

    release/         complete and on disk, signed, before anything is sent; every retry sends these very bytes
    receipt.json     the server's signed word that it has them

A crash leaves one of three states, told apart by files alone: no release (train on, or pay anew), a release without a
receipt (send it again), both (nothing is left to do but to tell the ledger, which a repetition does not change).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from dpmerge.client.budget.ledger import Reservation, reservation_id
from dpmerge.client.budget.policy import Account
from dpmerge.client.party.signed_release import sign_release
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import make_durable, replace_file
from dpmerge.common.release.format import SIGNATURE, Release, release_files, to_files, write_files
from dpmerge.common.release.manifest import Manifest, check_hashes, manifest_hash, manifest_of, parse_signature
from dpmerge.common.release.receipt import RECEIPT, Receipt, check_receipt
from dpmerge.common.release.signing import PublicKey, SigningKey
from dpmerge.common.untrusted.parsing import ReleaseRefused

RELEASE = "release"
CLOSE_SECONDS = 5.0
"""How long an answer of the server waits for the party's folder; whoever trains there takes the receipt later."""


@dataclass(frozen=True)
class Signer:
    """For which federation a party signs, and with which key."""

    federation: str
    key: SigningKey


def put(folder: Path, release: Release, ledger_head: str, signer: Signer | None) -> None:
    """Write a release into the party's outbox, signed; it is there completely and durably, or not at all.

    Args:
        folder: The party's folder, without a release so far.
        release: What training ended with.
        ledger_head: The ledger's, with this release's charge in it.
        signer: None leaves the release unsigned: good for experiments, and no server takes it.
    """
    files = to_files(release)
    if signer is not None:
        files = sign_release(files, federation=signer.federation, ledger_head=ledger_head, key=signer.key)
    write_files(folder / RELEASE, files)


def outbox_files(folder: Path, signer: Signer | None) -> dict[str, bytes]:
    """Return what is to be sent: the bytes as they were written, whatever was changed since is refused.

    Raises:
        ReleaseRefused: If a file is gone, or is not what was signed.
        DpmergeError: DPM-302 if the release was made for another federation, or is unsigned where it must not be.
    """
    files = release_files(folder / RELEASE)
    make_durable(folder / RELEASE)  # whoever wrote it may have died before it was
    if signer is None:
        return files
    signed_for = _manifest(files, signer.key.public).federation if SIGNATURE in files else None
    if signed_for != signer.federation:
        problem = f"the party's folder holds a release {f'for {signed_for!r}' if signed_for else 'without signature'}"
        fix = f"train for {signer.federation!r} in another folder, as a second charge"
        raise DpmergeError("DPM-302", problem, fix)
    return files


def close(folder: Path, receipt: bytes, account: Account, server_keys: Iterable[PublicKey]) -> Receipt:
    """Check the server's receipt, store it, and record it in the ledger; the first one is kept whatever comes later.

    The same receipt again changes nothing. Another one for the same release, from a server that lost its own, is as
    good and changes nothing either: the outbox is closed.

    Args:
        folder: The party's folder, with its release.
        receipt: As it came.
        account: Where the release was charged.
        server_keys: Whom the site believes.

    Raises:
        DpmergeError: DPM-404 for a receipt that is not for this release, or not by such a key; DPM-504 if the ledger
            knows of no such charge.
        filelock.Timeout: If a training holds the folder for longer than `CLOSE_SECONDS`.
    """
    with FileLock(folder / "party.lock", timeout=CLOSE_SECONDS):
        files = release_files(folder / RELEASE)
        if SIGNATURE not in files:
            raise DpmergeError("DPM-404", "a receipt came for a release without signature", "sign what you send")
        checked = check_receipt(receipt, _manifest(files), manifest_hash(files[SIGNATURE]), server_keys)
        reservation = account.ledger.find(reservation_id(folder))
        if reservation is None:
            fix = "restore the ledger; a release without a charge must not be used"
            raise DpmergeError("DPM-504", "the ledger has no charge for the release in the outbox", fix)
        recorded, path = account.ledger.receipt_of(reservation), folder / RECEIPT
        if (recorded is None and not path.exists()) or recorded == hashlib.sha256(receipt).hexdigest():
            replace_file(path, receipt, mode=0o600, durable=True)
        record_receipt(folder, account, reservation)
        return checked


def record_receipt(folder: Path, account: Account, reservation: Reservation) -> None:
    """Tell the ledger of a receipt that is on disk, if there is one: a crash may have come in between."""
    path = folder / RECEIPT
    if path.exists() and account.ledger.receipt_of(reservation) is None:
        make_durable(path)
        account.ledger.received(reservation, hashlib.sha256(path.read_bytes()).hexdigest())


def _manifest(files: Mapping[str, bytes], key: PublicKey | None = None) -> Manifest:
    """Return what was signed; with a key, hold the signature to it, unless the party has changed its key since."""
    sealed = parse_signature(files[SIGNATURE], RELEASE)
    if key is not None and sealed.key_id == key.id and not sealed.is_signed_by(key):
        fix = "put back the file that was signed; the party's key signs a release once"
        raise ReleaseRefused("signature", f"{RELEASE}: {SIGNATURE} was changed", fix)
    manifest = manifest_of(sealed, RELEASE)
    check_hashes(manifest, files, RELEASE)
    return manifest
