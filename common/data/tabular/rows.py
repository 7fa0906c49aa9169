"""Rows, tables and the account of what became of them; the public bounds on one record."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpmerge.common.errors import DpmergeError, closest

MAX_RECORD_BYTES = 2**20
"""A longer line, array element or cell is dropped; text files are read without holding it in memory."""
CHARACTERS_PER_TOKEN = 64
"""Characters looked at for each token that is kept; a token of prose has four to six, one of digits or code fewer."""
MIN_CHARACTERS = 4096
"""At least so many characters of a text are looked at, however few tokens are kept."""
MAX_RECORDS_PER_USER = 64
"""Records kept of one user, the first in the order of the file, unless the configuration says otherwise."""
MOST_RECORDS_PER_USER = 4096
"""What a configuration may say: the work for one user is bounded, whoever writes it."""

NOT_A_RECORD = "not a record of this format"
TOO_LONG = f"longer than {MAX_RECORD_BYTES} bytes"
TOO_MANY_FIELDS = "more fields than the header, or a quote that is not closed on its line"
NO_TEXT = "no text, or a text of another type"
EMPTY_TEXT = "empty text"
NO_LABEL = "no label, or a label of another type"
UNDECLARED = "label not among the declared ones"
NO_USER = "no user, or a user of another type"
USER_IS_FULL = "beyond the number of records that are kept of one user"
NOT_AN_ARRAY = "the file is no JSON array (JSON Lines: FILE.json::lines; columns of pandas.to_json: FILE.json::columns)"


def max_characters(max_length: int) -> int:
    """Return how many characters of a text are looked at where `max_length` tokens are kept.

    A public function of a public setting. A text is cut there before it is tokenized, so that no text costs more.

    >>> max_characters(32), max_characters(512), max_characters(32_768)
    (4096, 32768, 1048576)
    """
    return min(MAX_RECORD_BYTES, max(MIN_CHARACTERS, CHARACTERS_PER_TOKEN * max_length))


@dataclass(frozen=True)
class Row:
    """One record as the format has it.

    Attributes:
        place: Where it stands, for its owner's eyes: "line 7".
        cells: Column → value; of JSON whatever a line holds, of other formats the columns that were asked for.
        problem: Why it cannot be used at all; empty if that is for its cells to say.
    """

    place: str
    cells: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Table:
    """One file's rows, read once, as they are asked for.

    Attributes:
        rows: In the order of the file.
        columns: As the format's schema declares them; None where it declares none.
        class_names: By column, the names that its whole numbers stand for.
    """

    rows: Iterator[Row]
    columns: tuple[str, ...] | None
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Records left out for one reason: how many, and where the first of them stands."""

    reason: str
    count: int
    first: str


@dataclass(frozen=True, kw_only=True)
class ReadReport:
    """What became of a party's records. It is the owner's: no part of a release, a reply or a shared log.

    Attributes:
        num_used: Records that are trained on.
        num_cut: Of these, how many were longer than `max_characters`.
        dropped: Those left out, the most frequent reason first.
    """

    num_used: int
    num_cut: int = 0
    dropped: tuple[Dropped, ...] = ()

    @property
    def num_dropped(self) -> int:
        """How many were left out."""
        return sum(drop.count for drop in self.dropped)

    def lines(self) -> list[str]:
        """Return the table in words, a line per reason.

        >>> print(*ReadReport(num_used=3, dropped=(Dropped(reason=EMPTY_TEXT, count=2, first="line 4"),)).lines())
        records: 3 used, 2 dropped   2 x empty text (first: line 4)
        """
        head = f"records: {self.num_used} used, {self.num_dropped} dropped"
        if self.num_cut:
            head += f"; {self.num_cut} of the used ones are cut"
        return [head, *(f"  {reason}" for reason in self.reasons())]

    def reasons(self) -> tuple[str, ...]:
        """Return count, reason and first place of those left out, a text per reason."""
        return tuple(f"{drop.count} x {drop.reason} (first: {drop.first})" for drop in self.dropped)


class Tally:
    """Counts what becomes of records, reason by reason."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}
        self.num_cut = 0

    def drop(self, reason: str, place: str) -> None:
        """Note that a record is left out.

        Args:
            reason: Why the record cannot be used.
            place: Where it stands.
        """
        self._first.setdefault(reason, place)
        self._counts[reason] = self._counts.get(reason, 0) + 1

    def report(self, num_used: int) -> ReadReport:
        """Return the account."""
        reasons = sorted(self._counts, key=lambda reason: -self._counts[reason])
        dropped = [Dropped(reason=name, count=self._counts[name], first=self._first[name]) for name in reasons]
        return ReadReport(num_used=num_used, num_cut=self.num_cut, dropped=tuple(dropped))


def check_columns(path: object, wanted: Mapping[str, str], columns: tuple[str, ...] | None) -> None:
    """Hold the wanted columns against a declared schema, and never against records.

    Args:
        path: What a refusal names.
        wanted: Setting → column, such as {"text": "body"}.
        columns: The schema's; None where the format has none, and an absent column means rows without that cell.

    Raises:
        DpmergeError: DPM-203 for a column that is missing, or there twice.
    """
    if columns is None:
        return
    for key, name in wanted.items():
        if columns.count(name) > 1:
            fix = "rename one of them: which one is meant cannot be told"
            raise DpmergeError("DPM-203", f"{path} has more than one column {name!r}", fix)
        if name not in columns:
            known = list(dict.fromkeys(columns))
            fix = (
                f"set {key} to one of {_some(known)}{closest(name, known)}" if known else "begin it with a header line"
            )
            if any("\0" in column for column in known):
                fix = "save it as UTF-8: it looks like UTF-16 without a byte order mark"
            raise DpmergeError("DPM-203", f"{path} has no column {name!r}", fix)


def _some(columns: list[str]) -> str:
    """List column names, the first twenty at most."""
    return ", ".join(map(repr, columns[:20])) + (" …" if len(columns) > 20 else "")
