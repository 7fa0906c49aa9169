"""The spool: durable, idempotent, first release wins, and a merge depends on nothing else."""

import os
from pathlib import Path

import pytest

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import release_hash
from dpmerge.common.untrusted.parsing import ReleaseRefused
from dpmerge.server.intake import spool as module
from dpmerge.server.intake.spool import Spool

FILES = {"adapter_config.json": b"{}", "statement.json": b'{"party": "shop"}'}
OTHER = FILES | {"statement.json": b'{"party": "shop", "epsilon": 2}'}


def test_the_same_release_again_changes_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "deep" / "spool")
    assert spool.accept("shop", FILES) == release_hash(FILES)
    before = sorted(tmp_path.rglob("*"))
    assert Spool(tmp_path / "deep" / "spool").accept("shop", FILES) == release_hash(FILES)
    assert sorted(tmp_path.rglob("*")) == before
    assert spool.releases() == {"shop": FILES}


def test_a_second_release_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.accept("shop", FILES)
    with pytest.raises(ReleaseRefused, match="shop") as caught:
        spool.accept("shop", OTHER)
    assert caught.value.reason == "second-release"
    assert spool.releases() == {"shop": FILES}


def test_parties_come_in_order_of_their_names(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for party in ("shop", "bank", "library"):
        spool.accept(party, FILES | {"statement.json": party.encode()})  # a statement names its party
    assert list(spool.releases()) == ["bank", "library", "shop"]


@pytest.mark.parametrize("party", ["../shop", "a/b", "", ".", "Shop", "a.tmp"])
def test_names_that_are_paths_are_refused(tmp_path: Path, party: str) -> None:
    with pytest.raises(ReleaseRefused, match="path"):
        Spool(tmp_path / "spool").accept(party, FILES)


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    digest = spool.accept("shop", FILES)
    (tmp_path / "releases" / digest / "statement.json").write_bytes(b"{}")
    with pytest.raises(ReleaseRefused, match="corrupted"):
        spool.releases()


def test_a_crash_before_the_entry_is_healed_by_resending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "replace_file", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            spool.accept("shop", FILES)
    assert spool.releases() == {}
    spool.accept("shop", FILES)
    assert spool.releases() == {"shop": FILES}


def test_every_file_and_folder_is_synced_before_accept_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    spool = Spool(tmp_path)
    monkeypatch.setattr(os, "fsync", record)
    spool.accept("shop", FILES)
    assert {*FILES, "releases", "shop.tmp", "parties"} <= set(synced)
    assert synced.index("releases") < synced.index("shop.tmp") < synced.index("parties")


@pytest.mark.parametrize("name", ["README.md", "signature.json", "statement.json"])
def test_a_flipped_bit_in_any_file_is_noticed_and_healed_by_the_same_bytes(tmp_path: Path, name: str) -> None:
    sent = FILES | {"README.md": b"a card", "signature.json": b"a seal"}
    spool = Spool(tmp_path)
    path = tmp_path / "releases" / spool.accept("shop", sent) / name
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(ReleaseRefused, match="corrupted"):
        spool.release("shop")
    spool.accept("shop", sent)
    assert spool.release("shop") == sent


def test_a_removed_file_and_a_removed_folder_are_healed_too(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    folder = tmp_path / "releases" / spool.accept("shop", FILES)
    (folder / "statement.json").unlink()
    spool.accept("shop", FILES)
    assert spool.releases() == {"shop": FILES}
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    spool.accept("shop", FILES)
    assert spool.releases() == {"shop": FILES}


def test_the_same_content_under_another_signature_is_a_second_release(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.accept("shop", FILES | {"signature.json": b"one"})
    with pytest.raises(ReleaseRefused, match="second-release"):
        spool.accept("shop", FILES | {"signature.json": b"two"})


def test_what_a_file_manager_leaves_is_nobodys_release(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    folder = tmp_path / "releases" / spool.accept("shop", FILES)
    for place in (tmp_path / "parties", tmp_path / "withdrawn", folder):
        (place / ".DS_Store").write_bytes(b"\0")
        (place / "subfolder").mkdir()
    assert (spool.releases(), spool.withdrawn(), list(spool.folders())) == ({"shop": FILES}, frozenset(), ["shop"])


def test_a_damaged_entry_is_named(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.accept("shop", FILES)
    (tmp_path / "parties" / "shop").write_bytes(b"\xff" * 40)
    with pytest.raises(ReleaseRefused, match=r"corrupted.*backup"):
        spool.hashes()


def test_a_repeated_acceptance_is_on_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call wrote everything and died before its folders were on disk."""
    spool, fsync, synced = Spool(tmp_path), os.fsync, []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        digest = spool.accept("shop", FILES)

    def record(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    spool.accept("shop", FILES)
    folder = tmp_path / "releases" / digest
    wanted = {folder, folder.parent, tmp_path / "parties", tmp_path / "parties" / "shop", *folder.iterdir()}
    assert wanted <= set(synced)


def test_half_written_releases_of_killed_processes_are_removed(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    leftover = tmp_path / "releases" / f".{'a' * 64}.0123456789abcdef.tmp"
    leftover.mkdir()
    (leftover / "statement.json").touch()
    spool.accept("shop", FILES)
    assert not leftover.exists()


@pytest.mark.parametrize("damage", [b"", b"\0" * 130, b"no entry at all\n"])
def test_a_damaged_entry_is_healed_by_the_same_bytes_and_by_no_others(tmp_path: Path, damage: bytes) -> None:
    spool = Spool(tmp_path)
    spool.accept("shop", FILES)
    entry = tmp_path / "parties" / "shop"
    sound = entry.read_bytes()
    entry.write_bytes(damage)
    with pytest.raises(ReleaseRefused, match="corrupted"):
        spool.release("shop")
    with pytest.raises(ReleaseRefused, match="corrupted"):
        spool.accept("shop", OTHER)
    assert spool.holds("shop", FILES)
    spool.accept("shop", FILES)
    assert entry.read_bytes() == sound
    assert spool.releases() == {"shop": FILES}


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "broken link"])
def test_an_entry_that_is_no_plain_file_is_not_absent(tmp_path: Path, kind: str) -> None:
    spool = Spool(tmp_path / "spool")
    spool.accept("shop", FILES)
    entry = tmp_path / "spool" / "parties" / "shop"
    entry.rename(tmp_path / "kept")
    match kind:
        case "pipe":
            os.mkfifo(entry)
        case "folder":
            entry.mkdir()
        case "link":
            entry.symlink_to(tmp_path / "kept")
        case _:
            entry.symlink_to(tmp_path / "nowhere")
    for asked in (spool.find, spool.release, lambda party: spool.accept(party, OTHER)):
        with pytest.raises(DpmergeError, match=r"DPM-401: .*/parties/shop is (no regular file|a link)"):
            asked("shop")
