"""Power cuts and disk errors at every step of an exchange, and what was promised before them.

A party charges, writes its release, sends it; a server spools it and gives a receipt; the party closes its ledger. The
code is the product's; the release is small and made up. A disk that forgets stands below it: after a cut, a file has
the content of its last fsync, and a folder the names of its last fsync (`lost`), or the names of the moment and empty
files where nothing was synced (`torn`). Both are allowed to a real file system.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from dpmerge.client.budget.ledger import Ledger, reservation_id
from dpmerge.client.budget.policy import Account
from dpmerge.client.party.outbox import RELEASE, Signer, close, outbox_files, put, record_receipt
from dpmerge.common.release.format import Release, release_hash
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.signing import SigningKey
from dpmerge.server.intake import reception as reception_module
from dpmerge.server.intake.receipts import Receipts
from dpmerge.server.intake.reception import Reception
from dpmerge.server.intake.spool import Spool
from dpmerge.server.intake.validation import ReleaseSpec

FEDERATION, PARTY = "power-cuts-1", "shop"
NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
PARTY_KEY, SERVER_KEY = SigningKey(bytes([1]) * 32), SigningKey(bytes([2]) * 32)
CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir")

Mode = Literal["lost", "torn"]
Fault = Literal["cut", "error"]


class PowerCut(BaseException):
    """The moment at which everything stops."""


@dataclass
class Disk:
    """What of a tree would be there after a cut.

    Inodes are held open, so that none is used for a second file.

    Attributes:
        root: The tree.
        contents: Inode → the file's content at its last fsync.
        names: Inode of a folder → name → inode, at its last fsync.
    """

    root: Path
    contents: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)

    def sync_all(self) -> None:
        """Take everything that is there as written long ago."""
        for path in (self.root, *self.root.rglob("*")):
            self.sync(path)

    def sync(self, path: Path) -> None:
        """Note what an fsync of this file or folder puts on disk."""
        inode = self._hold(path)
        if path.is_dir():
            self.names[inode] = {child.name: self._hold(child) for child in path.iterdir()}
            for child in path.iterdir():
                if child.is_dir():
                    self.names.setdefault(child.stat().st_ino, {})
        else:
            self.contents[inode] = path.read_bytes()

    def after_a_cut(self, target: Path, mode: Mode) -> None:
        """Write the tree as it would be found."""
        if mode == "lost":
            self._write(self.root.stat().st_ino, target)
            return
        for path in (self.root, *sorted(self.root.rglob("*"))):
            place = target / path.relative_to(self.root)
            if path.is_dir():
                place.mkdir(parents=True)
            else:
                place.write_bytes(self.contents.get(path.stat().st_ino, b""))

    def close(self) -> None:
        """Let go of the inodes."""
        for descriptor in self._held.values():
            os.close(descriptor)

    def _hold(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _write(self, inode: int, target: Path) -> None:
        target.mkdir(parents=True)
        for name, child in self.names.get(inode, {}).items():
            if child in self.names:
                self._write(child, target / name)
            else:
                (target / name).write_bytes(self.contents.get(child, b""))


@contextmanager
def faulty(disk: Disk, nth: int | None, fault: Fault, on_cut: Callable[[], None]) -> Iterator[list[int]]:
    """Count what reaches the disk, and let the nth of these steps fail; yields a list whose length is the count.

    A cut comes before and after each step, so steps count twice; an error comes instead of the step.
    """
    steps: list[int] = []

    def step() -> None:
        steps.append(len(steps))
        if nth != steps[-1]:
            return
        if fault == "error":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        on_cut()
        raise PowerCut

    def fsync(descriptor: int) -> None:
        step()
        disk.sync(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        if fault == "cut":
            step()

    def changing(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **options: Any) -> Any:
            step()
            result = real(*args, **options)
            if fault == "cut":
                step()
            return result

        return change

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(os, "fsync", fsync))
        for name in CHANGES:
            patches.enter_context(mock.patch.object(os, name, changing(getattr(os, name))))
        yield steps


@dataclass
class Promises:
    """What had been promised when the fault came."""

    charged: str | None = None
    sent: dict[str, bytes] | None = None
    receipt: bytes | None = None
    closed: bool = False


def exchange(place: Path, release: Release, promised: Promises) -> None:
    """Run the whole exchange, or go on with it: what the product does, without training and without Flower."""
    account, folder = Account(Ledger(place / "site" / "ledger.jsonl"), "reviews"), place / "site" / "party"
    signer = Signer(FEDERATION, PARTY_KEY)
    if not (folder / RELEASE).exists():
        charged = account.ledger.reserve(
            dataset="reviews", binding="b", charge={"epsilon": 1.0}, reservation=reservation_id(folder)
        )
        promised.charged = charged.id
        put(folder, release, account.ledger.head(), signer)
    reservation = account.ledger.find(reservation_id(folder))
    if reservation is None:
        raise LookupError("the release has no charge")
    files = outbox_files(folder, signer)
    account.ledger.released(reservation, release_hash(files))
    record_receipt(folder, account, reservation)
    promised.sent = files
    receipt = reception_at(place).receive(PARTY, files, NOW).receipt
    promised.receipt = receipt
    close(folder, receipt, account, [SERVER_KEY.public])
    promised.closed = True


def reception_at(place: Path) -> Reception:
    """Return the server's reception below a folder; what a release means is not checked, the rest is."""
    parties: Any = {PARTY: None}
    return Reception(
        federation=FEDERATION,
        release_spec=ReleaseSpec(parties=parties, base_sha256="c" * 64, adapter_config={}, shapes={}),
        keys=KeyList({PARTY: (PARTY_KEY.public,)}),
        key=SERVER_KEY,
        spool=Spool(place / "server" / "spool"),
        receipts=Receipts(place / "server" / "receipts"),
    )


