"""Receipts as the server makes them: one per party, made once, the same bytes for ever.

A receipt is issued after the release is durably in the spool, never before.
"""

from datetime import datetime
from pathlib import Path

from filelock import FileLock

from dpmerge.common.files import real_folder, replace_file
from dpmerge.common.manifest import Manifest
from dpmerge.common.reading import read_file
from dpmerge.common.receipt import KIND, Receipt, coarse, parse_receipt
from dpmerge.common.signing import MAX_SEALED_BYTES, SigningKey, seal
from dpmerge.common.untrusted import ReleaseRefused


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
        time=coarse(time),
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
        return read_file(path, MAX_SEALED_BYTES) if path.exists() else None

    def issue(
        self, manifest: Manifest, *, manifest_sha256: str, spool_sha256: str, time: datetime, key: SigningKey
    ) -> bytes:
        """Return the party's receipt for this manifest: the one it was given before, or a new one, then on disk.

        Raises:
            ReleaseRefused: second-release, when the party has a receipt for another manifest.
            DpmergeError: DPM-404 when the stored receipt is damaged.
        """
        with self._lock:
            stored = self.find(manifest.party)
            if stored is None:
                stored = make_receipt(
                    manifest, manifest_sha256=manifest_sha256, spool_sha256=spool_sha256, time=time, key=key
                )
                replace_file(self._folder / f"{manifest.party}.json", stored, durable=True)
                return stored
        receipt, _ = parse_receipt(stored, f"stored receipt of {manifest.party}")
        if receipt.manifest_sha256 != manifest_sha256:
            problem = (
                f"{manifest.party}: manifest {manifest_sha256[:12]} after one of {receipt.manifest_sha256[:12]} was "
                "receipted"
            )
            raise ReleaseRefused("second-release", problem, "a party releases once; send the first bytes again")
        return stored
