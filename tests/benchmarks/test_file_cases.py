"""Every file of the table is read as a person would read it, and what is dropped is told with its reason."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)
    file_cases = importlib.import_module("file_cases")

CASES = file_cases.all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.about)
def test_a_file_is_used_and_dropped_as_it_says(case, tmp_path):
    assert case.problem(tmp_path) == ""


def test_there_are_as_many_cases_as_the_benchmark_promises():
    assert len(CASES) >= 60
    assert len({case.about for case in CASES}) == len(CASES)


def test_a_case_whose_truth_is_another_is_found_wrong(tmp_path):
    plain = CASES[0]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert "used" in replace(plain, used=plain.used[:1]).problem(tmp_path / "a")
    assert "dropped" in replace(plain, dropped={"empty text": 1}).problem(tmp_path / "b")