def broken_promises(place: Path, release: Release, promised: Promises) -> list[str]:
    """Go on with an exchange after a fault, and return which promises were not kept."""
    broken, again = [], Promises()
    ledger = Ledger(place / "site" / "ledger.jsonl")
    if promised.receipt is not None and reception_at(place).releases()[0] != {PARTY: promised.sent}:
        broken.append("a receipted release is not in the spool")
    if promised.closed and [entry["kind"] for entry in ledger.entries()] != ["reserve", "released", "receipt"]:
        broken.append("a closed ledger is open")
    try:
        exchange(place, release, again)
    except Exception as error:
        return [*broken, f"it does not go on: {error}"]
    entries = ledger.entries()
    if promised.charged is not None and promised.charged not in {entry["reservation"] for entry in entries}:
        broken.append("a charge was lost")
    if promised.sent is not None and again.sent != promised.sent:
        broken.append("other bytes are sent than before")
    if promised.receipt is not None and again.receipt != promised.receipt:
        broken.append("another receipt is given than before")
    if [entry["kind"] for entry in entries[-3:]] != ["reserve", "released", "receipt"]:
        broken.append("the exchange is not complete")
    return broken


def one_fault(folder: Path, release: Release, kill_at: int | None, nth: int, fault: Fault, mode: Mode) -> list[str]:
    """Let an exchange be killed at a step (or not begun before), go on, let the nth step then fail, and go on again.

    Returns:
        The broken promises; [] also if there are fewer steps.

    Raises:
        IndexError: If the second run has no such step.
    """
    place, found, promised = folder / "live", folder / "found", Promises()
    for part in ("site/party", "server"):
        (place / part).mkdir(parents=True)
    Ledger(place / "site" / "ledger.jsonl").create()
    disk = Disk(place)
    disk.sync_all()
    try:
        if kill_at is not None:  # killed, with the power on: all that was written stays, none of it more durable
            with faulty(disk, kill_at, "cut", lambda: None), _ending(PowerCut):
                exchange(place, release, promised)
        with (
            faulty(disk, nth, fault, lambda: disk.after_a_cut(found, mode)) as steps,
            _ending(PowerCut, OSError),
        ):
            exchange(place, release, promised)
        if len(steps) <= nth:
            raise IndexError(nth)
        return broken_promises(found if fault == "cut" else place, release, promised)
    finally:
        disk.close()
        shutil.rmtree(folder)


@contextmanager
def _ending(*kinds: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except kinds:
        return


def all_faults(folder: Path, release: Release, kills: Iterator[int | None], *, every: int = 1) -> tuple[int, list[str]]:
    """Inject a fault at every step, or some, after each of the given kills.

    Args:
        folder: An empty one, best in memory.
        release: What is sent.
        kills: At which step an earlier run was killed; None for no earlier run.
        every: 1 for all steps, 2 for every second one, and so on.

    Returns:
        How many faults there were, and the promises that broke.
    """
    num_faults, broken = 0, []
    with mock.patch.object(reception_module, "validate", return_value=release):
        for kill_at in kills:
            for fault, mode in (("cut", "lost"), ("cut", "torn"), ("error", "lost")):
                nth = 0
                while True:
                    try:
                        found = one_fault(folder / "exchange", release, kill_at, nth, fault, mode)  # type: ignore[arg-type]
                    except IndexError:
                        break
                    broken += [f"{fault} ({mode}) at step {nth} after a kill at {kill_at}: {one}" for one in found]
                    num_faults, nth = num_faults + 1, nth + every
    return num_faults, broken
