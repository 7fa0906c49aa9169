"""One self-contained HTML page per run, made from the stored `results.json` and nothing else."""

from collections.abc import Mapping
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, UndefinedError
from markupsafe import Markup

from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import replace_file
from dpmerge.common.printable import MAX_TEXT, shown
from dpmerge.common.statement.statement import READING
from dpmerge.simulations.reporting.charts import SERIES, accuracy_chart
from dpmerge.simulations.reporting.results import RESULTS_FILE, UNITS, Results, load_results
from dpmerge.simulations.reporting.words import MISSING, epsilon, percent, points

REPORT_FILE = "report.html"


def write_report(folder: Path) -> Path:
    """Write `report.html` beside the `results.json` of a run and return its path.

    Raises:
        DpmergeError: DPM-303 if there are no results, or not of this version.
    """
    results = load_results(folder)
    try:
        page = render(results)
    except (
        TypeError,
        ValueError,
        AttributeError,
        UndefinedError,
    ) as problem:  # a value of another kind, put in by hand
        fix = "run `dpmerge simulate` again with this version"
        raise DpmergeError("DPM-303", f"{folder / RESULTS_FILE} cannot be shown: {problem}", fix) from problem
    replace_file(folder / REPORT_FILE, page)
    return folder / REPORT_FILE


def render(results: Results) -> str:
    """The page as text: no script, nothing fetched, every value escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_safe
    )
    environment.filters |= {"number": number, "percent": percent, "points": points, "epsilon": epsilon, "kind": kind}
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        results=results,
        merge=by_party(results.merge),
        chart=Markup(accuracy_chart(results)),  # our own SVG; the names in it are escaped by matplotlib
        series=SERIES,
        units=UNITS,
        reading=READING,
        bars=_bars(results),
        not_private=[party.party for party in results.parties if not party.private],
        total_seconds=str(timedelta(seconds=round(sum(results.seconds.values())))),
    )


def _safe(value: Any) -> Any:
    """Keep control characters and marks that reorder text out of the page; what is markup is our own."""
    return shown(value, MAX_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value


def number(value: float | None, digits: int = 3) -> str:
    """A number in at most `digits` significant digits, or a dash.

    Args:
        value: What is shown, or None for a dash.
        digits: Significant digits.

    >>> number(1.23456), number(2800), number(1e-5), number(None)
    ('1.23', '2800', '1e-05', '–')
    """
    if value is None:
        return MISSING
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def kind(value: object) -> str:
    """How the page shows a stored value: as "table", "matrix", "list", "number" or "text"."""
    if isinstance(value, Mapping):
        nested = bool(value) and all(isinstance(row, Mapping) and set(row) == set(value) for row in value.values())
        return "matrix" if nested else "table"
    if isinstance(value, list | tuple):
        return "list"
    return "number" if isinstance(value, float) else "text"


def by_party(merge: Mapping[str, Any]) -> dict[str, Any]:
    """What the merge says about itself, with lists that run over its `parties` as tables that name them.

    >>> by_party({"parties": ["a", "b"], "norms": [3.0, 4.0], "overlap": [[1.0, 0.2], [0.2, 1.0]]})
    {'norms': {'a': 3.0, 'b': 4.0}, 'overlap': {'a': {'a': 1.0, 'b': 0.2}, 'b': {'a': 0.2, 'b': 1.0}}}
    """
    names = merge.get("parties")
    if not isinstance(names, list):
        return dict(merge)

    def named(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(names) or any(isinstance(item, str) for item in value):
            return value
        return {name: named(item) for name, item in zip(names, value, strict=True)}

    return {key: named(value) for key, value in merge.items() if key != "parties"}


def _bars(results: Results) -> dict[str, dict[str, float]]:
    """Bar lengths in percent of the largest value, by column and party; a share of noise is a percentage already."""
    columns: dict[str, dict[str, float]] = {}
    for name in ("epsilon", "drift", "noise_share"):
        values = {party.party: getattr(party, name) for party in results.parties}
        largest = 1.0 if name == "noise_share" else max([value for value in values.values() if value], default=1.0)
        columns[name] = {key: min(100.0, 100 * (value or 0.0) / largest) for key, value in values.items()}
    return columns
