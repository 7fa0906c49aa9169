"""A file of somebody else is read only if it is a plain file of a stated size, and at once."""

import os
from pathlib import Path

import pytest

from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import NO_PLACE
from dpmerge.common.untrusted.reading import names_in, read_file


def test_a_plain_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_file(tmp_path / "a", 5) == b"12345"
    with pytest.raises(DpmergeError, match="keep it under 4 bytes"):
        read_file(tmp_path / "a", 4)


def test_pipes_devices_links_and_sparse_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    (tmp_path / "plain").write_bytes(b"x")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    for name in ("pipe", "zero", "link", "sparse"):
        with pytest.raises(DpmergeError, match="DPM-401"):
            read_file(tmp_path / name, 100)
    assert read_file(tmp_path / "link", 100, links=True) == b"x"
    with pytest.raises(DpmergeError, match="no regular file"):
        read_file(tmp_path / "zero", 100, links=True)


def test_a_file_that_says_it_is_empty_is_not_read_for_ever() -> None:
    with pytest.raises(DpmergeError, match="more than 3 bytes"):
        read_file(Path("/proc/self/status"), 3)


def test_a_folder_of_any_size_costs_as_much_as_is_asked_for(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / str(number)).touch()
    assert len(names_in(tmp_path, 9)) == 10


def test_a_disk_that_fails_while_reading_is_told_with_the_file() -> None:
    with pytest.raises(OSError, match="Input/output error") as caught:
        read_file(Path("/proc/self/mem"), 100)
    assert caught.value.filename == "/proc/self/mem"
    assert caught.value.errno in NO_PLACE
