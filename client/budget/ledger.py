"""What a data set has spent: an append-only, hash-chained, fsynced file that stays with the site.

    bound                                     (a site's: whose ledger it is; a simulation's begins empty)
    reserve ──▶ released ──▶ receipt
       └──────▶ abandoned

A ledger is created by an explicit act, of a data set's owner or of a simulation. One that is not there is an error:
absence is never taken for nothing spent. A site's ledger names its data set and the place of the data, so that one that
was moved, or whose data set was renamed, is found out.

A reservation charges all T steps before the first noise draw; a crash after it counts as spent. It may only go on with
the data and the configuration that it is bound to. One JSON object per line, each holding the SHA-256 of the line
before it; the hash of the last line is the head, which travels with releases, so that a cut shows. A line is added by
writing the old bytes and the new line beside the file and renaming: nobody ever sees half a line.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from dpmerge.client.budget.composition import Cap, check_cap
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import make_durable, replace_file
from dpmerge.common.untrusted.parsing import ReleaseRefused, parse_json
from dpmerge.common.untrusted.reading import NoPlainFile, TooLarge, read_file

GENESIS = "0" * 64
MAX_LEDGER_BYTES = 1 << 28
RESERVATION = "reservation"
"""File in a party's folder that names the reservation under which the folder trains."""

_FOLLOWERS = {"released": "release", "receipt": "receipt", "abandoned": None}
_RESTORE = "restore the ledger from a backup; a party that cannot show what it has spent may not spend more"


