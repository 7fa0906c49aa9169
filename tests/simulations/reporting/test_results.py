"""The results of a run: derived numbers, the stored form, and what is printed."""

import csv
import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from dpmerge.cli.tables import results_table
from dpmerge.common.errors import DpmergeError
from dpmerge.simulations.reporting.results import (
    UNITS,
    Accuracies,
    PartyResult,
    Results,
    csv_text,
    load_results,
    results_from_dict,
    write_results,
)
from dpmerge.simulations.reporting.words import closing_lines


def party(name="shop", base=0.70, own=0.80, merged=0.78, **changes):
    defaults = {
        "party": name,
        "task": "movie",
        "epsilon": 2.0,
        "delta": 1e-5,
        "noise_multiplier": 1.1,
        "num_train": 2800,
        "num_test": 700,
        "accuracy": Accuracies(base=base, own=own, merged=merged),
        "accuracy_se": Accuracies(base=0.03, own=0.03, merged=0.04),
        "drift": 3.0,
        "noise_share": 0.4,
        "sentence": f"{name} is private.",
    }
    return PartyResult(**(defaults | changes))


FAILED = PartyResult(party="cinema", task="movie", status="failed", reason="DPM-599: no", epsilon=1.0, delta=1e-5)
LATE = PartyResult(party="bank", task="movie", status="late", reason="no release by the deadline")
WITHDRAWN = PartyResult(party="club", task="movie", status="withdrawn", reason="it withdrew")
OPEN = party("network", private=False, epsilon=None, noise_multiplier=None, sentence="No privacy.")
UNTESTED = party("own", base=None, own=None, merged=None, num_test=None, accuracy_se=Accuracies())


def results(*parties, **changes):
    facts = {"config": {"run": {"seed": 7}}, "versions": {"torch": "2"}, "merge": {"method": "average"}, "seconds": {}}
    return Results(**(facts | changes), parties=parties or (party(), FAILED, OPEN, UNTESTED))


def printed(found, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(results_table(found))
    return console.file.getvalue()


def test_means_compare_like_with_like():
    found = results(party(base=0.5, own=0.7, merged=0.6), party("b", base=0.7, own=0.9, merged=0.8), FAILED, UNTESTED)
    assert found.mean_accuracy == Accuracies(base=pytest.approx(0.6), own=pytest.approx(0.8), merged=pytest.approx(0.7))
    assert found.mean_accuracy_se.base == pytest.approx(math.sqrt(0.03**2 + 0.03**2) / 2)
    partial = replace(found, parties=(party(own=None), party("b")))
    assert partial.mean_accuracy == party("b").accuracy


def test_without_measurements_there_is_no_mean():
    assert results(FAILED, UNTESTED).mean_accuracy == Accuracies()
    assert results(FAILED, UNTESTED).mean_accuracy_se == Accuracies()


@pytest.mark.parametrize(("merged", "regressed"), [(0.70, False), (0.601, False), (0.599, True)])
def test_a_regression_lies_beyond_two_standard_errors(merged, regressed):
    row = party(merged=merged)  # 2 · √(0.03² + 0.04²) = 0.1 below 0.70
    assert row.regressed is regressed
    assert results(row).regressions == (("shop",) if regressed else ())


def test_the_gap_is_own_minus_merged_in_points():
    assert party(own=0.8, merged=0.77).gap_points == pytest.approx(3.0)
    assert UNTESTED.gap_points is None


def test_json_has_the_keys_of_schema_1():
    tables = json.loads(json.dumps(results().to_dict()))
    assert tables["schema"] == 1
    assert {
        "config",
        "versions",
        "merge",
        "mean_accuracy",
        "seconds",
        "parties",
        "units",
        "reduced",
        "regressions",
        "warnings",
    } <= set(tables)
    assert {
        "party",
        "task",
        "status",
        "reason",
        "epsilon",
        "delta",
        "noise_multiplier",
        "num_train",
        "num_test",
        "accuracy",
        "accuracy_se",
        "drift",
        "noise_share",
    } <= set(tables["parties"][0])
    numbers = {key for key, value in tables["parties"][0].items() if isinstance(value, int | float | dict)} - {
        "private"
    }
    assert numbers <= set(UNITS)


def test_a_party_that_uses_under_half_of_its_records_is_a_warning():
    reason = "3 x no label (first: line 4)"
    enough, few = party(num_train=3, num_dropped=3), party("few", num_train=2, num_dropped=3, dropped=(reason,))
    none = party("none", num_train=0, num_dropped=0)
    found = results(enough, few, none, FAILED)
    assert [warning.split(";")[0] for warning in found.warnings] == [
        "few: 2 of 5 records can be used",
        "none: 0 of 0 records can be used",
    ]
    assert found.to_dict()["warnings"] == list(found.warnings)
    lines = closing_lines(found)
    assert f"few: not used: {reason}" in lines
    assert set(found.warnings) <= set(lines)


def test_results_survive_the_folder(tmp_path):
    write_results(tmp_path, results(reduced=True))
    assert load_results(tmp_path) == results(reduced=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json"]


def test_a_number_that_json_lacks_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_results(tmp_path, results(party(drift=math.nan)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda tables: tables | {"schema": 2},
        lambda tables: {key: value for key, value in tables.items() if key != "merge"},
        lambda tables: tables | {"parties": [{"party": "x", "surprise": 1}]},
        lambda tables: tables | {"parties": [tables["parties"][0] | {"surprise": 1}]},
        lambda tables: tables | {"parties": 3},
        lambda tables: [tables],
    ],
    ids=["schema", "missing", "row", "unknown", "parties", "list"],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    (tmp_path / "results.json").write_text(json.dumps(damage(results().to_dict())))
    with pytest.raises(DpmergeError, match=r"DPM-303: .*results\.json"):
        load_results(tmp_path)


def test_a_file_of_nothing_but_brackets_is_refused(tmp_path):
    (tmp_path / "results.json").write_text("[" * 100_000)
    with pytest.raises(DpmergeError, match=r"DPM-303: .*results\.json"):
        load_results(tmp_path)


def test_no_file_is_refused(tmp_path):
    with pytest.raises(DpmergeError, match="DPM-303"):
        load_results(tmp_path)


def test_derived_numbers_are_not_taken_from_the_file():
    tables = results().to_dict() | {"mean_accuracy": {"base": 0.0, "own": 1.0, "merged": 1.0}}
    assert results_from_dict(tables).mean_accuracy == results().mean_accuracy


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "failed"},
        {"status": "late"},
        {"reason": "DPM-599: no"},
        {"status": "done"},
        {"accuracy": Accuracies(base=1.2)},
        {"accuracy_by_adapter": {"x": -0.1}},
    ],
)
def test_a_row_that_contradicts_itself_is_a_defect(changes):
    with pytest.raises(ValueError, match="Expected"):
        party(**changes)


