"""Nothing that was promised is lost by a power cut or a full disk, whenever it comes."""

import importlib
from pathlib import Path

import pytest

from tests.signed_releases import release

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    power_cuts = importlib.import_module("power_cuts")
all_faults, Disk = power_cuts.all_faults, power_cuts.Disk


def test_no_promise_is_broken_by_a_fault_at_any_step(tmp_path):
    num_faults, broken = all_faults(tmp_path, release(), iter([None]), every=3)
    assert broken == []
    assert num_faults > 100


@pytest.mark.slow
def test_no_promise_is_broken_by_a_fault_after_a_kill(tmp_path):
    num_faults, broken = all_faults(tmp_path, release(), iter(range(3, 120, 12)))
    assert broken == []
    assert num_faults > 500


@pytest.mark.parametrize("left_out", ["files", "folders"])
def test_a_sync_that_is_left_out_breaks_a_promise(tmp_path, monkeypatch, left_out):
    sync = Disk.sync

    def lazy(disk, path):
        if disk.names and path.is_dir() == (left_out == "folders"):
            return  # the drive says yes and does nothing
        sync(disk, path)

    def begin(disk):
        monkeypatch.setattr(Disk, "sync", sync)
        for path in (disk.root, *disk.root.rglob("*")):
            disk.sync(path)
        monkeypatch.setattr(Disk, "sync", lazy)

    monkeypatch.setattr(Disk, "sync_all", begin)
    assert all_faults(tmp_path, release(), iter([None]), every=10)[1]