@dataclass(frozen=True)
class Reservation:
    """A charge made before training.

    Attributes:
        id: 128 random bits that nobody else learns: two reservations with equal settings differ, and a head, which is
            public and a hash over the binding too, cannot be compared with guesses of the data.
        binding: SHA-256 over the private data and the configuration; it never leaves the party.
        charge: ε, δ and the mechanism's numbers, as they were when it was made.
        is_new: Whether it was made just now (nothing of it was used before).
    """

    id: str
    binding: str
    charge: dict[str, Any]
    is_new: bool


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Whose ledger it is.

    Attributes:
        dataset: The data set's id in the site's policy.
        place: Where its records are: a resolved path, or a task's name.
    """

    dataset: str
    place: str


@dataclass(frozen=True)
class Line:
    """One line of a ledger: what it says, and the SHA-256 of its bytes, which was the head once."""

    entry: dict[str, Any]
    sha256: str


class Ledger:
    """One ledger file. Safe under two processes; every append is on disk before it returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(str(path) + ".lock")

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._path

    def exists(self) -> bool:
        """Whether it is there; one that is not tells nothing of what was spent."""
        return self._path.is_file()

    def create(self, bound: Bound | None = None) -> Ledger:
        """Begin it, with nothing spent, and return it.

        Args:
            bound: Whose it is; None, for a simulation, leaves that open.

        Raises:
            DpmergeError: DPM-504 if it is there.
        """
        with self._lock:
            if os.path.lexists(self._path):  # a link too: it may lead to a volume that is not mounted
                fix = "keep it: what it holds was spent"
                raise DpmergeError("DPM-504", f"the ledger {self._path.name} exists", fix)
            content = b"" if bound is None else _line(_binding(bound), GENESIS)
            replace_file(self._path, content, mode=0o600, durable=True)
        return self

    def bind(self, bound: Bound) -> None:
        """Say anew whose it is: all that was ever charged in it counts for that data set from now on."""
        with self._lock:
            if self.bound() != bound:
                self._append(_binding(bound))

    def bound(self) -> Bound | None:
        """Return whose it is; None if nobody said."""
        return _bound(self.entries())

    def check_bound(self, bound: Bound) -> None:
        """Refuse a ledger that is not there, or is not this data set's.

        Raises:
            DpmergeError: DPM-504.
        """
        if not self.exists():
            problem = f"data set {bound.dataset!r} has no ledger at {self._path}: what it has spent is not known"
            fix = "bring it back (a volume that is not mounted?); only if nothing was ever trained on the data set, "
            raise DpmergeError("DPM-504", problem, f"{fix}run `dpmerge ledger create POLICY.toml {bound.dataset}`")
        found = self.bound()
        if found != bound:
            whose = "nothing" if found is None else f"data set {found.dataset!r} at {found.place}"
            problem = f"the ledger {self._path.name} is bound to {whose}, not to {bound.dataset!r} at {bound.place}"
            fix = "put the old id and place back; if it is the data of this ledger under a new name or at a new place, "
            raise DpmergeError("DPM-504", problem, f"{fix}run `dpmerge ledger bind POLICY.toml {bound.dataset}`")

    def lines(self) -> list[Line]:
        """Return all lines, oldest first.

        Raises:
            DpmergeError: DPM-504 if it is not there, a line is damaged or the chain is broken.
        """
        return _parse(self._content(), self._path.name)

    def entries(self) -> list[dict[str, Any]]:
        """Return what the lines say; see `lines`."""
        return [line.entry for line in self.lines()]

    def head(self) -> str:
        """Return the hash of the last line: whoever keeps it can tell that a ledger was cut before it."""
        lines = self.lines()
        return lines[-1].sha256 if lines else GENESIS

    def reserve(
        self,
        *,
        dataset: str,
        binding: str,
        charge: dict[str, Any],
        reservation: str | None = None,
        cap: Cap | None = None,
    ) -> Reservation:
        """Charge a training, or find the open reservation that it continues.

        Args:
            dataset: The site's own name for the data set, stable under added rows.
            binding: SHA-256 over data and configuration.
            charge: ε, δ and the mechanism's numbers, for people and accountants to read.
            reservation: Id of the reservation, known to whoever continues it; None makes one up.
            cap: What all reservations in this ledger together may cost; None sets no bound.

        Raises:
            DpmergeError: DPM-504 if the ledger is not there or is another data set's, or the reservation was made for
                other data or settings, or is closed. DPM-506 if the cap would be exceeded, DPM-507 if its privacy unit
                is another; nothing is charged then.
        """
        charge = json.loads(json.dumps(charge))  # as every later reader will see it
        with self._lock:
            entries = self.entries()
            found = _find(entries, reservation) if reservation is not None else None
            if found is not None:
                _check_continues(found, entries, binding)
                make_durable(self._path)  # whoever charged it may have died before it was
                return found
            self._check_dataset(entries, dataset)
            if cap is not None:
                check_cap(entries, dataset, charge, cap)
            new = Reservation(reservation or secrets.token_hex(16), binding, charge, is_new=True)
            self._append(
                {"kind": "reserve", "dataset": dataset, "reservation": new.id, "binding": binding, "charge": charge}
            )
            return new

    def _check_dataset(self, entries: list[dict[str, Any]], dataset: str) -> None:
        """Refuse to charge another data set than the one that the ledger is bound to."""
        whose = _bound(entries)
        if whose is not None and whose.dataset != dataset:
            problem = f"the ledger {self._path.name} is that of data set {whose.dataset!r}, not of {dataset!r}"
            raise DpmergeError("DPM-504", problem, _RESTORE)

    def find(self, reservation: str) -> Reservation | None:
        """Return a reservation, open or closed, by its id."""
        return _find(self.entries(), reservation)

    def receipt_of(self, reservation: Reservation) -> str | None:
        """Return the SHA-256 of the receipt that was recorded for a reservation, or None."""
        chosen = (e for e in self.entries() if e["kind"] == "receipt" and e["reservation"] == reservation.id)
        return next((str(entry["receipt"]) for entry in chosen), None)

    def released(self, reservation: Reservation, release_sha256: str) -> None:
        """Record the release that a reservation paid for. Recording the same one again changes nothing.

        Raises:
            DpmergeError: DPM-504 if it paid for another one before.
        """
        self._follow(reservation.id, "released", release_sha256)

    def received(self, reservation: Reservation, receipt_sha256: str) -> None:
        """Record the server's receipt, which closes the outbox. Recording the same one again changes nothing.

        Raises:
            DpmergeError: DPM-504 if another one was recorded before.
        """
        self._follow(reservation.id, "receipt", receipt_sha256)

    def abandon(self) -> None:
        """Close every open reservation for good: what it charged stays spent, and its training is not gone on with."""
        with self._lock:
            entries = self.entries()
            closed = {entry["reservation"] for entry in entries if entry["kind"] in _FOLLOWERS}
            for entry in entries:
                if entry["kind"] == "reserve" and entry["reservation"] not in closed:
                    self._append({"kind": "abandoned", "reservation": entry["reservation"]})

    def _follow(self, reservation: str, kind: str, sha256: str) -> None:
        field = str(_FOLLOWERS[kind])
        with self._lock:
            before = [e for e in self.entries() if e["kind"] == kind and e["reservation"] == reservation]
            if not before:
                self._append({"kind": kind, "reservation": reservation, field: sha256})
                return
            make_durable(self._path)
            if before[0][field] != sha256:
                raise DpmergeError(
                    "DPM-504",
                    f"the reservation has another {field} already",
                    "put the first one back; a second release is a second charge, in a folder of its own",
                )

    def _content(self) -> bytes:
        try:
            return read_file(self._path, MAX_LEDGER_BYTES)
        except FileNotFoundError:
            raise DpmergeError("DPM-504", f"the ledger {self._path} is not there", _RESTORE) from None
        except (NoPlainFile, TooLarge) as refusal:  # a line added through a link would leave the linked file behind
            raise DpmergeError("DPM-504", f"the ledger {refusal.problem}", "put the ledger itself there") from None

    def _append(self, entry: dict[str, Any]) -> None:
        content = self._content() + _line(entry, self.head())
        _parse(content, self._path.name)  # what could not be read back is not written
        replace_file(self._path, content, mode=0o600, durable=True)


