import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpmerge.client.ledger import GENESIS, Ledger
from dpmerge.common.errors import DpmergeError


def _reserve(ledger, binding="b1", dataset="shop"):
    return ledger.reserve(dataset=dataset, binding=binding, charge={"epsilon": 1.0})


def test_reservation_is_charged_once_and_found_again(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    first = _reserve(ledger)
    again = _reserve(Ledger(tmp_path / "ledger.jsonl"))
    assert first.is_new
    assert not again.is_new
    assert again.id == first.id
    assert [entry["kind"] for entry in ledger.entries()] == ["reserve"]


def test_open_reservation_refuses_other_data_or_settings(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    _reserve(ledger)
    with pytest.raises(DpmergeError, match="DPM-504"):
        _reserve(ledger, binding="other")
    assert len(ledger.entries()) == 1
    assert _reserve(ledger, binding="other", dataset="elsewhere").is_new


def test_training_again_after_a_release_is_a_second_charge(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    first = _reserve(ledger)
    ledger.released(first, "hash")
    ledger.released(first, "hash")
    second = _reserve(ledger)
    assert second.is_new
    assert second.id != first.id
    assert [entry["kind"] for entry in ledger.entries()] == ["reserve", "released", "reserve"]


def test_chain_shows_a_changed_or_missing_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for dataset in ("a", "b", "c"):
        _reserve(ledger, dataset=dataset)
    head = ledger.head()
    lines = path.read_bytes().splitlines(keepends=True)

    changed = json.loads(lines[0])
    changed["charge"]["epsilon"] = 0.1
    path.write_bytes(json.dumps(changed).encode() + b"\n" + lines[1] + lines[2])
    with pytest.raises(DpmergeError, match="line 2"):
        ledger.entries()
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(DpmergeError, match="line 2"):
        ledger.entries()
    path.write_bytes(
        lines[0] + lines[1]
    )  # truncation keeps the chain; the head, which travels with a release, shows it
    ledger.entries()
    assert ledger.head() != head
    assert Ledger(tmp_path / "none.jsonl").head() == GENESIS


def test_concurrent_reservations_keep_the_chain(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: _reserve(Ledger(path), dataset=f"d{i % 4}"), range(32)))
    entries = Ledger(path).entries()
    assert sorted(entry["dataset"] for entry in entries) == ["d0", "d1", "d2", "d3"]
    assert path.stat().st_mode & 0o077 == 0


def test_abandoned_trainings_stay_spent_and_are_not_gone_on_with(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    first = _reserve(ledger)
    ledger.abandon()
    ledger.abandon()
    assert _reserve(ledger).id != first.id
    assert [entry["kind"] for entry in ledger.entries()] == ["reserve", "abandoned", "reserve"]
