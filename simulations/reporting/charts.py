"""Charts as inline SVG that take their ink and their font from the page, so that they follow light and dark."""

import io
import re
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from dpmerge.simulations.reporting.results import Results

SERIES = {"base": "#9aa3ad", "own": "#3b7dd8", "merged": "#e08a1e"}
_INK = "#010203"  # replaced by the page's own colour
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "dpmerge", "font.size": 11.0}


def accuracy_chart(results: Results) -> str:
    """Grouped bars of base, own and merged accuracy per party and on average, with standard errors.

    Returns:
        An `<svg>` element without script, style sheet or reference to anything outside itself; "" if nothing is known.
    """
    rows = [(party.party, party.accuracy, party.accuracy_se) for party in results.parties]
    rows = [row for row in rows if any(getattr(row[1], name) is not None for name in SERIES)]
    if not rows:
        return ""
    if len(rows) > 1:
        rows.append(("mean", results.mean_accuracy, results.mean_accuracy_se))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(max(6.0, 1.35 * len(rows) + 1.2), 3.6), layout="constrained")
        axes = figure.subplots()
        for index, (name, colour) in enumerate(SERIES.items()):
            heights = [100 * (getattr(value, name) or 0.0) for _, value, _ in rows]
            errors = [100 * (getattr(error, name) or 0.0) for _, _, error in rows]
            places = [place + (index - 1) * 0.27 for place in range(len(rows))]
            axes.bar(places, heights, 0.25, yerr=errors, color=colour, ecolor=_INK, label=name, error_kw={"lw": 1.0})
        _dress(axes, [row[0] for row in rows])
        return _svg(figure)


def _dress(axes: "mpl.axes.Axes", names: Sequence[str]) -> None:
    for label in axes.set_xticks(range(len(names)), names):
        label.label1.set_parse_math(False)  # a name with dollar signs is a name
    axes.set_ylim(0, 100)
    axes.set_ylabel("accuracy, %")
    axes.yaxis.grid(True, color=_INK, alpha=0.15, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_INK)
    axes.tick_params(colors=_INK, length=0)
    axes.yaxis.label.set_color(_INK)
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, labelcolor=_INK, borderaxespad=0.2)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    text = buffer.getvalue()
    element = re.sub(
        r"<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL
    )  # it would hit the whole page
    return re.sub(r"font-family: [^;]*", "font-family: inherit", element).replace(_INK, "currentColor")
