import json
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpmerge.client.budget.composition import Cap
from dpmerge.client.budget.ledger import GENESIS, Bound, Ledger, Reservation, reservation_id
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.mechanism import Mechanism

from .charges import charge_of


def _reserve(ledger, binding="b1", dataset="shop", **more):
    return ledger.reserve(dataset=dataset, binding=binding, charge={"epsilon": 1.0}, **more)


def _kinds(ledger):
    return [entry["kind"] for entry in ledger.entries()]


def test_reservation_is_charged_once_and_found_again(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl").create()
    name = reservation_id(tmp_path)
    first = _reserve(ledger, reservation=name)
    again = _reserve(Ledger(tmp_path / "ledger.jsonl"), reservation=reservation_id(tmp_path))
    assert (first.is_new, again.is_new) == (True, False)
    assert first.id == again.id == name
    assert _kinds(ledger) == ["reserve"]
    assert _reserve(ledger).is_new  # from another folder: a charge of its own


def test_a_head_does_not_tell_what_the_records_are(tmp_path):
    heads = set()
    for folder in (tmp_path / "a", tmp_path / "b"):  # the same data: whoever guesses them cannot test the guess
        folder.mkdir()
        ledger = Ledger(folder / "ledger.jsonl").create()
        _reserve(ledger, reservation=reservation_id(folder))
        heads.add(ledger.head())
    assert len(heads) == 2


def test_a_reservation_goes_on_with_the_same_data_and_settings_only(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl").create()
    first = _reserve(ledger, reservation="r")
    with pytest.raises(DpmergeError, match="other records or settings"):
        _reserve(ledger, reservation="r", binding="other")
    ledger.released(first, "hash")
    with pytest.raises(DpmergeError, match="is closed"):
        _reserve(ledger, reservation="r")
    assert _kinds(ledger) == ["reserve", "released"]


def test_what_follows_a_reservation_is_recorded_once(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl").create()
    first = _reserve(ledger)
    for _ in range(2):
        ledger.released(first, "hash")
        ledger.received(first, "receipt")
    assert _kinds(ledger) == ["reserve", "released", "receipt"]
    for record in (ledger.released, ledger.received):
        with pytest.raises(DpmergeError, match="already"):
            record(first, "other")
    second = _reserve(ledger)
    assert second.is_new
    assert second.id != first.id


def _three(path):
    ledger = Ledger(path).create()
    for dataset in ("a", "b", "c"):
        _reserve(ledger, dataset=dataset)
    return path.read_bytes().splitlines(keepends=True)


def _edited(line):
    entry = json.loads(line)
    entry["charge"]["epsilon"] = 0.1
    return json.dumps(entry).encode() + b"\n"


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda lines: [_edited(lines[0]), *lines[1:]], 2),
        (lambda lines: [lines[0], lines[2]], 2),
        (lambda lines: [lines[1], lines[0], lines[2]], 1),
        (lambda lines: [*lines, lines[2]], 4),
        (lambda lines: [*lines[:2], lines[2][:-1]], 3),
        (lambda lines: [*lines[:2], lines[2][:40]], 3),
        (lambda lines: [*lines, b"\n"], 4),
        (lambda lines: [*lines, b"[" * 100_000 + b"\n"], 4),
        (lambda lines: [*lines, b"\xff\n"], 4),
    ],
    ids="edited removed reordered repeated no-newline torn blank nested not-unicode".split(),
)
def test_chain_shows_what_was_changed(tmp_path, change, number):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(change(_three(path))))
    with pytest.raises(DpmergeError, match=f"DPM-504: line {number} "):
        Ledger(path).entries()
    before = path.read_bytes()
    with pytest.raises(DpmergeError, match="DPM-504"):
        _reserve(Ledger(path))
    assert path.read_bytes() == before


def test_an_earlier_head_shows_a_cut_or_a_changed_last_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    lines = _three(path)
    head = Ledger(path).head()
    for content in (lines[:2], [*lines[:2], _edited(lines[2])]):
        path.write_bytes(b"".join(content))
        assert head not in [line.sha256 for line in Ledger(path).lines()]
    path.write_bytes(b"".join(lines))
    _reserve(Ledger(path), dataset="d")
    assert Ledger(path).lines()[2].sha256 == head
    assert Ledger(tmp_path / "none.jsonl").create().head() == GENESIS


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": "released", "reservation": "unknown", "release": "hash"},
        {"kind": "reserve", "reservation": "r", "dataset": "a", "binding": "b", "charge": None},
        {"kind": "spent", "reservation": "r"},
        {"kind": "bound", "dataset": "reviews", "place": None, "nonce": "n"},
        {"kind": "bound", "dataset": "reviews", "place": "/data"},
        {"kind": "reserve", "dataset": "a", "binding": "b", "charge": {}},
    ],
)
def test_a_line_that_makes_no_sense_is_damage_although_its_hash_fits(tmp_path, entry):
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps({**entry, "previous": GENESIS}) + "\n")
    with pytest.raises(DpmergeError, match=r"line 1 of the ledger ledger\.jsonl"):
        Ledger(path).entries()


def test_concurrent_reservations_keep_the_chain(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger(path).create()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: _reserve(Ledger(path), reservation=f"r{i % 4}"), range(32)))
    assert sorted(entry["reservation"] for entry in Ledger(path).entries()) == ["r0", "r1", "r2", "r3"]
    assert path.stat().st_mode & 0o077 == 0