def test_csv_has_one_line_per_party():
    rows = list(csv.DictReader(io.StringIO(csv_text(results()))))
    assert [row["party"] for row in rows] == ["shop", "cinema", "network", "own"]
    assert float(rows[0]["accuracy_own"]) == 0.8
    assert rows[1]["reason"] == "DPM-599: no"
    assert rows[3]["accuracy_own"] == ""


def test_the_table_says_what_is_missing_failed_and_not_private():
    text = printed(results())
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "80.0 ±3.0" in lines["shop"]
    assert "+2.0" in lines["shop"]
    assert "1.100" in lines["shop"]
    assert "failed" in lines["cinema"]
    assert "not private" in lines["network"]
    assert lines["own"].count("–") == 4
    assert "2 of 4" in lines["mean"]
    assert "REDUCED" not in text
    assert "REDUCED" in printed(results(reduced=True))


def test_whoever_is_absent_is_told_by_name_and_makes_a_run_incomplete_unless_it_withdrew():
    assert results(party(), OPEN).complete
    assert results(party(), WITHDRAWN).complete
    assert not results(party(), LATE).complete
    assert not results(party(), not_merged="1 of 2").complete
    found = results(party(), LATE, WITHDRAWN, not_merged="1 of 3 releases are here")
    assert [row.party for row in found.absent] == ["bank", "club"]
    lines = {line.split()[0]: line for line in printed(found).splitlines() if line.strip()}
    assert ("late" in lines["bank"], "withdrawn" in lines["club"]) == (True, True)
    assert closing_lines(found)[:3] == [
        "NOTHING WAS MERGED: 1 of 3 releases are here; go on with --resume",
        "bank late: no release by the deadline",
        "club withdrawn: it withdrew",
    ]


def test_results_of_before_a_key_was_added_are_read(tmp_path):
    tables = results().to_dict()
    del tables["not_merged"]
    (tmp_path / "results.json").write_text(json.dumps(tables))
    assert load_results(tmp_path) == results()


def test_names_are_printed_as_they_are():
    assert "[bold]x" in printed(results(party(task="[bold]x")))


def test_the_closing_lines_name_failures_and_state_each_epsilon():
    lines = closing_lines(results(party(merged=0.2), FAILED, OPEN))
    assert lines[0] == "cinema failed: DPM-599: no"
    assert any(line.startswith("shop: merging made this task worse") for line in lines)
    assert any("NOT PRIVATE" in line and "network" in line for line in lines)
    assert "shop is private." in lines
