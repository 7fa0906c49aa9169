"""Writing a file in one step: whoever looks finds the old content or the new, whatever happens in between."""

import os
from pathlib import Path


def replace_file(path: Path, data: bytes | str, *, mode: int | None = None, durable: bool = False) -> None:
    """Write a file beside its place, then rename it there; a failure leaves what stood there before.

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
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666 if mode is None else mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)  # a file that an interrupted writer left keeps the rights it had
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


def fsync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
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
