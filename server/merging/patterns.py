r"""Rank and alpha patterns: regular expressions that somebody else wrote, matched as PEFT matches them.

Python's engine tries the ways in which a pattern may fit a name one after the other, and a pattern can be made to have
more of them than anybody waits for: here, and again when PEFT opens the adapter. So only forms are taken whose ways can
be counted beforehand:

    q_proj  layers.0.  \.  \d  [0-9]  [^.]     a character of the name each; a dot is any
    .*  \d+  x?                                such a character repeated, greedily or not
    (q|k|v)_proj  (?:up|gate)?                 alternatives, with nothing repeated inside
    ^model  proj$                              the ends of the name

and `|` between whole patterns. Everything else is refused, above all what is repeated as a group: `(a+)+`.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

MAX_LENGTH = 256  # of one pattern; exact names of modules are half as long
MAX_PATTERNS = 10_000  # of one adapter; a compilation takes a tenth of a millisecond
MAX_TRIES = 3 * 10**7  # for one adapter: a few seconds at worst
LOOK = 10  # what one look at a name costs beside its ways, in tries

_ONE = r"(?:\\[dDwW]|\\[^\w\s]|\[\^?(?:\w-\w|\\[dDwW.-]|[\w.])++\]|[^\\\[\](){}|*+?^$])"
_PART = re.compile(
    rf"(?P<group>\((?:\?:)?+(?:{_ONE}|\|)++\)(?:\?\??+)?+)"
    rf"|(?P<repeated>{_ONE})(?P<times>[*+]\??+)"
    rf"|(?P<maybe>{_ONE}\?\??+)|(?P<or>\|)|{_ONE}|\^|\$"
)


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


def matches(pattern: str, name: str) -> bool:
    r"""Tell whether a pattern matches a module as in PEFT: a whole tail of its dotted name.

    References: `peft.utils.other.get_pattern_key` of PEFT 0.21. Deviations: only the forms above.

    Raises:
        PatternRefused: For another form. `check` also refuses what takes too long.

    >>> [matches(pattern, "layer.0.query") for pattern in ("query", "uery", r"layer\.[01]\..*")]
    [True, False, True]
    """
    return _read(pattern).whole.match(name) is not None


def check(patterns: Collection[str], names: Collection[str]) -> None:
    """Refuse patterns before any of them is matched against names.

    Args:
        patterns: Whoever wrote them.
        names: All modules that they will be matched against.

    Raises:
        PatternRefused: For a form that is not taken, for too many patterns, or for more than `MAX_TRIES` tries.

    >>> check(["(a+)+b"], ["layer.0.query"])
    Traceback (most recent call last):
        ...
    dpmerge.server.merging.patterns.PatternRefused: '(a+)+b' has '(a+)+b', which is none of the forms that are taken
    """
    if len(patterns) > MAX_PATTERNS:
        raise PatternRefused(f"{len(patterns)} patterns are more than {MAX_PATTERNS}")
    starts = {name: 1 + name.count(".") for name in names}  # of tails; every way is tried from each
    looks, total, tries = sum(LOOK + len(name) for name in starts), sum(starts.values()), 0
    for pattern in patterns:
        tries += looks
        for branch in _read(pattern).branches:
            if branch.repeated:
                tries += sum(count * branch.ways(name) for name, count in starts.items())
            else:
                tries += total * branch.choices
        if tries > MAX_TRIES:
            raise PatternRefused(f"{pattern!r} may fit the modules' names in too many ways to try them all")


@lru_cache(MAX_PATTERNS)
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
