"""The one way in which a file of somebody else is opened: no link, no pipe or device, never more than a stated size."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import NotRegular, naming, open_regular

MAX_FOLDER_BYTES = 1 << 30
"""Of the files of one folder that is read into memory; an adapter to be merged is left on disk and may have more."""


class NoPlainFile(DpmergeError):
    """A DPM-401 for a link, a folder, a pipe, a socket or a device."""

    def __init__(self, path: Path, what: str = "is no regular file") -> None:
        super().__init__("DPM-401", f"{path} {what}", "put the plain file itself there")


class TooLarge(DpmergeError):
    """A DPM-401 for a file of more bytes than are read."""

    def __init__(self, path: Path, size: str, most: int) -> None:
        super().__init__("DPM-401", f"{path}: {size} bytes", f"keep it under {most} bytes")
        self.size = size


@contextmanager
def opened(path: Path, most: int, *, links: bool = False) -> Iterator[FileIO]:
    """Open a regular file of at most so many bytes, unbuffered; neither waits for a writer nor follows a link.

    Args:
        path: The file.
        most: Bytes that it may have.
        links: Follow a link at the file's own place, as the cache of the hub has them; what it leads to is held to
            the same.

    Raises:
        NoPlainFile: For a link, or something that is no regular file.
        TooLarge: For too many bytes.
        OSError: If it cannot be opened.
    """
    try:
        file = open_regular(path, links=links)
    except OSError as problem:
        if not links and path.is_symlink():
            raise NoPlainFile(path, "is a link") from None
        if isinstance(problem, NotRegular) or problem.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise NoPlainFile(path) from None
        raise
    with naming(path), file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise TooLarge(path, str(size), most)
        yield file


def read_file(path: Path, most: int, *, links: bool = False) -> bytes:
    """Return a file's bytes; see `opened`. One that grows meanwhile is refused too."""
    with opened(path, most, links=links) as file:
        parts, left = [], most + 1
        while left and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise TooLarge(path, f"more than {most}", most)
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
