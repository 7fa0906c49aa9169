"""Records of a party's own: a CSV, TSV, JSON or Parquet file, or a data-set folder.

Nothing that leaves a party may depend on a single record, so each is read by itself, and one that cannot be used (its
text is empty, its label is not declared, its line is broken) is left out in silence, never its neighbours. What became
of the records is told to their owner only, in a `ReadReport`.

What one record is:

    .csv, .tsv          a line below the header; a quoted field cannot span lines
    .jsonl, .ndjson     a line
    .json               an element of the array (`FILE.json::lines` and `FILE.json::columns`: see `json_records.py`)
    .parquet, a saved data set    a row
    a folder            whatever its files hold

Columns are those that the format's schema declares (header line, Parquet schema, features of a data set). One that is
missing there is refused before any record is read. Where a format declares none, as JSON, a record without the column
is an unusable record.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpmerge.common.data.data_path import data_path
from dpmerge.common.data.tabular import rows as of
from dpmerge.common.data.tabular.cells import Labels, is_scalar, owner_of
from dpmerge.common.data.tabular.lines import lines
from dpmerge.common.data.tabular.places import tables
from dpmerge.common.data.tabular.rows import MAX_RECORDS_PER_USER, ReadReport, Row, Tally
from dpmerge.common.errors import DpmergeError


@dataclass(frozen=True)
class Records:
    """Texts and their classes, row by row.

    Attributes:
        texts: The texts.
        labels: Class `k` is the k-th declared label.
        users: Whose record it is, numbered from 0 in order of appearance; None where users are not told apart.
    """

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    users: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.labels):
            raise ValueError(f"Expected {len(self.labels)} texts in Records, one per label, got {len(self.texts)}.")
        if self.users is not None and len(self.users) != len(self.labels):
            raise ValueError(f"Expected {len(self.labels)} users in Records, one per label, got {len(self.users)}.")

    def __len__(self) -> int:
        return len(self.texts)


def read_records(
    path: str | Path, *, text: str, label: str, labels: Mapping[str, str], user: str | None = None
) -> Records:
    """Read labelled texts; see `read_with_report`, of which this is the first half.

    Args:
        path: A file or folder.
        text: Column with the text.
        label: Column with the class.
        labels: Declared label → description.
        user: Column that tells whose record it is, or None.
    """
    return read_with_report(path, text=text, label=label, labels=labels, user=user)[0]


def read_with_report(
    path: str | Path,
    *,
    text: str,
    label: str,
    labels: Mapping[str, str],
    user: str | None = None,
    max_characters: int = of.MAX_RECORD_BYTES,
    max_records_per_user: int = MAX_RECORDS_PER_USER,
) -> tuple[Records, ReadReport]:
    """Read labelled texts from a party's own file or folder, without any use of the network.

    Args:
        path: A file or folder of the kinds above; `folder::split` names a split, in place of `train` or the only one.
        text: Name of the column with the text.
        label: Name of the column with the class.
        labels: Declared label → description, compared as `Labels` says; the order gives the class indices. There is no
            default: a set of labels read off private records would itself be private.
        user: Name of the column that tells whose record it is, or None. Cells are compared as stripped strings: two
            spellings are two users. A record without a user is unusable.
        max_characters: Texts are cut there.
        max_records_per_user: Of a user's usable records so many are kept, the first in the order of the file.

    Returns:
        The usable records in the order of the file, perhaps none, since whether there is one is private; and what
        became of all of them.

    Raises:
        DpmergeError: DPM-203 if the file cannot be read or its schema lacks a column.

    """
    wanted = {"text": text, "label": label} | ({} if user is None else {"user": user})
    kept = _Kept(user is not None, max_characters, max_records_per_user)
    with _refusals(path):
        for file, table in tables(path, wanted):
            classes = Labels(list(labels), table.class_names.get(label, ()))
            for row in table.rows:
                kept.take(_usable(row, wanted, classes), f"{file}{row.place}")
    return kept.records(), kept.tally.report(len(kept.rows))


class _Kept:
    """The records that are kept, and what became of the others."""

    def __init__(self, has_users: bool, max_characters: int, max_records_per_user: int) -> None:
        self._has_users = has_users
        self._max_characters, self._max_records_per_user = max_characters, max_records_per_user
        self._num_kept = dict[str, int]()
        self.tally = Tally()
        self.rows: list[tuple[str, int, str]] = []

    def take(self, record: tuple[str, int, str] | str, place: str) -> None:
        """Keep a record as far as the bounds allow, or count the reason why it is none.

        Args:
            record: Text, class and user, or the reason why it cannot be used.
            place: Where it stands, for its owner.
        """
        if isinstance(record, str):
            self.tally.drop(record, place)
            return
        content, kind, owner = record
        num_kept = self._num_kept.get(owner, 0)
        if self._has_users and num_kept >= self._max_records_per_user:
            self.tally.drop(of.USER_IS_FULL, place)
            return
        self._num_kept[owner] = num_kept + 1
        self.tally.num_cut += len(content) > self._max_characters
        self.rows.append((content[: self._max_characters], kind, owner))

    def records(self) -> Records:
        """Return what was kept, users numbered."""
        texts, classes, owners = zip(*self.rows, strict=True) if self.rows else ((), (), ())
        if not self._has_users:
            return Records(texts, classes)
        numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
        return Records(texts, classes, tuple(numbers[owner] for owner in owners))


def read_texts(path: str | Path, *, text: str) -> tuple[str, ...]:
    """Read texts without labels: the lines of a `.txt` file, or a column of what `read_records` takes.

    Args:
        path: A file or folder.
        text: Column with the text; a `.txt` file has none.

    Raises:
        DpmergeError: DPM-203 if the file cannot be read, or its schema lacks the column.
    """
    found: Iterator[Any]
    with _refusals(path):
        named = data_path(path)
        if not named.split and named.place.suffix.lower() == ".txt":
            found = (line for _, line in lines(named.place))
        else:
            found = (row.cells.get(text) for _, table in tables(path, {"text": text}) for row in table.rows)
        return tuple(_encodable(line.strip()) for line in found if isinstance(line, str) and line.strip())


def _usable(row: Row, wanted: Mapping[str, str], classes: Labels) -> tuple[str, int, str] | str:
    """Return text, class and user of a record, or the reason why it cannot be used."""
    if row.problem:
        return row.problem
    content, label = row.cells.get(wanted["text"]), row.cells.get(wanted["label"])
    if not isinstance(content, str):
        return of.NO_TEXT
    if not (content := content.strip()):
        return of.EMPTY_TEXT
    if (kind := classes.find(label)) is None:
        return of.UNDECLARED if is_scalar(label) else of.NO_LABEL
    owner = owner_of(row.cells.get(wanted["user"])) if "user" in wanted else ""
    return of.NO_USER if owner is None else (_encodable(content), kind, owner)


def _encodable(text: str) -> str:
    """Put a question mark where a lone surrogate stands, on which a tokenizer would stop."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


@contextmanager
def _refusals(path: str | Path) -> Iterator[None]:
    """Turn failures into refusals that quote nothing."""
    try:
        yield
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror or type(error).__name__}"
        raise DpmergeError("DPM-203", problem, "check the path and the permissions") from None
    except (csv.Error, ValueError, KeyError, TypeError):
        raise DpmergeError("DPM-203", f"{path} is damaged, or not of the kind it seems", "write it anew") from None
    except ImportError as error:
        problem = f"{path} needs the package {error.name}, which is not installed"
        raise DpmergeError("DPM-203", problem, "run pip install 'dpmerge[datasets]'") from None
