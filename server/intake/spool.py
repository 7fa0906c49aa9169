"""Accepted releases on disk, named by their content. Merging is a pure function of what lies here.

    releases/<hash>/     the files of one release, as `common/release/format.py` writes them
    parties/<party>      that hash, and the hash of all bytes, card and signature included
    withdrawn/<party>    the same again: the bytes stay, and no later merge takes them

A release is complete and on disk before its party's entry appears. The entry is on disk before `accept` returns, also
where an earlier call wrote it and died. A crash in between leaves a release that nobody points to; sending it again
finishes the job. Bytes that were damaged later are noticed when they are read, and healed by the same bytes, a party's
entry among them.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import rfc8785
from filelock import FileLock

from dpmerge.common.config.rules import PARTY_NAME
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import make_durable, real_folder, replace_file
from dpmerge.common.release.format import FILES, release_hash, remove_leftovers, write_files
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.common.untrusted.reading import MAX_FOLDER_BYTES, read_file

MAX_ENTRY_BYTES = 4096
_ENTRY = re.compile(r"([0-9a-f]{64}) ([0-9a-f]{64})\n")


@dataclass(frozen=True)
class Entry:
    """What a party's file says: the release's name, and the hash of all its bytes."""

    release: str
    content: str

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> "Entry":
        """Return the entry of a release's files."""
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        return cls(release_hash(files), hashlib.sha256(rfc8785.dumps(hashes)).hexdigest())

    def text(self) -> str:
        """Return the file's content."""
        return f"{self.release} {self.content}\n"


