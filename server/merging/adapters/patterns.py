r"""Rank and alpha patterns: regular expressions that somebody else wrote, matched as PEFT matches them.

PEFT matches with Python's engine, which tries the ways in which a pattern may fit a name one after the other, and a
pattern can be made to have more of them than anybody waits for. RE2 (Google's, by `re2`) takes time in proportion to
the pattern's program and the name, and its memory is bounded; so it decides here. What it has no linear way for is
refused: lookaround, backreferences, possessive repetition. So is what the two engines read differently, for the
answer has to be PEFT's:

    (?i) (?P<n>…) (?#…)    flags, names and comments; only (?:…) is taken
    \1  \12                a group's text in Python, a character's number in RE2
    x{,3}                  "at most three" in Python, the signs themselves in RE2
    [[:alpha:]]            signs in Python, letters in RE2
    \d \w \s \b …          among names with letters beyond ASCII, which Python's classes know

A pattern without repetition or choice, such as a module's name in full, fits texts of one length only. However many of
these there are, they are looked up and not tried one by one.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

MAX_LENGTH = 1024  # of one pattern; every module's name fits, with all its signs escaped
MAX_FORMS = 10_000  # patterns of one adapter that are compiled, a fifth of a millisecond each
MAX_PATTERNS = 200_000  # of one adapter
MAX_MEMORY = 1 << 20  # bytes of one compiled pattern
MAX_STEPS = 2 * 10**9  # for one adapter, at 4 ns at worst: some seconds
MAX_LOOKUPS = 3 * 10**7  # of tails, for the patterns of fixed length
LOOK = 2000  # what one look at a name costs beside its signs, in steps

_FIXED = re.compile(r"\^?(?P<text>(?:\\[^\w\s]|[^\\\[\](){}|*+?^$])++)\$?")
_READ_DIFFERENTLY = re.compile(r"\(\?(?!:)|\\[0-9]|\{,|\[:")
_CLASS = re.compile(r"\\[A-Za-z]")
_ESCAPED_SIGN = re.compile(r"\\[^\w]")


class PatternRefused(ValueError):
    """A pattern whose form is not taken, or that fits names in too many ways; says which and why."""


@dataclass(frozen=True)
class _Text:
    """A pattern that fits texts of one length only.

    Attributes:
        signs: Its characters.
        free: Places where any character fits.
        is_whole_name: Whether it must be the whole name, not a tail of it.
    """

    signs: str
    free: tuple[int, ...]
    is_whole_name: bool

    @property
    def form(self) -> tuple[int, tuple[int, ...]]:
        """What patterns share that are looked up in one table."""
        return len(self.signs), self.free


class _Tails:
    """All tails of dotted names, for looking up which of them a fixed text fits."""

    def __init__(self, names: Collection[str]) -> None:
        self._by_length: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for name in names:
            for start in [0, *(index + 1 for index, sign in enumerate(name) if sign == ".")]:
                self._by_length[len(name) - start].append((name[start:], name))
        self._tables: dict[tuple[int, tuple[int, ...]], dict[str, list[str]]] = {}

    def cost(self, form: tuple[int, tuple[int, ...]]) -> int:
        """Return how many tails the first look at a form takes in."""
        return len(self._by_length[form[0]])

    def find(self, text: _Text) -> list[str]:
        """Return the names that a pattern matches."""
        if text.form not in self._tables:
            table = self._tables[text.form] = defaultdict(list)
            for tail, name in self._by_length[len(text.signs)]:
                table[_blanked(tail, text.free)].append(name)
        found = self._tables[text.form].get(text.signs, [])
        return [name for name in found if len(name) == len(text.signs)] if text.is_whole_name else found


def _fixed(pattern: str) -> _Text | None:
    """Take a pattern of fixed length apart; None for any other."""
    found = _FIXED.fullmatch(pattern) if len(pattern) <= MAX_LENGTH else None
    if found is None:
        return None
    places = re.findall(r"\\.|.", found["text"])
    free = tuple(index for index, place in enumerate(places) if place == ".")
    return _Text("".join(place[-1] for place in places), free, pattern.startswith("^"))


def _blanked(text: str, places: tuple[int, ...]) -> str:
    signs = list(text)
    for place in places:
        signs[place] = "."
    return "".join(signs)


def matches(pattern: str, name: str) -> bool:
    r"""Tell whether a pattern matches a module as in PEFT: a whole tail of its dotted name.

    Args:
        pattern: Whoever wrote it.
        name: A module's dotted name, of printable signs.

    References: `peft.utils.other.get_pattern_key` of PEFT 0.21. Deviations: patterns of some forms are refused.

    Raises:
        PatternRefused: For a form that is not taken. `check` also refuses what takes too long.

    >>> [matches(pattern, "layer.0.query") for pattern in ("query", "uery", r"layer\.[01]\..*")]
    [True, False, True]
    """
    if not name.isascii():
        _refuse_classes(pattern)
    return _compiled(pattern).match(name) is not None


def first_matches(patterns: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Return the first pattern that matches each name, for those that any matches.

    As in PEFT, a name that no pattern matches is looked up as it is, so that `w[0]` is found under `w[0]` too.

    Args:
        patterns: Whoever wrote them.
        names: Dotted names of modules.

    Raises:
        PatternRefused: As `check`.

    >>> first_matches(["0.query", "query"], ["layer.0.query", "layer.1.query", "layer.1.key"])
    {'layer.0.query': '0.query', 'layer.1.query': 'query'}
    """
    check(patterns, names)
    tails, found = _Tails(names), dict[str, str]()
    for pattern in patterns:
        text = _fixed(pattern)
        fitting = tails.find(text) if text else [name for name in names if name not in found and matches(pattern, name)]
        for name in fitting:
            found.setdefault(name, pattern)
    known = set(patterns)
    return {name: found.get(name, name) for name in names if name in found or name in known}


