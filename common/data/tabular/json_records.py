"""JSON: Lines, arrays, and the columns of `pandas.to_json`.

Which of the three a file is, is told by its name, never by its bytes, since its first record would decide for all:

    .jsonl, .ndjson, FILE.json::lines      a line is one record
    .json                                  an element of the array is one record
    FILE.json::columns                     {"body": {"0": …}, "stars": {"0": …}}: a key such as "0" is one record

Arrays and columns are cut into values by a scanner that knows strings and brackets only, in one pass and without
recursion. Each value is then parsed alone: a number of 5,000 digits, deep nesting or a NaN spoil their own record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dpmerge.common.data.tabular.lines import chunks, decode, lines
from dpmerge.common.data.tabular.rows import MAX_RECORD_BYTES, NOT_A_RECORD, NOT_AN_ARRAY, TOO_LONG, Row, Table

LINES, COLUMNS = "lines", "columns"
_OUTSIDE = re.compile(rb'["\[\]{},:]')
_DEEP = re.compile(rb'"|[\[{]+|[\]}]+')
_IN_STRING = re.compile(rb'"|\\.?', re.DOTALL)
_BROKEN = object()


def read_json_lines(path: Path) -> Table:
    """Read one object per line."""
    return Table((_row(f"line {number}", line) for number, line in lines(path)), None)


def read_json_array(path: Path) -> Table:
    """Read the elements of an array, those that are objects."""
    return Table(_elements(path), None)


def read_json_columns(path: Path, wanted: Iterable[str]) -> Table:
    """Read an object of columns, each an object of cells by the key of their row.

    Args:
        path: The file.
        wanted: Names of the columns to read.
    """
    return Table(_joined(path, tuple(wanted)), None)


def _row(place: str, value: str | bytes | None) -> Row:
    if value is None:
        return Row(place, problem=TOO_LONG)
    parsed = _parse(value)
    return Row(place, parsed) if isinstance(parsed, dict) else Row(place, problem=NOT_A_RECORD)


def _parse(value: str | bytes) -> Any:
    """Return what one value says, or `_BROKEN`."""
    try:
        return json.loads(decode(value) if isinstance(value, bytes) else value, strict=False)
    except (ValueError, RecursionError):
        return _BROKEN


def _elements(path: Path) -> Iterator[Row]:
    number, is_open = 1, False
    for depth, mark, before in _scan(chunks(path), 1):
        if not is_open:
            is_open = mark == b"[" and depth == 1 and before is not None and not before.strip()
            if not is_open:
                break
        elif mark in b",]" and (before is None or before.strip()):
            yield _row(f"element {number}", before)
            number += 1
        if depth == 0:
            return  # the array is closed
    if not is_open:
        yield Row("element 1", problem=NOT_AN_ARRAY)


def _joined(path: Path, wanted: tuple[str, ...]) -> Iterator[Row]:
    """Collect the cells of the wanted columns by their keys; of a key that is there twice the first cell counts."""
    rows: dict[str, dict[str, Any]] = {}
    column: Any = None
    key: Any = None
    for depth, mark, before in _scan(chunks(path), 2):
        if mark == b":" and before is not None:
            name = _parse(before)
            column, key = (name, None) if depth == 1 else (column, name)
        elif mark in b",}" and key is not None and isinstance(key, str) and column in wanted:
            cell = _BROKEN if before is None else _parse(before)
            rows.setdefault(key, {}).setdefault(column, cell)
            key = None
    for key, cells in rows.items():
        broken = any(cell is _BROKEN for cell in cells.values())
        yield Row(f"key {key[:40]!r}", problem=NOT_A_RECORD) if broken else Row(f"key {key[:40]!r}", cells)


class _Held:
    """Bytes of one value, so many and no more."""

    def __init__(self) -> None:
        self._bytes, self._is_too_long = bytearray(), False

    def add(self, part: bytes) -> None:
        """Hold more bytes; too many are not held at all."""
        self._is_too_long = self._is_too_long or len(self._bytes) + len(part) > MAX_RECORD_BYTES
        if self._is_too_long:
            self._bytes.clear()
        else:
            self._bytes.extend(part)

    def take(self) -> bytes | None:
        """Return what is held, None for too many bytes, and begin anew."""
        held = None if self._is_too_long else bytes(self._bytes)
        self._bytes.clear()
        self._is_too_long = False
        return held


def _scan(pieces: Iterable[bytes], deepest: int) -> Iterator[tuple[int, bytes, bytes | None]]:
    """Yield the marks `[ ] { } , :` outside strings that are at most `deepest` brackets deep.

    Each comes as (depth after it, mark, bytes since the mark before it, deeper ones included); None stands for too many
    bytes. At depth 1 only the kind of bracket that was opened closes. The end of the file comes as an empty mark.
    """
    held = _Held()
    depth, in_string, is_escaped, outermost = 0, False, False, b""
    for piece in pieces:
        start, position = 0, 1 if is_escaped and piece else 0
        is_escaped = is_escaped and not piece
        while match := (_IN_STRING if in_string else _DEEP if depth > deepest else _OUTSIDE).search(piece, position):
            mark, position = match[0], match.end()
            if mark[:1] == b"\\":
                is_escaped = len(mark) == 1
                continue
            if mark == b'"':
                in_string = not in_string
                continue
            if depth > deepest:  # a run of brackets
                up, down = len(mark), min(len(mark), depth - deepest)
                depth, position = (depth + up, position) if mark[:1] in b"[{" else (depth - down, match.start() + down)
                continue
            before = depth
            if mark in b"[{":
                outermost = outermost or mark
                depth += 1
            elif mark in b"]}":
                if depth == 0 or (depth == 1 and mark != (b"]" if outermost == b"[" else b"}")):
                    continue  # closes nothing: part of a broken value
                depth -= 1
            if max(before, depth) > deepest:
                continue
            held.add(piece[start : match.start()])
            yield depth, mark, held.take()
            start = position
        held.add(piece[start:])
    yield depth, b"", held.take()
