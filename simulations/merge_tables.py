"""The tables and the picture of `dpmerge merge`."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from dpmerge.common.shown import shown
from dpmerge.server.coefficient import Validation
from dpmerge.server.merging.explain import Explanation
from dpmerge.server.merging.gate import Entry
from dpmerge.server.merging.registry import METHODS, REQUIRED
from dpmerge.simulations.table import MISSING, escape, percent, points

SHOWN_HASH = 8  # characters, enough to compare by eye
MAX_ANNOTATED = 12  # parties up to which the numbers stand in the heat map
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "dpmerge", "font.size": 10.0}


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
        explanation.parties, _noise(explanation), explanation.drift, explanation.kept, strict=True
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


def picture(explanation: Explanation) -> bytes:
    """Return an SVG file: a heat map of the overlaps beside bars of the noise shares; equal input, equal bytes."""
    names, size = [shown(party) for party in explanation.parties], len(explanation.parties)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.0 + 0.35 * size, 2.2 + 0.35 * size), layout="constrained")
        heat, bars = figure.subplots(1, 2, width_ratios=(3, 2))
        _heat_map(figure, heat, names, explanation)
        shares = [100 * share for share in explanation.noise_share]
        bars.barh(range(size), shares, 0.7, color="#e08a1e")
        for place, (share, words) in enumerate(zip(shares, _noise(explanation), strict=True)):
            bars.text(share + 1, place, words, va="center", size=8)
        bars.set(xlim=(0, 125), title="noise share of ‖τ‖², %")
        bars.invert_yaxis()
        _label(bars.set_yticks(range(size), names))
        bars.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _heat_map(figure: Figure, axes: "mpl.axes.Axes", names: list[str], explanation: Explanation) -> None:
    size = len(names)
    axes.set_title("overlap of the parties' changes (cosine)")
    if explanation.overlap is None:
        axes.text(0.5, 0.5, "not computed for so many parties", ha="center", va="center")
        axes.axis("off")
        return
    cells = axes.pcolormesh(explanation.overlap, cmap="RdBu_r", vmin=-1, vmax=1, edgecolors="white", linewidth=0.5)
    middles = [place + 0.5 for place in range(size)]
    axes.invert_yaxis()
    axes.set_aspect("equal")
    _label(axes.set_xticks(middles, names, rotation=45, ha="right"))
    _label(axes.set_yticks(middles, names))
    figure.colorbar(cells, ax=axes, shrink=0.8)
    for row, cosines in enumerate(explanation.overlap if size <= MAX_ANNOTATED else ()):
        for column, value in enumerate(cosines):
            ink = "white" if abs(value) > 0.6 else "black"
            axes.text(column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", size=8, color=ink)


def _label(ticks: Sequence[Any]) -> None:
    for tick in ticks:
        tick.label1.set_parse_math(False)  # a name with dollar signs is a name


def _table(first: str, *others: str) -> Table:
    table = Table(first, *others, box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    return table


def _noise(explanation: Explanation) -> list[str]:
    pairs = zip(explanation.noise_share, explanation.noise_origin, strict=True)
    return [f"{'≤ ' if origin == 'estimated' else ''}{100 * share:.1f} %" for share, origin in pairs]
