"""The tables of `dpmerge merge`."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from dpmerge.cli.tables import escape
from dpmerge.server.evaluation.coefficient import Validation
from dpmerge.server.evaluation.explain import Explanation
from dpmerge.server.evaluation.picture import noise_share_words
from dpmerge.server.merging.gate.gate import Entry
from dpmerge.server.merging.methods.recipe import REQUIRED
from dpmerge.server.merging.registry import METHODS
from dpmerge.simulations.reporting.words import MISSING, percent, points

SHOWN_HASH = 8  # characters, enough to compare by eye


def method_rows() -> list[dict[str, Any]]:
    """Describe every merge method: `name`, `summary`, `source`, `needs` and `takes` (parameter → default).

    What it `needs` has no default: a parameter, or "public" texts of every party (`--public`).
    """
    return [
        {
            "name": row.name,
            "summary": row.summary,
            "source": row.source,
            "needs": [key for key, value in row.parameters.items() if value == REQUIRED]
            + ["public"] * bool(row.statistics),
            "takes": {key: value for key, value in row.parameters.items() if value != REQUIRED},
        }
        for row in METHODS.values()
    ]


def methods_table() -> Table:
    """One line per merge method."""
    table = _table("name", "what it does", "arXiv", "needs", "takes (default)")
    for row in method_rows():
        takes = [key if value is None else f"{key} ({value})" for key, value in row["takes"].items()]
        table.add_row(row["name"], row["summary"], row["source"], ", ".join(row["needs"]), ", ".join(takes))
    return table


def gate_table(entries: Sequence[Entry]) -> Table:
    """What every adapter is; equal hashes in the column A are a shared A."""
    table = _table("party", "base model", "targets", "rank", "scaling", "dtype", "ε", "A")
    for entry in entries:
        base = entry.base + (f" {entry.base_sha256[:SHOWN_HASH]}" if entry.base_sha256 else "")
        kinds = sorted({name.rpartition(".")[2] for name in entry.shapes})
        cells = (
            entry.party,
            base,
            f"{len(entry.shapes)}: {', '.join(kinds)}",
            ", ".join(map(str, entry.ranks)),
            ", ".join(f"{value:.4g}" for value in entry.scalings),
            ", ".join(entry.dtypes),
            entry.claim,
            entry.a_sha256[:SHOWN_HASH],
        )
        table.add_row(*map(escape, cells))
    return table


def explanation_tables(explanation: Explanation) -> list[Table]:
    """Noise, drift and what is kept per party; then the overlaps and the predicted gaps, where they are known."""
    table = _table("party", "noise share", "drift ‖τ‖", "kept")
    table.caption = (
        "noise share: of ‖τ‖², told by the statement, or at most (≤) by the spectrum; kept: ⟨merged, τ⟩ / ‖τ‖²"
    )
    for party, noise, drift, kept in zip(
        explanation.parties, noise_share_words(explanation), explanation.drift, explanation.kept, strict=True
    ):
        table.add_row(escape(party), noise, f"{drift:.4g}", MISSING if kept is None else f"{100 * kept:.1f} %")
    tables = [table]
    if explanation.overlap is not None:
        tables.append(_table("overlap (cosine)", *map(escape, explanation.parties)))
        for party, cosines in zip(explanation.parties, explanation.overlap, strict=True):
            tables[-1].add_row(escape(party), *(f"{value:.2f}" for value in cosines))
    if explanation.gaps:
        tables.append(_table("party", "predicted gap", "slope", "curvature", "third order", "measured"))
        tables[-1].caption = "growth of the loss from the own to the merged model on the public file, in nats"
        for party, gap in explanation.gaps.items():
            parts = (gap.predicted, gap.slope, gap.curvature, gap.third_order, gap.measured)
            tables[-1].add_row(escape(party), *(f"{part:+.4f}" for part in parts))
    return tables


def validation_tables(validation: Validation) -> list[Table]:
    """Mean accuracy per coefficient; then every party's gap, own − merged."""
    tried = _table("coefficient", "mean accuracy, %")
    for coefficient, mean in validation.grid:
        style = "bold" if coefficient == validation.coefficient else None
        tried.add_row(f"{coefficient:.4g}", percent(mean, None), style=style)
    gaps = _table("party", "own, %", "merged, %", "gap")
    for party, merged in validation.accuracy.items():
        own = validation.own.get(party)
        gap = None if own is None else 100 * (own - merged)
        gaps.add_row(escape(party), percent(own, None), percent(merged, None), points(gap))
    return [tried, gaps]


def _table(first: str, *others: str) -> Table:
    table = Table(first, *others, box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    return table
