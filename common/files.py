"""Writing a file in one step: whoever looks finds the old content or the new, whatever happens in between."""

import os
from pathlib import Path

from dpmerge.common.errors import DpmergeError


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
        with os.fdopen(descriptor, "wb") as file:
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


def temporary_of(path: Path) -> Path:
    """Return where `replace_file` writes before it renames; a killed process may leave a file there."""
    return path.with_name(f"{path.name}.tmp")


def real_folder(path: Path, *, mode: int = 0o777) -> Path:
    """Make a folder if need be, and return it; a link in its place is refused, as others may have laid it.

    Raises:
        DpmergeError: DPM-301.
    """
    if not path.is_symlink():
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    if path.is_symlink():  # also one that came in between
        raise DpmergeError("DPM-301", f"{path} is a link", "put a folder there; nothing is written through links")
    return path


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
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place_of(path: str | Path) -> Path:
    """Return the file or folder that a data path names, whatever its ::split, with links resolved."""
    return Path(str(path).partition("::")[0]).resolve()


def is_within(one: Path, other: Path) -> bool:
    """Whether two resolved paths are the same, or either lies in the other.

    >>> data, part, else_where = Path("/data"), Path("/data/a"), Path("/b")
    >>> is_within(part, data), is_within(data, part), is_within(data, else_where)
    (True, True, False)
    """
    return one.is_relative_to(other) or other.is_relative_to(one)
