import doctest

import pytest

from dpmerge.common.config.federation import parse_federation, party_plan, plan_from_dict
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy import bounds
from dpmerge.common.privacy.bounds import default_delta, is_large

FILE = """
[base]
model = "minilm-l6"
[training]
expected_batch_size = 10
[privacy]
epsilon = 1
{privacy}
[[party]]
name = "shop"
data = "reviews.csv"
labels = {{ "1" = "a bad product", "5" = "a great product" }}
population = {population}
{party}
"""


def plan(population: int, privacy: str = "", party: str = ""):
    return party_plan(parse_federation(FILE.format(population=population, privacy=privacy, party=party), "f"), "shop")


def test_docstring_examples():
    assert doctest.testmod(bounds).failed == 0


@pytest.mark.parametrize("population", [1, 7, 999, 10_001, 33_333, 10**6, 123_456_789, 10**11])
def test_the_default_is_one_digit_and_at_most_a_tenth_of_one_over_the_population(population):
    delta = default_delta(population)
    assert delta <= min(1e-5, 0.1 / population) < 2 * delta + 1e-5 * (delta == 1e-5)
    assert len(f"{delta:e}".rstrip("0").split("e")[0].replace(".", "").rstrip("0")) == 1
    assert not is_large(delta, population)


@pytest.mark.parametrize(("population", "delta"), [(3000, 1e-5), (250_000, 4e-7)])
def test_a_plan_resolves_delta_from_its_partys_own_population(population, delta):
    resolved = plan(population)
    assert resolved.privacy.delta == delta
    assert plan_from_dict(resolved.to_dict()) == resolved


@pytest.mark.parametrize(
    ("privacy", "party", "place"),
    [
        ("delta = 1e-3", "", "privacy.delta = 0.001"),
        ("", "[party.privacy]\ndelta = 2e-3", r"party\[0\].privacy.delta = 0.002"),
    ],
)
def test_a_delta_that_publishing_a_record_would_meet_is_refused_unless_allowed_by_name(privacy, party, place):

    with pytest.raises(DpmergeError, match=rf"DPM-103.*{place}.*1 / 1000"):
        plan(1000, privacy, party)
    allowed = plan(1000, privacy + "\nallow_large_delta = true", party)
    assert allowed.privacy.allow_large_delta
    tables = allowed.to_dict()
    tables["privacy"] = {**tables["privacy"], "allow_large_delta": False}
    with pytest.raises(DpmergeError, match=r"DPM-103.*1 / 1000"):
        plan_from_dict(tables)


def test_a_plan_without_a_resolved_delta_is_refused():
    tables = plan(1000).to_dict()
    tables["privacy"] = {key: value for key, value in tables["privacy"].items() if key != "delta"}
    with pytest.raises(DpmergeError, match=r"DPM-103.*privacy\.delta"):
        plan_from_dict(tables)


def test_without_privacy_no_delta_is_refused():
    text = FILE.replace("epsilon = 1\n", "private = false\n")
    federation = parse_federation(text.format(population=10, privacy="delta = 0.5", party=""), "f")
    assert party_plan(federation, "shop").privacy.delta == 0.5
