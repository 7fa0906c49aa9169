"""The words of a report: numbers as people read them, and the sentences beside them."""

from dpmerge.common.printable import MAX_TEXT, shown
from dpmerge.common.statement.statement import READING
from dpmerge.simulations.reporting.results import PartyResult, Results

MISSING = "–"


def epsilon(party: PartyResult) -> str:
    """The party's ε, or the marker that there is none."""
    if not party.private:
        return "not private"
    return MISSING if party.epsilon is None else f"{party.epsilon:.4g}"


def percent(value: float | None, error: float | None) -> str:
    """A share as percent with its standard error.

    Args:
        value: A share, or None.
        error: Its standard error, or None.

    >>> percent(0.8123, 0.0148), percent(None, None)
    ('81.2 ±1.5', '–')
    """
    if value is None:
        return MISSING
    return f"{100 * value:.1f}" + ("" if error is None else f" ±{100 * error:.1f}")


def points(value: float | None) -> str:
    """A difference in points, always signed.

    >>> points(2.04), points(-0.3)
    ('+2.0', '−0.3')
    """
    return MISSING if value is None else f"{value:+.1f}".replace("-", "−")


def closing_lines(results: Results) -> list[str]:
    """What has to be said beside the numbers: who is missing, regressions, each release's privacy in a sentence."""
    lines = [f"NOTHING WAS MERGED: {results.not_merged}; go on with --resume"] if results.not_merged else []
    lines += [f"{party.party} {party.status}: {party.reason}" for party in results.absent]
    lines += [
        f"{name}: merging made this task worse than the base model, by more than two standard errors"
        for name in results.regressions
    ]
    for party in results.parties:
        lines += [f"{party.party}: not used: {reason}" for reason in party.dropped]
    lines += results.warnings
    if any(not party.private for party in results.parties):
        names = ", ".join(party.party for party in results.parties if not party.private)
        lines.append(f"NOT PRIVATE (private = false): {names}")
    claims = [party.sentence for party in results.parties if party.sentence]
    return [shown(line, MAX_TEXT) for line in lines + claims] + ([READING] if claims else [])