def _race(path, barrier, index, answers):
    barrier.wait()
    try:
        for turn in range(5):
            Ledger(path).reserve(dataset="shop", binding=f"{index}-{turn}", charge={"epsilon": 1.0})
        answers.put("charged")
        Ledger(path.with_name("capped.jsonl")).reserve(dataset="capped", binding="b", charge=charge_of(FULL), cap=CAP)
        answers.put("won")
    except DpmergeError as refusal:
        answers.put(refusal.code)


FULL = Mechanism(
    noise_multiplier=2.0,
    l2_clip_norm=1.0,
    population=2800,
    expected_batch_size=128,
    num_steps=40,
    target_delta=1e-5,
    noise="fast",
)
CAP = Cap(epsilon=0.8, delta=1e-5)  # FULL alone costs 0.64, twice 0.89


def test_two_processes_keep_the_chain_and_only_one_gets_what_the_cap_leaves(tmp_path):
    context, path = multiprocessing.get_context("fork"), tmp_path / "ledger.jsonl"
    Ledger(path).create()
    capped = Ledger(tmp_path / "capped.jsonl").create()
    barrier, answers = context.Barrier(2), context.Queue()
    racers = [context.Process(target=_race, args=(path, barrier, index, answers)) for index in range(2)]
    for racer in racers:
        racer.start()
    told = sorted(answers.get(timeout=60) for _ in range(4))
    for racer in racers:
        racer.join()
    assert told == ["DPM-506", "charged", "charged", "won"]
    assert sorted(e["binding"] for e in Ledger(path).entries()) == sorted(
        f"{index}-{turn}" for index in range(2) for turn in range(5)
    )
    assert [entry["binding"] for entry in capped.entries()] == ["b"]


def test_a_failed_write_charges_nothing_and_keeps_the_old_lines(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    before = b"".join(_three(path))

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dpmerge.common.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        _reserve(Ledger(path))
    assert path.read_bytes() == before


def test_abandoned_trainings_stay_spent_and_are_not_gone_on_with(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl").create()
    first = _reserve(ledger, reservation="r")
    ledger.abandon()
    ledger.abandon()
    with pytest.raises(DpmergeError, match="is closed"):
        _reserve(ledger, reservation="r")
    assert _reserve(ledger).id != first.id
    assert _kinds(ledger) == ["reserve", "abandoned", "reserve"]


def test_a_damaged_reservation_file_is_refused(tmp_path):
    assert reservation_id(tmp_path) == reservation_id(tmp_path)
    assert (tmp_path / "reservation").stat().st_mode & 0o077 == 0
    (tmp_path / "reservation").write_text("")
    with pytest.raises(DpmergeError, match="DPM-504"):
        reservation_id(tmp_path)


def test_a_ledger_that_is_not_there_has_not_spent_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    first = Reservation("r", "b", {}, is_new=True)
    for asked in (
        ledger.entries,
        ledger.head,
        ledger.bound,
        ledger.abandon,
        lambda: _reserve(ledger),
        lambda: ledger.find("r"),
        lambda: ledger.released(first, "hash"),
        lambda: ledger.bind(Bound(dataset="shop", place="/data")),
        lambda: ledger.check_bound(Bound(dataset="shop", place="/data")),
    ):
        with pytest.raises(DpmergeError, match="DPM-504"):
            asked()
    assert not ledger.exists()


def test_a_ledger_is_created_once_and_knows_whose_it_is(tmp_path):
    shop = Bound(dataset="shop", place="/data/shop.csv")
    ledger = Ledger(tmp_path / "ledger.jsonl").create(shop)
    assert (ledger.bound(), ledger.path.stat().st_mode & 0o077) == (shop, 0)
    with pytest.raises(DpmergeError, match=r"DPM-504: the ledger .* exists"):
        ledger.create(shop)
    with pytest.raises(DpmergeError, match="is that of data set 'shop'"):
        _reserve(ledger, dataset="other")
    first = _reserve(ledger, reservation="r")
    ledger.bind(Bound(dataset="shop", place="/elsewhere"))
    assert not _reserve(ledger, reservation="r").is_new
    ledger.released(first, "hash")
    ledger.abandon()
    assert _kinds(ledger) == ["bound", "reserve", "bound", "released"]
    with pytest.raises(DpmergeError, match="is bound to data set 'shop' at /elsewhere"):
        ledger.check_bound(shop)


def test_heads_of_equal_bindings_differ(tmp_path):
    shop = Bound(dataset="shop", place="/data/shop.csv")
    assert len({Ledger(tmp_path / name).create(shop).head() for name in "ab"}) == 2


@pytest.mark.parametrize("target", ["there.jsonl", "a volume that is not mounted/ledger.jsonl", None])
def test_a_ledger_is_neither_begun_nor_continued_in_the_place_of_a_link_or_a_pipe(tmp_path, target):
    path, shop = tmp_path / "ledger.jsonl", Bound(dataset="shop", place="/data")
    before = Ledger(tmp_path / "there.jsonl").create(shop).path.read_bytes()
    if target is None:
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / target)
    ledger = Ledger(path)
    for act in (lambda: ledger.create(shop), lambda: ledger.bind(shop), lambda: _reserve(ledger), ledger.entries):
        with pytest.raises(DpmergeError, match="DPM-504"):
            act()
    assert path.is_symlink() == (target is not None)
    assert (tmp_path / "there.jsonl").read_bytes() == before