def reservation_id(folder: Path) -> str:
    """Return the id of the reservation under which a party's folder trains, made up and on disk before any charge.

    Raises:
        DpmergeError: DPM-504 if the file is damaged.
    """
    path = folder / RESERVATION
    if not path.exists():
        replace_file(path, secrets.token_hex(16), mode=0o600, durable=True)
    found = path.read_text(encoding="ascii", errors="replace")
    if len(found) != 32 or set(found) - set("0123456789abcdef"):
        fix = "put the file back, or train into another folder, as a second charge"
        raise DpmergeError("DPM-504", f"{RESERVATION} in the party's folder is damaged", fix)
    return found


def _binding(bound: Bound) -> dict[str, Any]:
    """Return the line that says whose a ledger is; by its random bits a head cannot be compared with guessed places."""
    return {"kind": "bound", **asdict(bound), "nonce": secrets.token_hex(16)}


def _line(entry: dict[str, Any], previous: str) -> bytes:
    return json.dumps({**entry, "previous": previous}, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _parse(content: bytes, name: str) -> list[Line]:
    lines: list[Line] = []
    reserved: set[str] = set()
    *complete, rest = content.split(b"\n")
    for number, data in enumerate([*complete, rest] if rest else complete, start=1):
        entry = _entry(data, lines[-1].sha256 if lines else GENESIS, reserved)
        if entry is None or (rest and number > len(complete)):
            problem = f"line {number} of the ledger {name} is damaged or does not follow from the line before it"
            raise DpmergeError("DPM-504", problem, _RESTORE)
        lines.append(Line(entry, hashlib.sha256(data).hexdigest()))
    return lines


def _entry(data: bytes, previous: str, reserved: set[str]) -> dict[str, Any] | None:
    """Return what a line says, or None if it is none that could stand here; notes its reservation."""
    try:
        entry = parse_json(data, "line")
    except ReleaseRefused:
        return None
    if entry.get("previous") != previous:
        return None
    kind, reservation = entry.get("kind"), entry.get("reservation")
    if kind == "bound":
        return entry if all(isinstance(entry.get(key), str) for key in ("dataset", "place", "nonce")) else None
    if not isinstance(reservation, str) or not isinstance(kind, str):
        return None
    if kind == "reserve":
        texts = isinstance(entry.get("dataset"), str) and isinstance(entry.get("binding"), str)
        if not texts or not isinstance(entry.get("charge"), dict) or reservation in reserved:
            return None
        reserved.add(reservation)
        return entry
    field = _FOLLOWERS.get(kind, "")
    complete = field is None or isinstance(entry.get(field), str)
    return entry if complete and reservation in reserved else None


def _bound(entries: list[dict[str, Any]]) -> Bound | None:
    said = [entry for entry in entries if entry["kind"] == "bound"]
    return Bound(dataset=said[-1]["dataset"], place=said[-1]["place"]) if said else None


def _find(entries: list[dict[str, Any]], reservation: str) -> Reservation | None:
    for entry in entries:
        if entry["kind"] == "reserve" and entry["reservation"] == reservation:
            return Reservation(reservation, entry["binding"], entry["charge"], is_new=False)
    return None


def _check_continues(found: Reservation, entries: list[dict[str, Any]], binding: str) -> None:
    if found.binding != binding:
        raise DpmergeError(
            "DPM-504",
            "this folder's reservation was made for other records or settings",
            "go on with the records and settings it was made for, or use another folder (a second charge)",
        )
    if any(entry["kind"] in _FOLLOWERS and entry["reservation"] == found.id for entry in entries):
        raise DpmergeError(
            "DPM-504",
            "this folder's reservation is closed, and what it paid for is not here",
            "put the release back, or train into another folder, as a second charge",
        )
