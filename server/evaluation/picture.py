"""The picture of a merge: how the parties' changes overlap, and how much of each is noise."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from dpmerge.common.printable import shown
from dpmerge.server.evaluation.explain import Explanation

MAX_ANNOTATED = 12  # parties up to which the numbers stand in the heat map
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "dpmerge", "font.size": 10.0}


def picture(explanation: Explanation) -> bytes:
    """Return an SVG file: a heat map of the overlaps beside bars of the noise shares; equal input, equal bytes."""
    names, size = [shown(party) for party in explanation.parties], len(explanation.parties)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.0 + 0.35 * size, 2.2 + 0.35 * size), layout="constrained")
        heat, bars = figure.subplots(1, 2, width_ratios=(3, 2))
        _heat_map(figure, heat, names, explanation)
        shares = [100 * share for share in explanation.noise_share]
        bars.barh(range(size), shares, 0.7, color="#e08a1e")
        for place, (share, words) in enumerate(zip(shares, noise_share_words(explanation), strict=True)):
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


def noise_share_words(explanation: Explanation) -> list[str]:
    """Return one text for each party: its noise share in percent, marked ≤ where it is estimated by the spectrum."""
    pairs = zip(explanation.noise_share, explanation.noise_origin, strict=True)
    return [f"{'≤ ' if origin == 'estimated' else ''}{100 * share:.1f} %" for share, origin in pairs]
