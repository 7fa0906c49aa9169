"""CSV and TSV: the first line that is not blank is the header, and every other line is one record.

A quoted field cannot span lines: a quote that is not closed spoils its own line at most. The separator is told by the
header alone: the one that a `sep=;` line before it names, as Excel writes, or else the one of comma, semicolon, tab and
`|` that makes the most of the header. A line is parsed with doubled quotes; if that fails or gives too many fields,
with quotes escaped by backslash; if that fails too, with quotes that mean nothing.
"""

import csv
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpmerge.common.data.tabular.lines import lines
from dpmerge.common.data.tabular.rows import MAX_RECORD_BYTES, TOO_LONG, TOO_MANY_FIELDS, Row, Table

DELIMITERS = ",;\t|"
_SEPARATOR_LINE = re.compile(r"\s*sep=(.)\s*", re.IGNORECASE)
_STYLES: tuple[dict[str, Any], ...] = (
    {"doublequote": True, "strict": True},
    {"doublequote": False, "escapechar": "\\", "strict": True},
    {"quoting": csv.QUOTE_NONE, "quotechar": None},
)


def read_delimited(path: Path) -> Table:
    """Read a file with a header line."""
    found = lines(path)
    _, header = next(found, (0, ""))
    separator = _SEPARATOR_LINE.fullmatch(header or "")
    if separator is not None:
        _, header = next(found, (0, ""))
    header, marks = header or "", separator[1] if separator else DELIMITERS
    with _long_fields():
        delimiter = max(marks, key=lambda mark: len(_fields(header, mark, None) or []))
        columns = tuple(name.strip() for name in _fields(header, delimiter, None) or [])
    return Table(_rows(found, columns, delimiter), columns)


def _rows(found: Iterator[tuple[int, str | None]], columns: tuple[str, ...], delimiter: str) -> Iterator[Row]:
    with _long_fields():
        for number, line in found:
            fields = None if line is None else _fields(line, delimiter, len(columns))
            if fields is None:
                yield Row(f"line {number}", problem=TOO_LONG if line is None else TOO_MANY_FIELDS)
            else:
                yield Row(f"line {number}", dict(zip(columns, fields, strict=False)))


def _fields(line: str, delimiter: str, width: int | None) -> list[str] | None:
    r"""Return a line's fields, at most `width` of them, by the first style that gives that; None if none does.

    >>> _fields(r'"a \"b\"",5', ",", 2), _fields('"a b,5', ",", 2), _fields("a,b,5", ",", 2)
    (['a "b"', '5'], ['"a b', '5'], None)
    """
    for style in _STYLES:
        if "escapechar" in style and '\\"' not in line:
            continue  # what it would take for a quote, nobody has escaped
        try:
            fields = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True, **style), [])
        except csv.Error:
            continue
        if width is None or not any(field.strip() for field in fields[width:]):
            return fields[:width]
    return None


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let the csv module take fields as long as a record may be: by default it refuses 131,072 characters."""
    previous = csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(previous)