class Spool:
    """The releases that a server has accepted, at most one per party.

    Args:
        folder: Made if absent; one server process at a time writes, others wait.
    """

    def __init__(self, folder: Path) -> None:
        self._releases, self._parties, self._withdrawn = (
            folder / name for name in ("releases", "parties", "withdrawn")
        )
        for place in (self._releases, self._parties, self._withdrawn):
            real_folder(place)
        self._lock = FileLock(folder / ".lock")

    def accept(self, party: str, files: Mapping[str, bytes]) -> str:
        """Store a validated release durably and return its hash; the same bytes again change nothing.

        Raises:
            ReleaseRefused: second-release, when the party has other bytes here, be it only the signature that differs;
                path, for a name that is no party's.
        """
        if not PARTY_NAME.fullmatch(party):
            raise ReleaseRefused("path", f"party {party!r}", f"name parties by {PARTY_NAME.pattern}")
        sent = Entry.of(files)
        with self._lock:
            remove_leftovers(self._releases)
            folder, present = self._releases / sent.release, self._accepted(party, sent)
            if present == sent:
                self._heal(folder, files)
                make_durable(folder)
                self._heal_entry(party, sent)
                make_durable(self._parties / party)
                return sent.release
            if present is not None:
                problem = (
                    f"{party}: sent {sent.content[:12]} but other bytes, {present.content[:12]}, were accepted before"
                )
                raise ReleaseRefused("second-release", problem, "a party releases once; send the first bytes again")
            if folder.exists():  # left by a crash; nobody was told of it, so it may be another's
                shutil.rmtree(folder)
            write_files(folder, files)
            replace_file(self._parties / party, sent.text(), durable=True)
        return sent.release

    def holds(self, party: str, files: Mapping[str, bytes]) -> bool:
        """Return whether these very bytes were accepted from a party, withdrawn or not, whatever became of them."""
        sent = Entry.of(files)
        return self._accepted(party, sent) == sent

    def withdraw(self, party: str) -> None:
        """Keep a party's release out of every later merge; withdrawing it again changes nothing.

        Models that were merged before stay what they are. The party's entry stays too: it cannot release anew.

        Raises:
            ReleaseRefused: unknown-party, when nothing of that party is here.
        """
        with self._lock:
            replace_file(self._withdrawn / party, self._entry(party).text(), durable=True)

    def hashes(self) -> dict[str, str]:
        """Return party → hash of its release, by party, whether withdrawn or not."""
        return {party: self._entry(party).release for party in _names(self._parties)}

    def parties(self) -> frozenset[str]:
        """Return who has an entry here, withdrawn or not, damaged or not."""
        return frozenset(_names(self._parties))

    def withdrawn(self) -> frozenset[str]:
        """Return the parties whose releases are in no later merge."""
        return frozenset(_names(self._withdrawn))

    def release(self, party: str) -> dict[str, bytes]:
        """Return the bytes of a party's accepted release, whether withdrawn or not.

        Raises:
            ReleaseRefused: unknown-party; corrupted, when the bytes are no longer those that were accepted.
        """
        return self._files(party, self._entry(party))

    def to_merge(self) -> tuple[str, ...]:
        """Return the parties whose releases were accepted and not withdrawn, by name."""
        withdrawn = self.withdrawn()
        return tuple(party for party in _names(self._parties) if party not in withdrawn)

    def releases(self) -> dict[str, dict[str, bytes]]:
        """Return party → the bytes of its release, by party, of all that are to be merged.

        Raises:
            ReleaseRefused: corrupted, when the bytes are no longer those that were accepted.
        """
        return {party: self.release(party) for party in self.to_merge()}

    def folders(self) -> dict[str, Path]:
        """Return party → the folder of its release, as `releases` chooses and checks them, one at a time in memory."""
        chosen = {party: self._entry(party) for party in self.to_merge()}
        for party, entry in chosen.items():
            self._files(party, entry)
        return {party: self._releases / entry.release for party, entry in chosen.items()}

    def find(self, party: str) -> str | None:
        """Return the hash of one party's release, withdrawn or not, without a look at the others'.

        Raises:
            ReleaseRefused: corrupted, when its entry is damaged.
        """
        entry = self._find(party)
        return None if entry is None else entry.release

    def _find(self, party: str) -> Entry | None:
        path = self._parties / party
        if not PARTY_NAME.fullmatch(party) or not os.path.lexists(path):  # a pipe or a folder there is no absence
            return None
        found = _ENTRY.fullmatch(read_file(path, MAX_ENTRY_BYTES).decode("ascii", "replace"))
        if found is None:
            fix = "have the party send the same bytes again, or restore this file of the spool from a backup"
            raise ReleaseRefused("corrupted", f"{party}: {path}", fix)
        return Entry(*found.groups())

    def _accepted(self, party: str, sent: Entry) -> Entry | None:
        """Return what was accepted of a party; where its entry is damaged, what it sends now, if those bytes lie here.

        A release names its party, so nobody else's bytes have this name. Whether a receipt was given for other bytes,
        `Receipts.check` asks before.
        """
        try:
            return self._find(party)
        except ReleaseRefused:
            if self._stored_as(sent) != sent:
                raise
            return sent

    def _entry(self, party: str) -> Entry:
        entry = self._find(party)
        if entry is None:
            known = ", ".join(_names(self._parties)) or "no release"
            raise ReleaseRefused("unknown-party", f"{party!r} has no release here", f"the spool holds {known}")
        return entry

    def _files(self, party: str, entry: Entry) -> dict[str, bytes]:
        files = self._stored(entry)
        if Entry.of(files) != entry:
            folder = self._releases / entry.release
            raise ReleaseRefused("corrupted", f"{party}: {folder}", "have the party send the same bytes again")
        return files

    def _stored(self, entry: Entry) -> dict[str, bytes]:
        """Read the files of a release, whatever else a file manager or a person put beside them."""
        paths = [self._releases / entry.release / name for name in sorted(FILES)]
        return {path.name: read_file(path, MAX_FOLDER_BYTES) for path in paths if path.is_file()}

    def _stored_as(self, entry: Entry) -> Entry | None:
        """Return the entry of the bytes that lie in a release's folder, or None where they are not even a release."""
        try:
            return Entry.of(self._stored(entry))
        except DpmergeError:
            return None

    def _heal_entry(self, party: str, sent: Entry) -> None:
        """Write a party's entry anew where it is damaged."""
        path, text = self._parties / party, sent.text()
        if read_file(path, MAX_ENTRY_BYTES) != text.encode():
            replace_file(path, text, durable=True)

    def _heal(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """Put back, file by file, what is no longer what was accepted: `files` are those bytes."""
        stored = self._stored(Entry.of(files))
        real_folder(folder)
        for name in sorted(stored.keys() - files.keys()):
            (folder / name).unlink()
        for name, data in files.items():
            if stored.get(name) != data:
                replace_file(folder / name, data, durable=True)


def open_spool(folder: Path) -> Spool:
    """Return a spool that exists.

    Raises:
        DpmergeError: DPM-403 if there is none at the folder.
    """
    if not (folder / "parties").is_dir():
        raise DpmergeError("DPM-403", f"{folder} is no spool", "name the folder `spool` of a run or a server")
    return Spool(folder)


def _names(folder: Path) -> list[str]:
    """Return the parties that have a file here; whatever else lies beside them is nobody's."""
    return [path.name for path in sorted(folder.iterdir()) if PARTY_NAME.fullmatch(path.name) and path.is_file()]
