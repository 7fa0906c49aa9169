"""Files as lines or chunks of bytes, in memory that no line can exceed; every line is decoded by itself.

Encodings: a byte order mark at the head of the file (UTF-8, UTF-16, UTF-32) decides for the file. Without one each line
is UTF-8 or, where it is not valid UTF-8, cp1252. No detector looks at the whole: one record must not change how others
are read. A line ends with LF, CR LF or CR.
"""

import codecs
from collections.abc import Iterator
from pathlib import Path

from dpmerge.common.data.tabular.rows import MAX_RECORD_BYTES
from dpmerge.common.files import open_regular

CHUNK_BYTES = 2**16
_MARKS = (  # that of UTF-32 begins like that of UTF-16, and is looked for first
    (codecs.BOM_UTF8, None),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes without its mark; UTF-16 and UTF-32 come as UTF-8, what is invalid in them replaced."""
    with open_regular(path) as stream:
        start = stream.read(4)
        mark, encoding = next(((mark, name) for mark, name in _MARKS if start.startswith(mark)), (b"", None))
        stream.seek(len(mark))
        if encoding is None:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
            return
        decoder = codecs.getincrementaldecoder(encoding)("replace")
        while chunk := stream.read(CHUNK_BYTES):
            yield decoder.decode(chunk).encode("utf-8", "replace")
        yield decoder.decode(b"", True).encode("utf-8", "replace")


def lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Yield (number from 1, text) of each line that is not blank; None stands for one of too many bytes."""
    for number, line in enumerate(_raw_lines(path), start=1):
        if line is None:
            yield number, None
        elif text := decode(line).strip("\r\n"):
            if not text.isspace():
                yield number, text


def decode(data: bytes | bytearray) -> str:
    """Return a line's text.

    >>> decode("café".encode()) == decode("café".encode("cp1252"))
    True
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def _raw_lines(path: Path) -> Iterator[bytearray | None]:
    held, is_too_long, after_return = bytearray(), False, False
    for chunk in chunks(path):
        rest = chunk[1:] if after_return and chunk.startswith(b"\n") else chunk
        after_return = chunk.endswith(b"\r") or (after_return and not chunk)
        for part in rest.splitlines(keepends=True):
            is_too_long = is_too_long or len(held) + len(part) > MAX_RECORD_BYTES
            if is_too_long:
                held.clear()
            else:
                held += part
            if part.endswith((b"\n", b"\r")):
                yield None if is_too_long else held
                held, is_too_long = bytearray(), False
    if held or is_too_long:
        yield None if is_too_long else held
