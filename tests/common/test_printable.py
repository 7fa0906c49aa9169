"""Foreign text acts on nothing that shows it."""

import csv
import io
import json
from dataclasses import replace

import pytest

from dpmerge.common.errors import DpmergeError
from dpmerge.common.printable import cell, code, json_text, markdown, shown
from dpmerge.common.statement.verify import Check
from dpmerge.simulations.reporting.report import render
from dpmerge.simulations.reporting.results import Accuracies, PartyResult, Results, csv_text
from dpmerge.simulations.reporting.words import closing_lines

HOSTILE = ["\x1b[2K\rPASS", "a\u202eb", "\x9b2J", "one\ntwo", "\u2028", "\ud800", "x\x00", "\u200f", "\x07"]


@pytest.mark.parametrize("raw", HOSTILE)
def test_nothing_unprintable_gets_through(raw: str) -> None:
    for made in (shown(raw), markdown(raw), code(raw), cell(raw), str(DpmergeError("DPM-401", raw, raw))):
        assert isinstance(made, str)
        assert made.isprintable()
    assert Check("a", "FAIL", raw).detail.isprintable()


@pytest.mark.parametrize("raw", HOSTILE[:5])
def test_json_for_a_terminal_loses_nothing(raw: str) -> None:
    written = json_text({"σ": raw})
    assert all(line.isprintable() for line in written.split("\n"))
    assert json.loads(written) == {"σ": raw}


def test_everything_is_cut_to_a_length() -> None:
    assert max(len(shown("x" * 10**7, 50)), len(shown("\x1b" * 10**7, 50))) == 50
    assert len(str(DpmergeError("DPM-401", "x" * 10**7, "y" * 10**7))) < 5000


@pytest.mark.parametrize("raw", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "\n=1"])
def test_a_spreadsheet_computes_nothing(raw: str) -> None:
    assert str(cell(raw)).startswith("'")


@pytest.mark.parametrize(
    "raw", ["[x](http://evil)", "<script>", "![x](y)", "a|b", "# h", "`x`", "&lt;", "www.evil.com"]
)
def test_markdown_has_no_meaning(raw: str) -> None:
    made = markdown(raw)
    for mark in "[]<>|#`&":
        assert made.count(mark) == made.count("\\" + mark)
    assert "http:" not in made
    assert "www." not in made


def results(words: str) -> Results:
    row = PartyResult(
        party="shop", task=words, accuracy=Accuracies(base=0.1, own=0.2, merged=0.2), sentence=f"claim {words}"
    )
    absent = PartyResult(party="bank", task="t", status="failed", reason=words)
    return Results(
        config={"note": words}, versions={"dpmerge": words}, merge={"a": words}, seconds={}, parties=(row, absent)
    )


@pytest.mark.parametrize("raw", [*HOSTILE[:5], "<img src=x onerror=alert(1)>", "=1+1", "[red]x[/red]"])
def test_tables_and_pages_of_a_run_show_it_harmlessly(raw: str) -> None:
    told = results(raw)
    assert all(line.isprintable() for line in closing_lines(told))
    for row in csv.DictReader(io.StringIO(csv_text(told))):
        assert all(value.isprintable() for value in row.values())
        assert not row["task"].startswith(("=", "+", "@"))
    page = render(told)
    assert "<img" not in page
    assert all(line.isprintable() for line in page.split("\n") if raw[:3] in line and "\x1b" in raw)
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_a_party_far_above_the_others_is_named() -> None:
    rows = tuple(
        replace(PartyResult(party=f"p{i}", task="t"), drift=norm) for i, norm in enumerate((3.0, 3.0, 3.1, 2.9, 249.0))
    )
    told = Results(config={}, versions={}, merge={}, seconds={}, parties=rows)
    assert len(told.warnings) == 1
    assert told.warnings[0].startswith("p4: weight change of norm 249")
    assert told.warnings[0] in closing_lines(told)
