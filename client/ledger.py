"""What this party has spent: an append-only, hash-chained, fsynced file that stays with the party.

A reservation charges all T steps before the first noise draw; a crash after it counts as spent. The same reservation
may only go on with the same data and configuration. One JSON object per line, each holding the SHA-256 of the line
before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from dpmerge.common.errors import DpmergeError

GENESIS = "0" * 64


@dataclass(frozen=True)
class Reservation:
    """A charge made before training.

    Attributes:
        id: Random, so that two reservations with equal settings differ.
        binding: SHA-256 over the private data and the configuration; it never leaves the party.
        charge: ε, δ and the mechanism's numbers, as they were when it was made.
        is_new: Whether it was made just now (nothing of it was used before).
    """

    id: str
    binding: str
    charge: dict[str, Any]
    is_new: bool


class Ledger:
    """The ledger file of one party. Safe under two processes; every append is on disk before it returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(str(path) + ".lock")

    def entries(self) -> list[dict[str, Any]]:
        """Return all entries, oldest first.

        Raises:
            DpmergeError: DPM-504 if a line is damaged or the chain is broken.
        """
        if not self._path.exists():
            return []
        entries, previous = [], GENESIS
        for number, line in enumerate(self._path.read_bytes().splitlines(), start=1):
            try:
                entry = json.loads(line)
                intact = isinstance(entry, dict) and entry.get("previous") == previous
            except ValueError:
                intact = False
            if not intact:
                raise DpmergeError(
                    "DPM-504",
                    f"line {number} of {self._path.name} is damaged or does not follow from the line before it",
                    "restore the ledger from a backup; a party that cannot show what it has spent may not spend more",
                )
            entries.append(entry)
            previous = hashlib.sha256(line).hexdigest()
        return entries

    def head(self) -> str:
        """Return the hash of the last line: whoever keeps it can tell that a ledger was truncated."""
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        return hashlib.sha256(lines[-1]).hexdigest() if lines else GENESIS

    def reserve(self, *, dataset: str, binding: str, charge: dict[str, Any]) -> Reservation:
        """Charge a training, or find the open reservation that it continues.

        Args:
            dataset: The site's own name for the data set, stable under added rows.
            binding: SHA-256 over data and configuration.
            charge: ε, δ and the mechanism's numbers, for people and accountants to read.

        Raises:
            DpmergeError: DPM-504 if another reservation on this data set is still open: its noise is out, its release
                is not.
        """
        with self._lock:
            open_reservations = _open(self.entries(), dataset)
            for entry in open_reservations:
                if entry["binding"] == binding:
                    return Reservation(entry["reservation"], binding, entry["charge"], is_new=False)
            if open_reservations:
                raise DpmergeError(
                    "DPM-504",
                    f"the data set {dataset!r} has a reservation without a release, for other records or settings",
                    "go on with the records and settings it was made for, or use another folder (a second charge)",
                )
            reservation = Reservation(secrets.token_hex(16), binding, charge, is_new=True)
            self._append(
                {
                    "kind": "reserve",
                    "dataset": dataset,
                    "reservation": reservation.id,
                    "binding": binding,
                    "charge": charge,
                }
            )
            return reservation

    def find(self, binding: str) -> Reservation | None:
        """Return the newest reservation, open or closed, for these data and this configuration."""
        for entry in reversed(self.entries()):
            if entry["kind"] == "reserve" and entry["binding"] == binding:
                return Reservation(entry["reservation"], binding, entry["charge"], is_new=False)
        return None

    def abandon(self) -> None:
        """Close every open reservation for good: what it charged stays spent, and its training is not gone on with."""
        with self._lock:
            entries = self.entries()
            for dataset in {entry["dataset"] for entry in entries if entry["kind"] == "reserve"}:
                for entry in _open(entries, dataset):
                    self._append({"kind": "abandoned", "reservation": entry["reservation"]})

    def released(self, reservation: Reservation, release_sha256: str) -> None:
        """Record the release that a reservation paid for. Recording the same one again changes nothing."""
        with self._lock:
            entry = {"kind": "released", "reservation": reservation.id, "release": release_sha256}
            if not any(
                old.get("kind") == "released" and old["reservation"] == reservation.id for old in self.entries()
            ):
                self._append(entry)

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps({**entry, "previous": self.head()}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open(entries: list[dict[str, Any]], dataset: str) -> list[dict[str, Any]]:
    closed = {entry["reservation"] for entry in entries if entry["kind"] != "reserve"}
    return [e for e in entries if e["kind"] == "reserve" and e["dataset"] == dataset and e["reservation"] not in closed]
