"""Accepted releases on disk, named by their content. Merging is a pure function of what lies here.

    releases/<hash>/     the files of one release, as `common/release.py` writes them
    parties/<party>      that hash
    withdrawn/<party>    the hash again: the bytes stay, and no later merge takes them

A release is complete and on disk before its party's entry appears, and the entry is on disk before `accept` returns. A
crash in between leaves a release that nobody points to; sending it again finishes the job.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from dpmerge.common.config_rules import PARTY_NAME
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import real_folder, replace_file
from dpmerge.common.reading import MAX_FOLDER_BYTES, read_file
from dpmerge.common.release import release_hash, write_files
from dpmerge.common.untrusted import ReleaseRefused

MAX_ENTRY_BYTES = 4096


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
        digest = release_hash(files)
        with self._lock:
            if self.holds(party, files):
                return digest
            present = self.find(party)
            if present is not None:
                problem = f"{party}: sent {digest[:12]} but other bytes, {present[:12]}, were accepted before"
                raise ReleaseRefused("second-release", problem, "a party releases once; send the first bytes again")
            if (self._releases / digest).exists():  # left by a crash; nobody was told of it, so it may be another's
                shutil.rmtree(self._releases / digest)
            write_files(self._releases / digest, files)
            replace_file(self._parties / party, digest, durable=True)
        return digest

    def holds(self, party: str, files: Mapping[str, bytes]) -> bool:
        """Return whether a party's accepted release, withdrawn or not, is these very bytes.

        Raises:
            ReleaseRefused: corrupted, when the stored bytes are no longer those that were accepted.
        """
        digest = release_hash(files)
        return self.find(party) == digest and self._files(party, digest) == dict(files)

    def withdraw(self, party: str) -> None:
        """Keep a party's release out of every later merge; withdrawing it again changes nothing.

        Models that were merged before stay what they are. The party's entry stays too: it cannot release anew.

        Raises:
            ReleaseRefused: unknown-party, when nothing of that party is here.
        """
        with self._lock:
            replace_file(self._withdrawn / party, self._hash(party), durable=True)

    def hashes(self) -> dict[str, str]:
        """Return party → hash of its release, by party, whether withdrawn or not."""
        return _entries(self._parties)

    def withdrawn(self) -> frozenset[str]:
        """Return the parties whose releases are in no later merge."""
        return frozenset(_entries(self._withdrawn))

    def release(self, party: str) -> dict[str, bytes]:
        """Return the bytes of a party's accepted release, whether withdrawn or not.

        Raises:
            ReleaseRefused: unknown-party; corrupted, when the bytes are no longer those that were accepted.
        """
        return self._files(party, self._hash(party))

    def releases(self) -> dict[str, dict[str, bytes]]:
        """Return party → the bytes of its release, by party, of all that are to be merged.

        Raises:
            ReleaseRefused: corrupted, when the bytes are no longer those that were accepted.
        """
        return {party: self._files(party, digest) for party, digest in self._to_merge().items()}

    def folders(self) -> dict[str, Path]:
        """Return party → the folder of its release, as `releases` chooses and checks them, one at a time in memory."""
        chosen = self._to_merge()
        for party, digest in chosen.items():
            self._files(party, digest)
        return {party: self._releases / digest for party, digest in chosen.items()}

    def find(self, party: str) -> str | None:
        """Return the hash of one party's release, withdrawn or not, without a look at the others'."""
        path = self._parties / party
        return _content(path) if PARTY_NAME.fullmatch(party) and path.is_file() else None

    def _hash(self, party: str) -> str:
        digest = self.find(party)
        if digest is None:
            known = ", ".join(self.hashes()) or "no release"
            raise ReleaseRefused("unknown-party", f"{party!r} has no release here", f"the spool holds {known}")
        return digest

    def _to_merge(self) -> dict[str, str]:
        withdrawn = self.withdrawn()
        return {party: digest for party, digest in self.hashes().items() if party not in withdrawn}

    def _files(self, party: str, digest: str) -> dict[str, bytes]:
        folder = self._releases / digest
        try:
            files = {path.name: read_file(path, MAX_FOLDER_BYTES) for path in sorted(folder.iterdir())}
        except (FileNotFoundError, NotADirectoryError):
            files = {}
        if release_hash(files) != digest:
            raise ReleaseRefused("corrupted", f"{party}: {folder}", "restore the spool, or ask the party to resend")
        return files


def open_spool(folder: Path) -> Spool:
    """Return a spool that exists.

    Raises:
        DpmergeError: DPM-403 if there is none at the folder.
    """
    if not (folder / "parties").is_dir():
        raise DpmergeError("DPM-403", f"{folder} is no spool", "name the folder `spool` of a run or a server")
    return Spool(folder)


def _entries(folder: Path) -> dict[str, str]:
    return {path.name: _content(path) for path in sorted(folder.iterdir()) if path.suffix != ".tmp"}


def _content(path: Path) -> str:
    return read_file(path, MAX_ENTRY_BYTES).decode("ascii", "replace")
