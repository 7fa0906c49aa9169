"""The table and the sentences that a run ends with on the terminal."""

from rich import box
from rich.markup import escape as escape_markup
from rich.table import Table

from dpmerge.common.shown import MAX_TEXT, shown
from dpmerge.common.statement import READING
from dpmerge.simulations.results import PartyResult, Results

MISSING = "–"


def escape(text: str) -> str:
    """Return foreign text for a cell of a table: no markup, and nothing that a terminal obeys."""
    return escape_markup(shown(text))


def results_table(results: Results) -> Table:
    """Task, ε, σ, three accuracies in percent with standard errors, and the gap in points; the mean below."""
    title = "REDUCED RUN: not to be quoted" if results.reduced else None
    caption = "accuracy in % ± standard error over test records; gap = own − merged, in points"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("party")
    table.add_column("task")
    for name in ("ε", "σ", "base", "own", "merged", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for party in results.parties:
        table.add_row(*_row(party, len(table.columns)), style=None if party.status == "finished" else "red")
    table.add_section()
    mean, error = results.mean_accuracy, results.mean_accuracy_se
    cells = [percent(getattr(mean, name), getattr(error, name)) for name in ("base", "own", "merged")]
    gap = None if mean.own is None or mean.merged is None else 100 * (mean.own - mean.merged)
    table.add_row(
        "mean", f"{len(results.measured)} of {len(results.parties)}", "", "", *cells, points(gap), style="bold"
    )
    return table


def _row(party: PartyResult, num_columns: int) -> list[str]:
    head = [escape(party.party), escape(party.task), epsilon(party)]
    if party.status != "finished":
        cells = [*head, party.status]
        return cells + [MISSING] * (num_columns - len(cells))
    pairs = [(getattr(party.accuracy, name), getattr(party.accuracy_se, name)) for name in ("base", "own", "merged")]
    noise = MISSING if party.noise_multiplier is None else f"{party.noise_multiplier:.3f}"
    return [*head, noise, *(percent(*pair) for pair in pairs), points(party.gap_points)]


def epsilon(party: PartyResult) -> str:
    """The party's ε, or the marker that there is none."""
    if not party.private:
        return "not private"
    return MISSING if party.epsilon is None else f"{party.epsilon:.4g}"


def percent(value: float | None, error: float | None) -> str:
    """A share as percent with its standard error.

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
