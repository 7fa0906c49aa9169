r"""Rank and alpha patterns: regular expressions that somebody else wrote, matched as PEFT matches them.

Python's engine tries the ways in which a pattern may fit a name one after the other, and a pattern can be made to have
more of them than anybody waits for: here, and again when PEFT opens the adapter. So only forms are taken whose ways can
be counted beforehand:

    q_proj  layers.0.  \.  \d  [0-9]  [^.]     a character of the name each; a dot is any
    .*  \d+  x?                                such a character repeated, greedily or not
    (q|k|v)_proj  (?:up|gate)?                 alternatives, with nothing repeated inside
    ^model  proj$                              the ends of the name

and `|` between whole patterns. Everything else is refused, above all what is repeated as a group: `(a+)+`.

A pattern without repetition or choice, such as a module's name in full, fits texts of one length only. However many of
these there are, they are looked up and not tried one by one.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

MAX_LENGTH = 1024  # of one pattern; every module's name fits, with all its signs escaped
MAX_FORMS = 10_000  # patterns of one adapter that are compiled, a tenth of a millisecond each
MAX_PATTERNS = 200_000  # of one adapter
MAX_TRIES = 3 * 10**7  # for one adapter: a few seconds at worst
LOOK = 10  # what one look at a name costs beside its ways, in tries

_ONE = r"(?:\\[dDwW]|\\[^\w\s]|\[\^?(?:\w-\w|\\[dDwW.-]|[\w.])++\]|[^\\\[\](){}|*+?^$])"
_PART = re.compile(
    rf"(?P<group>\((?:\?:)?+(?:{_ONE}|\|)++\)(?:\?\??+)?+)"
    rf"|(?P<repeated>{_ONE})(?P<times>[*+]\??+)"
    rf"|(?P<maybe>{_ONE}\?\??+)|(?P<or>\|)|{_ONE}|\^|\$"
)
_FIXED = re.compile(r"\^?(?P<text>(?:\\[^\w\s]|[^\\\[\](){}|*+?^$])++)\$?")


class PatternRefused(ValueError):
    """A pattern whose form is not taken, or that fits names in too many ways; says which and why."""


@dataclass(frozen=True)
class _Branch:
    """What stands between two `|`.

    Attributes:
        choices: Ways through its alternatives, a bound.
        repeated: Per repeated character, what finds the runs of a name that it can cover.
    """

    choices: int
    repeated: tuple[re.Pattern[str], ...]

    def ways(self, name: str) -> int:
        """Return a bound on the ways in which it can fit from one place of a name."""
        return self.choices * math.prod(1 + max(map(len, run.findall(name)), default=0) for run in self.repeated)


@dataclass(frozen=True)
class _Pattern:
    whole: re.Pattern[str]
    branches: tuple[_Branch, ...]


@dataclass(frozen=True)
class _Text:
    """A pattern that fits texts of one length only.

    Attributes:
        signs: Its characters.
        free: Places where any character fits.
        whole: Whether it must be the whole name.
    """

    signs: str
    free: tuple[int, ...]
    whole: bool

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
        return [name for name in found if len(name) == len(text.signs)] if text.whole else found


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

    References: `peft.utils.other.get_pattern_key` of PEFT 0.21. Deviations: only the forms above.

    Raises:
        PatternRefused: For another form. `check` also refuses what takes too long.

    >>> [matches(pattern, "layer.0.query") for pattern in ("query", "uery", r"layer\.[01]\..*")]
    [True, False, True]
    """
    return _read(pattern).whole.match(name) is not None


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
        PatternRefused: For a form that is not taken, for too many patterns, or for more than `MAX_TRIES` tries.

    >>> check(["(a+)+b"], ["layer.0.query"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    dpmerge...PatternRefused: '(a+)+b' has '(a+)+b', which is none of the forms that are taken
    """
    texts = {pattern: _fixed(pattern) for pattern in patterns}
    forms = [pattern for pattern, text in texts.items() if text is None]
    if len(patterns) > MAX_PATTERNS or len(forms) > MAX_FORMS:
        raise PatternRefused(f"{len(patterns)} patterns are more than {MAX_PATTERNS}, or {MAX_FORMS} with choices")
    tails = _Tails(names)
    tries = sum(tails.cost(form) for form in {text.form for text in texts.values() if text})
    if tries > MAX_TRIES:
        raise PatternRefused(f"{len(patterns)} patterns may fit the modules' names in too many ways to try them all")
    starts = {name: 1 + name.count(".") for name in names}  # of tails; every way is tried from each
    looks, total = sum(LOOK + len(name) for name in starts), sum(starts.values())
    for pattern in forms:
        tries += looks
        for branch in _read(pattern).branches:
            if branch.repeated:
                tries += sum(count * branch.ways(name) for name, count in starts.items())
            else:
                tries += total * branch.choices
        if tries > MAX_TRIES:
            raise PatternRefused(f"{pattern!r} may fit the modules' names in too many ways to try them all")


@lru_cache(MAX_FORMS)
def _read(pattern: str) -> _Pattern:
    """Take a pattern apart.

    Raises:
        PatternRefused: For a part that has no place here.
    """
    if not 0 < len(pattern) <= MAX_LENGTH:
        raise PatternRefused(f"a pattern of {len(pattern)} characters is not of 1 to {MAX_LENGTH}")
    branches, choices, repeated, at = [], 1, [], 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None:
            raise PatternRefused(f"{pattern!r} has {pattern[at:]!r}, which is none of the forms that are taken")
        at = part.end()
        if part["group"]:
            choices *= 2 + part["group"].count("|")  # one more, should it be optional
        elif part["maybe"]:
            choices *= 2
        elif part["repeated"]:
            repeated.append(part["repeated"])
        elif part["or"]:
            branches.append((choices, repeated))
            choices, repeated = 1, []
    branches.append((choices, repeated))
    try:
        whole = re.compile(rf"(.*\.)?({pattern})$")
        found = (_Branch(count, tuple(re.compile(f"{one}+") for one in parts)) for count, parts in branches)
        return _Pattern(whole, tuple(found))
    except re.error as error:  # such as [z-a]
        raise PatternRefused(f"{pattern!r} is no pattern ({error.msg})") from None
