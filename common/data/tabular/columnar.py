"""Parquet files and data sets that `datasets` saved: a row is one record.

Only the columns that are asked for are read, and their cells are decoded one by one: bytes that are not UTF-8 spoil
their own row, a date out of range in another column spoils none. A column whose declared type is no text, number or
truth value gives no usable cell. Memory is bounded by what the format itself keeps together, a page or a batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpmerge.common.data.tabular.rows import MAX_RECORD_BYTES, TOO_LONG, Row, Table

ROWS_AT_ONCE = 512


def read_parquet(path: Path, wanted: Iterable[str]) -> Table:
    """Read the wanted columns of a Parquet file.

    Args:
        path: The file.
        wanted: Names of the columns to read.
    """
    from pyarrow import parquet  # type: ignore[import-untyped]  # has no stubs

    file = parquet.ParquetFile(path)
    columns = tuple(file.schema_arrow.names)
    readable = [name for name in dict.fromkeys(wanted) if columns.count(name) == 1]
    batches = file.iter_batches(batch_size=ROWS_AT_ONCE, columns=readable)
    return Table(_rows(batches, readable), columns, _stored_names(file.schema_arrow.metadata or {}))


def read_saved(data: Any, wanted: Iterable[str]) -> Table:
    """Read the wanted columns of a `datasets.Dataset`.

    Args:
        data: One split of a saved data set.
        wanted: Names of the columns to read.
    """
    columns = tuple(data.column_names)
    readable = [name for name in dict.fromkeys(wanted) if name in columns]
    names = {key: getattr(data.features[key], "names", None) for key in readable}
    batches = data.select_columns(readable).with_format("arrow").iter(batch_size=ROWS_AT_ONCE) if readable else ()
    return Table(_rows(batches, readable), columns, {key: tuple(classes) for key, classes in names.items() if classes})


def _rows(batches: Iterable[Any], columns: list[str]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        decoded = [_cells(batch.column(name)) for name in columns]
        for cells in zip(*decoded, strict=True):
            number += 1
            too_long = any(isinstance(cell, bytes) for cell in cells)
            values = dict(zip(columns, cells, strict=True))
            yield Row(f"row {number}", problem=TOO_LONG) if too_long else Row(f"row {number}", values)


def _cells(column: Any) -> list[Any]:
    """Return a column's cells; None for what cannot be decoded, bytes for what is too long."""
    import pyarrow

    is_ = pyarrow.types
    kind = column.type
    if is_.is_dictionary(kind):
        return _cells(column.cast(kind.value_type))
    if is_.is_string(kind) or is_.is_large_string(kind):
        binary = pyarrow.binary() if is_.is_string(kind) else pyarrow.large_binary()
        return [_text(cell) for cell in column.cast(binary).to_pylist()]
    if is_.is_boolean(kind) or is_.is_integer(kind) or is_.is_floating(kind):
        return list(column.to_pylist())
    return [None] * len(column)


def _text(cell: bytes | None) -> str | bytes | None:
    if cell is None or len(cell) > MAX_RECORD_BYTES:
        return cell
    try:
        return cell.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _stored_names(metadata: Mapping[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Return the class names that `datasets` wrote into a Parquet file's schema, if it did."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return {key: tuple(map(str, about["names"])) for key, about in features.items() if "names" in about}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
