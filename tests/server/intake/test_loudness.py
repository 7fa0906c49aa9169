"""What is usual among norms, and who is far above it."""

import doctest

import pytest

from dpmerge.common import printable as shown
from dpmerge.common.release import introduction
from dpmerge.common.untrusted import kinds
from dpmerge.server.intake import loudness
from dpmerge.server.intake.loudness import loud, loud_warnings, usual_bound


def test_docstring_examples() -> None:
    assert all(doctest.testmod(module).failed == 0 for module in (loudness, kinds, shown, introduction))


@pytest.mark.parametrize("norm", [20.0, 50.0, 249.0])
def test_a_party_well_below_the_hard_bound_is_named_beside_norms_of_five_to_seven(norm: float) -> None:
    assert list(loud({"a": 5.0, "b": 6.0, "c": 7.0, "d": 5.5, "e": norm})) == ["e"]
    assert loud_warnings({"a": 5.0, "b": 6.0, "c": 7.0, "e": norm})[0].startswith(
        f"e: weight change of norm {norm:.4g}"
    )


@pytest.mark.parametrize("norms", [[3.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 6.0, 7.0, 17.0], [0.0, 0.0, 0.0]])
def test_what_is_usual_is_not_named(norms: list[float]) -> None:
    assert loud({str(place): norm for place, norm in enumerate(norms)}) == {}


def test_a_minority_cannot_move_the_bound_far() -> None:
    quiet = usual_bound([5.0, 5.5, 6.0, 6.5, 7.0])
    assert quiet is not None
    assert usual_bound([5.0, 5.5, 6.0, 6.5, 7.0, 249.0, 249.0]) <= 1.5 * quiet
    assert usual_bound([1.0, 249.0]) is None
