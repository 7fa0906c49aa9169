"""Writing a file in one step: whoever looks finds the old content or the new, whatever happens in between."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from dpmerge.common.errors import DpmergeError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""What an `OSError` says of storage that takes no more; nothing in a configuration can mend it."""
NO_PLACE = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO}
)
"""What it says of a path that cannot be what is wanted: its rights, its name, what lies there, a disk that fails."""


def replace_file(path: Path, data: bytes | str, *, mode: int | None = None, durable: bool = False) -> None:
    """Write a file beside its place, then rename it there; a failure leaves what stood there before.

    No link is written through, neither at the place, which the rename replaces, nor at the temporary file's.

    One writer at a time: the temporary file is named after the path.

    Args:
        path: In an existing folder.
        data: A text is written in UTF-8.
        mode: Rights of the new file, such as 0o600; None leaves them to the umask.
        durable: Wait until file and folder are on disk, so that not even a power cut brings the old content back.

    Raises:
        OSError: If the file cannot be written.
    """
    temporary = temporary_of(path)
    temporary.unlink(missing_ok=True)  # what an interrupted writer left, or a link that somebody laid there
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666 if mode is None else mode)
    try:
        with naming(path), os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)  # whatever the umask leaves out
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Say which file an `OSError` of the block is about: the system names none when a read or write fails."""
    try:
        yield
    except OSError as problem:
        if problem.errno is not None and problem.filename is None:
            problem.filename = str(path)
        raise


def storage_refusal(problem: OSError) -> DpmergeError:
    """Return what to tell the person whose storage is full, or whose path is of no use: which, and how to go on.

    >>> storage_refusal(OSError(errno.ENOSPC, "No space left on device", "runs/a/log.txt")).problem
    'runs/a/log.txt cannot be written: No space left on device'
    """
    file = problem.filename or "a file"
    if problem.errno in NO_PLACE:
        fix = "check the path, what lies there, and its rights"
        return DpmergeError("DPM-305", f"{file} cannot be used: {problem.strerror}", fix)
    fix = "make room, then run it again (simulate: with --resume, which repeats nothing that is finished)"
    return DpmergeError("DPM-305", f"{file} cannot be written: {problem.strerror}", fix)


def temporary_of(path: Path) -> Path:
    """Return where `replace_file` writes before it renames; a killed process may leave a file there."""
    return path.with_name(f"{path.name}.tmp")


def make_durable(path: Path) -> None:
    """Wait until a file, or a folder with the files in it, is on disk under its name.

    For whatever was written by somebody else, who may have died before it was on disk.
    """
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.is_file():
                _fsync(file)
    _fsync(path)
    _fsync(path.parent)


def make_folder(folder: Path, *, mode: int = 0o777) -> None:
    """Make a folder and those that lead to it, if they are missing, and wait until their names are on disk.

    What is written durably into a folder is lost all the same if a power cut takes the folder away.

    Args:
        folder: May exist.
        mode: Rights of the last one, less the umask.

    Raises:
        OSError: If it cannot be made.
    """
    missing = [place for place in (folder, *folder.parents) if not place.is_dir()]
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except FileNotFoundError:  # although its parents are there: /proc, say
        raise PermissionError(errno.EPERM, "no folder can be made there", str(folder)) from None
    for place in reversed(missing):
        fsync_folder(place.parent)


def real_folder(path: Path, *, mode: int = 0o777) -> Path:
    """Make a folder if need be, durably, and return it; a link in its place is refused, as others may have laid it.

    Raises:
        DpmergeError: DPM-301.
    """
    if not path.is_symlink():
        make_folder(path, mode=mode)
    if path.is_symlink():  # also one that came in between
        raise DpmergeError("DPM-301", f"{path} is a link", "put a folder there; nothing is written through links")
    return path


class NotRegular(OSError):
    """What is opened is a folder, a pipe, a device: nothing that has bytes and an end."""


def open_regular(path: Path, *, links: bool = True) -> FileIO:
    """Open a regular file to read its bytes, unbuffered; on a pipe one could wait for ever.

    Args:
        path: The file.
        links: Follow a link at the file's own place; what it leads to is held to the same.

    Raises:
        NotRegular: If it is no regular file.
        OSError: If it cannot be opened; ELOOP for a link that is not followed.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return FileIO(descriptor)
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise NotRegular(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotRegular(errno.EINVAL, "it is no regular file", str(path))


def append_file(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Append to a file of one's own, made if need be; a link in its place is not followed.

    Raises:
        OSError: If it is a link, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def fsync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_within(one: Path, other: Path) -> bool:
    """Whether two resolved paths are the same, or either lies in the other.

    >>> data, part, else_where = Path("/data"), Path("/data/a"), Path("/b")
    >>> is_within(part, data), is_within(data, part), is_within(data, else_where)
    (True, True, False)
    """
    return one.is_relative_to(other) or other.is_relative_to(one)
