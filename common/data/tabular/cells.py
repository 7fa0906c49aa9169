"""What a cell says: labels by text or by value, users by text.

Nothing here raises, whatever a cell holds, and nothing takes longer than a constant: long cells are no labels or users.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

MAX_NAME_CHARACTERS = 1024
"""A longer cell is no label and no user: bringing it into normal form could take long."""
_NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d{0,15})?")
_LARGEST = 10**15

Value = tuple[str, float]


class Labels:
    r"""Finds the class that a cell names.

    Cells and declared labels are compared without spaces around them and in Unicode's normal form C, and then by value
    where both are numbers or both are truth values: "1", 1 and 1.0 are one label, as are true and "TRUE".

    >>> labels = Labels(["1", "True", "Café"])
    >>> [labels.find(cell) for cell in (1.0, " 1 ", True, "Cafe\u0301", 10**5000, "2", None)]
    [0, 0, 1, 2, None, None, None]
    """

    def __init__(self, declared: Sequence[str], class_names: Sequence[str] = ()) -> None:
        """Prepare the comparison.

        Args:
            declared: The labels in class order.
            class_names: What a column's whole numbers stand for. They are used if any declared label is among them.
        """
        self._by_text: dict[str, int] = {}
        for position, name in enumerate(declared):
            self._by_text.setdefault(_text(name) or name, position)
        values = [_value(name) for name in declared]
        self._by_value = {value: at for at, value in enumerate(values) if value and values.count(value) == 1}
        names = [_text(name) or name for name in class_names]
        self._names = names if not self._by_text.keys().isdisjoint(names) else []

    def find(self, cell: Any) -> int | None:
        """Return the index of the class, or None."""
        if self._names and isinstance(cell, int) and not isinstance(cell, bool):
            return self._by_text.get(self._names[cell]) if 0 <= cell < len(self._names) else None
        text = _text(cell)
        found = None if text is None else self._by_text.get(text)
        return self._by_value.get(_value(cell) or ("", 0.0)) if found is None else found


def is_scalar(cell: Any) -> bool:
    """Whether a cell holds a text, a number or a truth value that can be written down."""
    return _text(cell) is not None


def owner_of(cell: Any) -> str | None:
    """Return the user that a cell names; None for an empty cell, or one of another type.

    >>> owner_of(" Ann "), owner_of(7), owner_of(7.0), owner_of(float("nan")), owner_of([])
    ('Ann', '7', '7', None, None)
    """
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < _LARGEST:
        cell = int(cell)
    return _text(cell) or None


def _text(cell: Any) -> str | None:
    if isinstance(cell, str):
        text = cell.strip()
        return unicodedata.normalize("NFC", text) if len(text) <= MAX_NAME_CHARACTERS else None
    if isinstance(cell, int):
        return str(cell) if cell.bit_length() <= MAX_NAME_CHARACTERS else None
    if isinstance(cell, float):
        return str(cell) if math.isfinite(cell) else None
    return None


def _value(cell: Any) -> Value | None:
    """Return a cell's value, if it is a number that a float holds, or a truth value."""
    if isinstance(cell, bool):
        return "truth", float(cell)
    if isinstance(cell, (int, float)):
        return ("number", float(cell)) if abs(cell) < _LARGEST else None
    text = _text(cell)
    if text is None:
        return None
    if text.lower() in ("true", "false"):
        return "truth", float(text.lower() == "true")
    return ("number", float(text)) if _NUMBER.fullmatch(text) else None
