"""One decoder: kinds are exact, keys are exact, sizes are bounded."""

import itertools

import pytest

from dpmerge.common.statement.form import STATEMENT
from dpmerge.common.statement.statement import _KEYS, _OPTIONAL
from dpmerge.common.untrusted.kinds import (
    Unfit,
    exactly,
    integer,
    list_of,
    optional,
    plain,
    real,
    record,
    same,
    table_of,
    text,
)

ALIKE = (True, 1, 1.0)


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(ALIKE, 2)))
def test_equal_numbers_of_other_kinds_are_not_the_same(one: object, other: object) -> None:
    assert one == other
    assert not same(one, other)
    assert not same({"r": [one]}, {"r": [other]})
    with pytest.raises(Unfit):
        exactly(one)(other, "schema")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (integer(0, 9), [0, 9], [-1, 10, True, 1.0, "1", None]),
        (real(0.0, 1.0), [0.0, 1.0], [True, 1, 1.5, float("nan"), float("inf"), "1"]),
        (text(3), ["a", "abc"], ["", "abcd", "a\x1b", "a\n", 1, None]),
        (optional(text(3)), [None, "a"], ["", 0]),
        (list_of(integer(0, 1), most=2), [[], [0, 1]], [[0, 0, 0], [2], (0,), {}]),
        (
            record({"a": integer(0, 1)}, {"b": text(1)}),
            [{"a": 1}, {"a": 0, "b": "x"}],
            [{}, {"b": "x"}, {"a": 1, "c": 1}],
        ),
        (table_of(text(2), integer(0, 1), most=1), [{}, {"ab": 1}], [{"abc": 1}, {"a": 1, "b": 1}, [], {"a": 2}]),
        (plain(most=4, depth=2, longest=3), [1, [1, 2], {"a": "abc"}], [[[1]], [1] * 9, "abcd"]),
    ],
)
def test_a_kind_takes_what_it_says_and_nothing_else(kind: object, good: list, bad: list) -> None:
    for value in good:
        kind(value, "x")
    for value in bad:
        with pytest.raises(Unfit):
            kind(value, "x")


def test_a_refusal_is_short_and_printable_however_large_the_value() -> None:
    for value in ("\x1b[2J" * 10**6, [0] * 10**6, {"a" * 10**6: 1}):
        with pytest.raises(Unfit) as caught:
            record({"a": integer(0, 1)})({"a": value} if not isinstance(value, dict) else value, "x")
        assert len(str(caught.value)) < 200
        assert str(caught.value).isprintable()


def test_every_key_of_a_statement_has_a_kind() -> None:
    assert STATEMENT.keys() == _KEYS | _OPTIONAL
