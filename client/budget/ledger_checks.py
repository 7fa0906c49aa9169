"""Whether a ledger is the one that a release was signed on top of: verdicts on a cut, a rewrite or a missing charge."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpmerge.client.budget.ledger import Line
from dpmerge.common.statement.statement import is_charge_of
from dpmerge.common.statement.verify import Check


def check_against_head(lines: Sequence[Line], head: str) -> Check:
    """Return whether a head that somebody else kept is still in the chain."""
    for number, line in enumerate(lines, start=1):
        if line.sha256 == head:
            return Check("ledger head", "PASS", f"line {number} of {len(lines)}")
    return Check("ledger head", "FAIL", f"{head[:16]}… is in no line: the ledger was cut or rewritten, or is another")


def check_against_release(
    lines: Sequence[Line], head: str | None, statement: Mapping[str, Any], release_sha256: str
) -> list[Check]:
    """Return whether the ledger holds what a release says of it: head, charge and release.

    Args:
        lines: Of an intact ledger.
        head: From the release's signed manifest; None if it is unsigned, and any reservation may have paid for it.
        statement: The release's privacy statement.
        release_sha256: `release_hash` of its files.
    """
    if head is None:
        checks = [Check("ledger head", "WARN", "an unsigned release knows no head: a cut would not show")]
        number = len(lines)
    else:
        checks = [check_against_head(lines, head)]
        if checks[0].status == "FAIL":
            return checks
        number = [line.sha256 for line in lines].index(head) + 1
    charged = {
        line.entry["reservation"]
        for line in lines[:number]
        if line.entry["kind"] == "reserve" and is_charge_of(line.entry["charge"], statement)
    }
    if not charged:
        detail = "no reservation up to that line charges what the statement says"
        return [*checks, Check("ledger charge", "FAIL", detail)]
    checks.append(Check("ledger charge", "PASS", "a reservation up to that line charges what the statement says"))
    paid = {
        line.entry["reservation"]: line.entry["release"]
        for line in lines
        if line.entry["kind"] == "released" and line.entry["reservation"] in charged
    }
    if release_sha256 in paid.values():
        return [*checks, Check("ledger release", "PASS", "recorded as released")]
    if charged <= paid.keys():  # a reservation pays for one release
        return [*checks, Check("ledger release", "FAIL", "every such reservation paid for another release")]
    return [*checks, Check("ledger release", "WARN", "charged, but not recorded as released")]
