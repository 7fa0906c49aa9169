"""Problems that the person in front of the screen can fix.

Everything that bad input, a missing asset or a refused release can cause is a `DpmergeError`: a stable code, one
sentence, one fix. `docs/errors.md` has a paragraph per code, and a test compares the two. Anything else that escapes
is a defect.
"""

import difflib
from collections.abc import Iterable

from dpmerge.common.printable import MAX_TEXT, shown

CODES = {
    "DPM-101": "configuration cannot be read",
    "DPM-102": "configuration key unknown",
    "DPM-103": "configuration value refused",
    "DPM-104": "unknown task, method or model name",
    "DPM-105": "optional package missing",
    "DPM-201": "asset missing",
    "DPM-202": "asset corrupted",
    "DPM-203": "private data cannot be read",
    "DPM-204": "base model cannot be used",
    "DPM-205": "key cannot be used",
    "DPM-301": "output folder in the way",
    "DPM-302": "resume refused",
    "DPM-303": "results cannot be read",
    "DPM-304": "simulation cannot be started",
    "DPM-305": "files cannot be written",
    "DPM-401": "release refused",
    "DPM-402": "releases cannot be merged",
    "DPM-403": "no release to merge",
    "DPM-404": "receipt refused",
    "DPM-405": "server cannot store now",
    "DPM-501": "privacy target cannot be met",
    "DPM-502": "training cannot be made private",
    "DPM-503": "training moved nothing",
    "DPM-504": "ledger refuses",
    "DPM-505": "subspace cannot be made",
    "DPM-506": "privacy budget exceeded",
    "DPM-507": "site policy refuses",
    "DPM-599": "party failed for a reason kept at the party",
}


class DpmergeError(Exception):
    """A refusal with a stable code, one sentence that names what and where, and one fix.

    Sentence and fix may quote what somebody else wrote: they are made safe to print here, once for all.

    >>> print(DpmergeError("DPM-103", "lora.rank = 0 is not a positive integer", "choose a rank of at least 1"))
    DPM-103: lora.rank = 0 is not a positive integer; choose a rank of at least 1
    """

    def __init__(self, code: str, problem: str, fix: str) -> None:
        if code not in CODES:
            raise ValueError(f"Expected code={code!r} to be one of {sorted(CODES)}.")
        self.code, self.problem, self.fix = code, shown(problem, MAX_TEXT), shown(fix, MAX_TEXT)
        super().__init__(f"{code}: {self.problem}; {self.fix}")

    def __reduce__(self) -> tuple[type["DpmergeError"], tuple[str, str, str]]:
        return DpmergeError, (self.code, self.problem, self.fix)  # survives the trip between Ray's processes


def closest(word: str, candidates: Iterable[str]) -> str:
    """Return a hint that names the nearest candidate, whatever the case of its letters, or nothing.

    >>> closest("rnak", ["alpha", "rank"]), closest("body", ["Body", "stars"]), closest("x", ["alpha"])
    (' (closest: rank)', ' (closest: Body)', '')
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" (closest: {by_lower[near[0]]})" if near else ""
