"""The one way in which a file of somebody else is opened: no link, no pipe or device, never more than a stated size."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dpmerge.common.errors import DpmergeError

MAX_FOLDER_BYTES = 1 << 30
"""Of the files of one folder that is read into memory; an adapter to be merged is left on disk and may have more."""


@contextmanager
def opened(path: Path, most: int, *, links: bool = False) -> Iterator[BinaryIO]:
    """Open a regular file of at most so many bytes, unbuffered; neither waits for a writer nor follows a link.

    Args:
        path: The file.
        most: Bytes that it may have.
        links: Follow a link at the file's own place, as the cache of the hub has them; what it leads to is held to
            the same.

    Raises:
        DpmergeError: DPM-401 for a link, something that is no regular file, or too many bytes.
        OSError: If it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    except OSError as problem:
        if not links and path.is_symlink():
            raise DpmergeError("DPM-401", f"{path} is a link", "put the file itself there") from None
        raise problem
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise DpmergeError("DPM-401", f"{path} is no regular file", "put a plain file there")
        if about.st_size > most:
            raise DpmergeError("DPM-401", f"{path}: {about.st_size} bytes", f"keep it under {most} bytes")
        yield file


def read_file(path: Path, most: int, *, links: bool = False) -> bytes:
    """Return a file's bytes; see `opened`. One that grows meanwhile is refused too."""
    with opened(path, most, links=links) as file:
        parts, left = [], most + 1
        while left and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise DpmergeError("DPM-401", f"{path}: more than {most} bytes", f"keep it under {most} bytes")
    return b"".join(parts)


def names_in(folder: Path, most: int) -> list[str]:
    """Return the sorted names in a folder, at most one more than `most` of them, however many there are."""
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > most:
                break
    return sorted(names)
