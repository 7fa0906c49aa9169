"""The merge benchmark: nothing is scored twice or lost, and figures and intervals mean what they say."""

import importlib
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def load(name: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def comparison():
    return load("merge_comparison")


@pytest.fixture(scope="module")
def book_of():
    return load("merge_scores").ScoreBook


def test_a_row_is_made_once_and_found_again(book_of, tmp_path):
    path = tmp_path / "scores.jsonl"
    first = book_of(path).row("a", lambda: {"value": 1})
    assert book_of(path).row("a", lambda: pytest.fail("made twice")) == first


def test_a_line_that_a_killed_process_left_unfinished_spoils_no_other(book_of, tmp_path):
    path = tmp_path / "scores.jsonl"
    book_of(path).row("a", lambda: {"value": 1})
    with path.open("a") as stream:
        stream.write('{"key": "b", "val')
    book = book_of(path)
    assert book.row("b", lambda: {"value": 2})["value"] == 2
    again = book_of(path)
    assert [again.row(key, dict)["value"] for key in ("a", "b")] == [1, 2]


def test_an_interval_has_the_width_of_the_normal_approximation(comparison):
    rng = np.random.default_rng(5)
    ours, theirs = ([{"x": rng.random(400) < p} for _ in range(2)] for p in (0.8, 0.6))
    difference = comparison.paired(ours, theirs)
    per_record = np.mean([a["x"].astype(float) - b["x"] for a, b in zip(ours, theirs, strict=True)], axis=0)
    width = 100 * 2 * 1.96 * per_record.std() / 20
    assert difference.mean == pytest.approx(100 * per_record.mean())
    assert difference.high - difference.low == pytest.approx(width, rel=0.05)
    assert difference.low < difference.mean < difference.high


def test_seeds_that_answer_alike_add_no_certainty(comparison):
    rng = np.random.default_rng(5)
    ours, theirs = ({"x": rng.random(300) < p} for p in (0.8, 0.6))
    one, three = comparison.paired([ours], [theirs]), comparison.paired([ours] * 3, [theirs] * 3)
    assert (three.low, three.high) == pytest.approx((one.low, one.high))


def test_tasks_count_alike_whatever_their_size(comparison):
    right, wrong = np.ones(10, bool), np.zeros(1000, bool)
    assert comparison.accuracy({"small": right, "large": wrong}) == 50.0


def test_figures_take_the_best_plain_peer(comparison):
    cell = comparison.Cell(("x",), 1.0, 0)
    shares = {"average": 0.5, "ties": 0.6, "ties + denoise": 0.9, "geometry": 0.7, "geometry + denoise": 0.2}
    scores = {name: {"x": np.arange(10) < 10 * share} for name, share in shares.items()}
    outcome = comparison.Outcome(base={cell: scores["average"]}, own={cell: scores["ties"]}, merged={cell: scores})
    assert comparison.figures(outcome)["geometry_minus_best_peer"] == pytest.approx(10.0)
    best = [row["method"] for row in comparison.rows(outcome) if row["best_peer"]]
    assert best == ["ties"]
    assert "| ties | 60.0 | +10.0" in comparison.markdown(comparison.rows(outcome))
