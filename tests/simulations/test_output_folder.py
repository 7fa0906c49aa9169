"""Overwriting a run removes its files, never the record of what it spent."""

import contextlib
import errno
import itertools
import os

import pytest

from dpmerge.client.budget.ledger import Ledger
from dpmerge.common.errors import DpmergeError
from dpmerge.simulations import output_folder
from dpmerge.simulations.output_folder import MARKER, RUN_FILE, check_output, locked, prepare_output


def test_overwriting_keeps_every_ledger_and_closes_what_was_never_released(tmp_path):
    out = tmp_path / "run"
    prepare_output(out, "new")
    (out / "parties" / "shop").mkdir(parents=True)
    ledger = Ledger(out / "parties" / "shop" / "ledger.jsonl").create()
    ledger.reserve(dataset="shop", binding="b", charge={"epsilon": 1.0})
    (out / "parties" / "shop" / "checkpoint.safetensors").touch()

    prepare_output(out, "overwrite")
    assert [entry["kind"] for entry in ledger.entries()] == ["reserve", "abandoned"]
    assert not (out / "parties" / "shop" / "checkpoint.safetensors").exists()
    assert (out / "parties" / "shop" / "ledger.jsonl").stat().st_mode & 0o077 == 0
    assert ledger.reserve(dataset="shop", binding="b", charge={"epsilon": 1.0}).is_new


@pytest.fixture
def run(tmp_path):
    """A run of two parties, each with a ledger of one open charge."""
    out = tmp_path / "run"
    prepare_output(out, "new")
    (out / RUN_FILE).write_text("{}")
    for party in ("library", "shop"):
        (out / "parties" / party / "release").mkdir(parents=True)
        (out / "parties" / party / "release" / "statement.json").touch()
        Ledger(ledger_of(out, party)).create().reserve(dataset=party, binding="b", charge={"epsilon": 1.0})
    return out


def ledger_of(out, party):
    return out / "parties" / party / "ledger.jsonl"


def test_a_damaged_ledger_stops_an_overwrite_before_anything_is_removed(run):
    before = ledger_of(run, "library").read_bytes()
    ledger_of(run, "shop").write_bytes(b"damaged\n")
    with pytest.raises(DpmergeError, match="DPM-504"):
        prepare_output(run, "overwrite")
    assert ledger_of(run, "library").read_bytes().startswith(before)
    assert ledger_of(run, "shop").read_bytes() == b"damaged\n"
    assert (run / "parties" / "shop" / "release" / "statement.json").exists()


@pytest.mark.parametrize("nth", range(1, 8))
def test_an_overwrite_that_stops_anywhere_keeps_every_ledger(run, monkeypatch, nth):
    calls = itertools.count(1)

    def failing(real):
        def call(*args, **options):
            if next(calls) == nth:
                raise PermissionError(errno.EPERM, "not permitted")
            return real(*args, **options)

        return call

    before = {party: ledger_of(run, party).read_bytes() for party in ("library", "shop")}
    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir", "rename", "replace"):
            patch.setattr(os, name, failing(getattr(os, name)))
        with contextlib.suppress(DpmergeError):
            prepare_output(run, "overwrite")
    for party, content in before.items():
        assert ledger_of(run, party).read_bytes().startswith(content)
    prepare_output(run, "overwrite")
    left = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert {path for path in left if not path.endswith(".lock")} == {
        ".dpmerge",
        "parties/library/ledger.jsonl",
        "parties/shop/ledger.jsonl",
    }


def test_a_half_removed_run_is_not_gone_on_with(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(output_folder.shutil, "rmtree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_output(run, "overwrite")
    assert not (run / RUN_FILE).exists()


def test_a_ledger_behind_a_link_is_not_written(run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    ledger_of(run, "shop").parent.rename(elsewhere)
    (run / "parties" / "shop").symlink_to(elsewhere)
    before = (elsewhere / "ledger.jsonl").read_bytes()
    with pytest.raises(DpmergeError, match=r"DPM-301.*link"):
        prepare_output(run, "overwrite")
    assert (elsewhere / "ledger.jsonl").read_bytes() == before


def test_two_processes_do_not_work_in_one_folder(run):
    with locked(run), pytest.raises(DpmergeError, match="DPM-301: another process"), locked(run):
        raise AssertionError("both hold it")
    with locked(run):
        pass


def test_leftovers_of_killed_processes_are_removed(run):
    places = [run / ".merged.0123456789abcdef.tmp", run / "parties" / "shop" / ".release.0123456789abcdef.tmp"]
    for place in places:
        place.mkdir()
    prepare_output(run, "resume")
    assert not any(place.exists() for place in places)


def test_the_output_folder_is_replaced_only_if_it_is_a_run(tmp_path):
    run = tmp_path / "a" / "run"
    prepare_output(run, "new")
    prepare_output(run, "resume")
    (run / "results.json").write_text("{}")
    with pytest.raises(DpmergeError, match="DPM-301"):
        prepare_output(run, "new")
    prepare_output(run, "overwrite")
    assert [path.name for path in run.iterdir()] == [MARKER]
    (run / MARKER).unlink()
    (run / "results.json").write_text("someone else's")
    with pytest.raises(DpmergeError, match="holds no run"):
        prepare_output(run, "overwrite")
    assert (run / "results.json").exists()


def test_a_link_is_not_followed_into_removal(tmp_path):
    prepare_output(tmp_path / "run", "new")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(DpmergeError, match="DPM-301"):
        check_output(tmp_path / "link", "overwrite")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DpmergeError, match="DPM-301"):
        prepare_output(tmp_path / "file" / "run", "new")
