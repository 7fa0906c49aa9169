"""Receipts as the server makes them: one per party, made once, the same bytes for ever.

A receipt is issued after the release is durably in the spool, never before.
"""

import os
from datetime import datetime
from pathlib import Path

from filelock import FileLock

from dpmerge.common.config.rules import PARTY_NAME
from dpmerge.common.files import make_durable, real_folder, replace_file
from dpmerge.common.release.manifest import Manifest
from dpmerge.common.release.receipt import KIND, Receipt, minute_of, parse_receipt
from dpmerge.common.release.signing import MAX_SEALED_BYTES, SigningKey, seal
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.common.untrusted.reading import read_file


def make_receipt(
    manifest: Manifest, *, manifest_sha256: str, spool_sha256: str, time: datetime, key: SigningKey
) -> bytes:
    """Return the signed receipt of a release that is on disk; equal arguments give equal bytes.

    Args:
        manifest: The checked manifest of the release.
        manifest_sha256: `manifest_hash` of its `signature.json`.
        spool_sha256: Name of the spool's entry.
        time: When it was received, with zone; the receipt says it to the minute.
        key: The server's.
    """
    receipt = Receipt(
        federation=manifest.federation,
        party=manifest.party,
        manifest_sha256=manifest_sha256,
        ledger_head=manifest.ledger_head,
        spool_sha256=spool_sha256,
        time=minute_of(time),
    )
    return seal(key, KIND, receipt.to_dict())


class Receipts:
    """The receipts that a federation's server has given, one file per party.

    Args:
        folder: Made if absent; two processes take turns.
    """

    def __init__(self, folder: Path) -> None:
        real_folder(folder)
        self._folder, self._lock = folder, FileLock(folder / ".lock")

    def find(self, party: str) -> bytes | None:
        """Return the receipt that a party was given."""
        path = self._folder / f"{party}.json"
        return read_file(path, MAX_SEALED_BYTES) if os.path.lexists(path) else None

    def parties(self) -> frozenset[str]:
        """Return the parties that were given a receipt."""
        return frozenset(path.stem for path in self._folder.glob("*.json") if PARTY_NAME.fullmatch(path.stem))

    def check(self, manifest: Manifest, manifest_sha256: str) -> None:
        """Refuse a manifest of a party that has a receipt for another one; changes nothing.

        Raises:
            ReleaseRefused: second-release.
            DpmergeError: DPM-404 when the stored receipt is damaged.
        """
        stored = self.find(manifest.party)
        if stored is None:
            return
        receipt, _ = parse_receipt(stored, f"stored receipt of {manifest.party}")
        if receipt.manifest_sha256 != manifest_sha256:
            problem = (
                f"{manifest.party}: manifest {manifest_sha256[:12]} after one of {receipt.manifest_sha256[:12]} was "
                "receipted"
            )
            raise ReleaseRefused("second-release", problem, "a party releases once; send the first bytes again")

    def issue(
        self, manifest: Manifest, *, manifest_sha256: str, spool_sha256: str, time: datetime, key: SigningKey
    ) -> bytes:
        """Return the party's receipt for this manifest: the one it was given before, or a new one; on disk either way.

        Raises:
            ReleaseRefused: second-release, when the party has a receipt for another manifest.
            DpmergeError: DPM-404 when the stored receipt is damaged.
        """
        path = self._folder / f"{manifest.party}.json"
        with self._lock:
            self.check(manifest, manifest_sha256)
            stored = self.find(manifest.party)
            if stored is not None:
                make_durable(path)  # whoever wrote it may have died before it was
                return stored
            made = make_receipt(
                manifest, manifest_sha256=manifest_sha256, spool_sha256=spool_sha256, time=time, key=key
            )
            replace_file(path, made, durable=True)
            return made