def check(patterns: Collection[str], names: Collection[str]) -> None:
    """Refuse patterns before any of them is matched against names.

    Args:
        patterns: Whoever wrote them.
        names: All modules that they will be matched against.

    Raises:
        PatternRefused: For a form that is not taken, for too many patterns, or for more than `MAX_STEPS`.

    >>> check(["(?=a)b"], ["layer.0.query"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    dpmerge...PatternRefused: '(?=a)b' has '(?', which is none of the forms that are taken
    """
    texts = {pattern: _fixed(pattern) for pattern in patterns}
    others = [pattern for pattern, text in texts.items() if text is None]
    if len(patterns) > MAX_PATTERNS or len(others) > MAX_FORMS:
        raise PatternRefused(f"{len(patterns)} patterns are more than {MAX_PATTERNS}, or {MAX_FORMS} with choices")
    tails = _Tails(names)
    lookups = sum(tails.cost(form) for form in {text.form for text in texts.values() if text})
    if lookups > MAX_LOOKUPS:
        raise PatternRefused(f"{len(patterns)} patterns may fit the modules' names in too many ways to try them all")
    looks, signs = LOOK * len(names), sum(map(len, names))
    ascii_only, steps = all(map(str.isascii, names)), 0
    for pattern in others:
        if not ascii_only:
            _refuse_classes(pattern)
        steps += looks + signs * _compiled(pattern).programsize
        if steps > MAX_STEPS:
            raise PatternRefused(f"{pattern!r} may fit the modules' names in too many ways to try them all")


@lru_cache(128)
def _compiled(pattern: str) -> Any:
    """Compile what PEFT makes of a pattern, for RE2.

    Raises:
        PatternRefused: For what RE2 has no linear way for, Python refuses, or the two read differently.
    """
    if not 0 < len(pattern) <= MAX_LENGTH:
        raise PatternRefused(f"a pattern of {len(pattern)} characters is not of 1 to {MAX_LENGTH}")
    if found := _READ_DIFFERENTLY.search(_ESCAPED_SIGN.sub("_", pattern)):
        raise PatternRefused(f"{pattern!r} has {found[0]!r}, which is none of the forms that are taken")
    options = re2.Options()
    options.max_mem, options.log_errors, options.never_capture = MAX_MEMORY, False, True
    in_full = rf"(.*\.)?({pattern})$"
    try:
        compiled = re2.compile(in_full, options)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # of sets inside sets, which Python may read anew one day
            re.compile(in_full)
    except re2.error as error:
        why = error.args[0].decode(errors="replace").partition(":")[0]
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        why = str(error)
    else:
        return compiled
    raise PatternRefused(f"{pattern!r} is none of the forms that are taken ({why})")


def _refuse_classes(pattern: str) -> None:
    if found := _CLASS.search(_ESCAPED_SIGN.sub("_", pattern)):
        raise PatternRefused(f"{pattern!r} has {found[0]!r}, which is not taken among names beyond ASCII")
