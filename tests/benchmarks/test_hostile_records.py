"""One hostile record more: it changes no other record's reading, and nothing that leaves the party."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpmerge.client.party import party
from dpmerge.common.data.records import read_with_report

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)
    hostile = importlib.import_module("hostile_records")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FORMATS = hostile.FORMATS


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("user", [None, "author"])
def test_a_record_more_is_at_most_that_record_more(name, user, tmp_path):
    """Trap 17: neighbours are real rows."""
    form, number = FORMATS[name], iter(range(10**6))

    def parsed(extra, at):
        place = tmp_path / str(next(number))
        place.mkdir()
        form.write(place / form.name, extra, at)
        path = place / (form.path or form.name)
        records, report = read_with_report(path, text="body", label="stars", labels={"1": "", "5": ""}, user=user)
        owners = records.users or (0,) * len(records)
        return list(zip(records.texts, records.labels, strict=True)), owners, report.num_used + report.num_dropped

    without, _, num_without = parsed([], 0)

    def check(record, at):
        found, _, count = parsed([record], at)
        assert found == without or any(found[:n] + found[n + 1 :] == without for n in range(len(found)))
        assert count - num_without in (0, 1)  # a blank line is no record

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(record=form.records, at=st.integers(0, len(hostile.ROWS)))
    def one(record, at):
        check(record, at)

    assert len(without) == len(hostile.ROWS) * (3 if name == "folder" else 1)
    for record in hostile.TALES if form.records is hostile.LINES else ():
        check(record, 1)
    one()


def test_no_pair_of_data_sets_is_told_apart_by_the_answers():
    """Trap 16: whatever a record does, code, sentence, files and sizes stay."""
    tried, apart = hostile.pairs_told_apart(304, num_whole=2)
    assert apart == []
    assert tried >= 300


@pytest.mark.slow
def test_no_pair_of_very_many_is_told_apart():
    tried, apart = hostile.pairs_told_apart(10_000, num_whole=80)
    assert apart == []
    assert tried >= 10_000


def test_a_reader_that_stops_at_a_record_is_told_apart(monkeypatch):
    """The check can fail: here by a reader that minds a text in capitals."""
    read = party.read_training

    def minding(plan):
        records, report = read(plan)
        if any(text.isupper() for text in records.texts):
            raise ValueError("shouting")
        return records, report

    monkeypatch.setattr(party, "read_training", minding)
    monkeypatch.setitem(FORMATS, "csv", replace(FORMATS["csv"], records=st.just(b'"HELLO","5","zoe"')))
    for name in set(FORMATS) - {"csv"}:
        monkeypatch.delitem(FORMATS, name)
    _, apart = hostile.pairs_told_apart(2)
    assert apart


def test_the_longest_record_and_a_longer_one_cost_little():
    """Trap 18; before there were bounds, a text of 16 MB took 48 seconds."""
    found = hostile.longest_record_seconds(turns=2)
    assert max(found.values()) < 1.0
