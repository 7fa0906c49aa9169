"""The table that a run ends with on the terminal."""

from rich import box
from rich.markup import escape as escape_markup
from rich.table import Table

from dpmerge.common.printable import shown
from dpmerge.simulations.reporting.results import PartyResult, Results
from dpmerge.simulations.reporting.words import MISSING, epsilon, percent, points


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
