"""What a value from outside may be: exact kinds, exact keys, bounds, and one comparison that tells kinds apart.

Python takes `True`, `1` and `1.0` for one number. In what is signed, hashed or agreed on they are three: a second form
of one release would be a second release. A schema here is data, a kind per key; checking a value against it raises
`Unfit` with the path of the first value that does not fit.

>>> check = record({"schema": exactly(1), "party": text(63), "sizes": list_of(integer(0, 9), most=2)})
>>> check({"schema": 1, "party": "shop", "sizes": [1, 2]}, "manifest")
>>> check({"schema": True, "party": "shop", "sizes": []}, "manifest")  # doctest: +IGNORE_EXCEPTION_DETAIL
Traceback (most recent call last):
    ...
dpmerge.common.untrusted.kinds.Unfit: manifest.schema = True is not 1
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dpmerge.common.printable import shown

Kind = Callable[[Any, str], None]
"""Takes a value and its path, and raises `Unfit` unless the value is of this kind."""

MAX_SHOWN = 60  # characters of a value that does not fit


class Unfit(ValueError):
    """A value is not of the kind that its place wants."""


def same(one: object, other: object) -> bool:
    """Whether two JSON values are equal and of the same kinds throughout.

    >>> same({"r": 2}, {"r": 2}), same({"r": 2}, {"r": 2.0}), same([1], [True]), same((1,), [1])
    (True, False, False, False)
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def exactly(*values: object) -> Kind:
    """One of these values, of the same kind."""
    return _leaf(lambda value: any(same(value, wanted) for wanted in values), " or ".join(map(repr, values)))


def integer(low: int, high: int) -> Kind:
    """An integer in [low, high]; true and 1.0 are none."""
    return _leaf(lambda value: type(value) is int and low <= value <= high, f"an integer in [{low}, {high}]")


def real(low: float, high: float) -> Kind:
    """A number with a decimal point or an exponent in [low, high]; 1 is none."""
    words = f"a number with a decimal point in [{low:g}, {high:g}]"
    return _leaf(lambda value: type(value) is float and low <= value <= high, words)  # NaN compares false


def text(most: int, pattern: re.Pattern[str] | None = None, *, least: int = 1) -> Kind:
    """A text of so many characters that can be printed as it is, or all of which match a pattern."""

    def holds(value: object) -> bool:
        if not isinstance(value, str) or not least <= len(value) <= most:
            return False
        return value.isprintable() if pattern is None else pattern.fullmatch(value) is not None

    words = f"a printable text of {least} to {most} characters" if pattern is None else f"a match of {pattern.pattern}"
    return _leaf(holds, words)


def boolean(value: Any, path: str) -> None:
    """Accept true or false."""
    _require(isinstance(value, bool), value, path, "true or false")


def optional(kind: Kind) -> Kind:
    """Null, or a value of a kind."""

    def check(value: Any, path: str) -> None:
        if value is not None:
            kind(value, path)

    return check


def list_of(kind: Kind, *, most: int, least: int = 0) -> Kind:
    """A list of so many values of one kind."""

    def check(value: Any, path: str) -> None:
        fits = isinstance(value, list) and least <= len(value) <= most
        _require(fits, value, path, f"a list of {least} to {most}")
        for place, item in enumerate(value):
            kind(item, f"{path}[{place}]")

    return check


def table_of(key: Kind, kind: Kind, *, most: int) -> Kind:
    """An object with at most so many keys, whose keys are of one kind and whose values are of another."""

    def check(value: Any, path: str) -> None:
        _require(isinstance(value, Mapping) and len(value) <= most, value, path, f"an object of at most {most} keys")
        for name, item in value.items():
            key(name, f"a key of {path}")
            kind(item, f"{path}.{name}")

    return check


def record(kinds: Mapping[str, Kind], maybe: Mapping[str, Kind] | None = None) -> Kind:
    """An object with exactly these keys; those of `maybe` may be absent."""
    known = {**kinds, **(maybe or {})}

    def check(value: Any, path: str) -> None:
        _require(isinstance(value, Mapping), value, path, "an object")
        check_keys(value, path, kinds, known)
        for name, item in value.items():
            known[name](item, f"{path}.{name}")

    return check


def check_keys(value: Mapping[str, Any], path: str, wanted: Collection[str], known: Collection[str]) -> None:
    """Refuse an object that lacks a wanted key, or has one that is not known.

    Raises:
        Unfit: Naming all of them.
    """
    if missing := sorted(set(wanted) - value.keys()):
        raise Unfit(f"{path} lacks {', '.join(missing)}")
    if unknown := sorted(value.keys() - set(known)):
        raise Unfit(f"{path} has unknown keys: {', '.join(shown(repr(key), MAX_SHOWN) for key in unknown)}")


def plain(*, most: int, depth: int, longest: int) -> Kind:
    """Any JSON value of at most so many parts, so many levels, and texts of such a length."""

    def count(value: Any, path: str, left: int) -> int:
        _require(left > 0, value, path, f"nested at most {depth} deep")
        if isinstance(value, str):
            _require(len(value) <= longest, value, path, f"a text of at most {longest} characters")
        parts = 1
        children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        for item in children:
            parts += count(item, path, left - 1)
            _require(parts <= most, value, path, f"made of at most {most} values")
        return parts

    def check(value: Any, path: str) -> None:
        count(value, path, depth)

    return check


def _leaf(holds: Callable[[object], bool], words: str) -> Kind:
    def check(value: Any, path: str) -> None:
        _require(holds(value), value, path, words)

    return check


def _require(holds: bool, value: object, path: str, words: str) -> None:
    if not holds:
        raise Unfit(f"{path} = {brief(value)} is not {words}")


def brief(value: object) -> str:
    """Return a value in a few words, however large it is.

    >>> brief(True), brief("x" * 99)[-3:], brief([0] * 10**6)
    ('True', 'xx…', 'a list of 1000000')
    """
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    return shown(repr(value[: MAX_SHOWN + 1] if isinstance(value, str) else value), MAX_SHOWN)
