"""Accepted releases on disk, named by their content. Merging is a pure function of what lies here.

    releases/<hash>/   the files of one release, as `common/release.py` writes them
    parties/<party>    that hash

A release is complete and on disk before its party's entry appears, and the entry is on disk before `accept` returns. A
crash in between leaves a release that nobody points to; sending it again finishes the job.
"""

from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from dpmerge.common.config_rules import PARTY_NAME
from dpmerge.common.files import replace_file
from dpmerge.common.release import release_hash, write_files
from dpmerge.common.untrusted import ReleaseRefused


class Spool:
    """The releases that a server has accepted, at most one per party.

    Args:
        folder: Made if absent; one server process at a time writes, others wait.
    """

    def __init__(self, folder: Path) -> None:
        self._releases, self._parties = folder / "releases", folder / "parties"
        self._releases.mkdir(parents=True, exist_ok=True)
        self._parties.mkdir(exist_ok=True)
        self._lock = FileLock(folder / ".lock")

    def accept(self, party: str, files: Mapping[str, bytes]) -> str:
        """Store a validated release durably and return its hash; the same release again changes nothing.

        Raises:
            ReleaseRefused: second-release, when the party has another one here; path, for a name that is no party's.
        """
        if not PARTY_NAME.fullmatch(party):
            raise ReleaseRefused("path", f"party {party!r}", f"name parties by {PARTY_NAME.pattern}")
        digest = release_hash(files)
        with self._lock:
            present = self.hashes().get(party)
            if present == digest:
                return digest
            if present is not None:
                problem = f"{party}: sent {digest[:12]} but {present[:12]} was accepted before"
                raise ReleaseRefused("second-release", problem, "a party releases once; send the first bytes again")
            if not (self._releases / digest).exists():
                write_files(self._releases / digest, files)
            replace_file(self._parties / party, digest, durable=True)
        return digest

    def hashes(self) -> dict[str, str]:
        """Return party → hash of its release, by party."""
        return {path.name: path.read_text() for path in sorted(self._parties.iterdir()) if path.suffix != ".tmp"}

    def releases(self) -> dict[str, dict[str, bytes]]:
        """Return party → the bytes of its release, by party.

        Raises:
            ReleaseRefused: corrupted, when the bytes are no longer those that were accepted.
        """
        found = {}
        for party, digest in self.hashes().items():
            folder = self._releases / digest
            files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}
            if release_hash(files) != digest:
                raise ReleaseRefused("corrupted", f"{party}: {folder}", "restore the spool, or ask the party to resend")
            found[party] = files
        return found
