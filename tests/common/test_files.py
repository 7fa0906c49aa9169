"""Files are replaced in one step, with the rights asked for, and durably where that is asked."""

import errno
import os
from pathlib import Path

import pytest

from dpmerge.client.party.checkpoint import erase
from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import NO_SPACE, append_file, real_folder, replace_file, storage_refusal
from dpmerge.server.intake.receipts import Receipts
from dpmerge.server.intake.spool import Spool


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    replace_file(tmp_path / "note", "old")

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os if call == "fsync" else Path, call, fail)
    with pytest.raises(OSError, match="no space"):
        replace_file(tmp_path / "note", "new", durable=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"note": "old"}


def test_texts_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    for data, expected in (("ε", "ε".encode()), (b"\0\1", b"\0\1")):
        replace_file(tmp_path / "note", data)
        assert (tmp_path / "note").read_bytes() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_the_rights_are_those_asked_for_even_after_an_interrupted_writer(tmp_path: Path, mode: int) -> None:
    (tmp_path / "note.tmp").write_text("left behind by a writer that was killed")
    (tmp_path / "note.tmp").chmod(0o666)
    replace_file(tmp_path / "note", b"secret", mode=mode)
    assert (tmp_path / "note").stat().st_mode & 0o777 == mode


def test_file_then_folder_are_synced_only_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino == tmp_path.stat().st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    replace_file(tmp_path / "note", "quick")
    assert synced == []
    replace_file(tmp_path / "note", "kept", durable=True)
    assert synced == [False, True]


def test_a_full_disk_is_told_with_the_file_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as the operating system does: without a name

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        replace_file(tmp_path / "note", "new", durable=True)
    assert caught.value.errno in NO_SPACE
    told = storage_refusal(caught.value)
    assert (told.code, told.problem) == ("DPM-305", f"{tmp_path / 'note'} cannot be written: No space left on device")
    assert "--resume" in told.fix


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a file that planted links lead to, and that nobody may change."""
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "victim"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("name", ["note", "note.tmp"])
def test_a_planted_link_is_replaced_and_not_written_through(tmp_path: Path, victim: Path, name: str) -> None:
    (tmp_path / name).symlink_to(victim)
    replace_file(tmp_path / "note", "new")
    assert (victim.read_text(), (tmp_path / "note").read_text()) == ("precious", "new")
    assert not (tmp_path / "note").is_symlink()


def test_a_planted_log_is_not_appended_to(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "party.log").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        append_file(tmp_path / "party.log", "line")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["state", "state.tmp"])
def test_erasing_overwrites_nothing_behind_a_link(tmp_path: Path, victim: Path, name: str) -> None:
    (tmp_path / name).symlink_to(victim)
    erase(tmp_path / "state")
    assert victim.read_text() == "precious"
    assert not (tmp_path / name).is_symlink()


@pytest.mark.parametrize("place", ["releases", "parties", "withdrawn"])
def test_a_spool_writes_into_folders_of_its_own_only(tmp_path: Path, victim: Path, place: str) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / place).symlink_to(victim.parent)
    with pytest.raises(DpmergeError, match="is a link"):
        Spool(tmp_path / "spool")


def test_receipts_and_folders_that_are_links_are_refused(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "receipts").symlink_to(victim.parent)
    for make in (Receipts, real_folder):
        with pytest.raises(DpmergeError, match="is a link"):
            make(tmp_path / "receipts")
