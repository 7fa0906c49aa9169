"""One reading of a path: what is charged, compared and read is the same place."""

import os

import pytest

from dpmerge.common.data.data_path import data_path, file_ids, files_at, place_of, share_files
from dpmerge.common.data.records import read_records, read_texts
from dpmerge.common.errors import DpmergeError

LABELS = {"1": "bad", "5": "good"}


@pytest.mark.parametrize("path", ["{0}/reviews::x::train", "::train", "{0}/a::b::c.txt"])
def test_a_path_with_two_marks_is_read_by_nobody(tmp_path, path):
    for name in ("reviews::x", "reviews"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.csv").write_text("text,label\nx,1\n")
    (tmp_path / "a::b::c.txt").write_text("private")
    path = path.format(tmp_path)
    for read in (
        place_of,
        lambda path: read_records(path, text="text", label="label", labels=LABELS),
        lambda path: read_texts(path, text="text"),
    ):
        with pytest.raises(DpmergeError, match="DPM-203"):
            read(path)


def test_a_text_file_with_a_mark_in_its_name_is_a_split_of_what_is_before_it(tmp_path):
    (tmp_path / "reviews::x.txt").write_text("private")
    path = str(tmp_path / "reviews::x.txt")
    assert (place_of(path), data_path(path).split) == (tmp_path / "reviews", "x.txt")
    with pytest.raises(DpmergeError, match="DPM-203"):
        read_texts(path, text="text")


def test_files_are_the_same_under_any_name_and_other_files_are_not(tmp_path):
    (tmp_path / "data").mkdir()
    one = tmp_path / "data" / "one.csv"
    one.write_text("x")
    (tmp_path / "soft").symlink_to(one)
    os.link(one, tmp_path / "hard")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "inner").symlink_to(tmp_path / "data", target_is_directory=True)
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data", target_is_directory=True)
    (tmp_path / "copy").write_text("x")
    for other in ("data", "soft", "hard", "linked", "data/one.csv"):
        assert share_files(one, (tmp_path / other).resolve())
    assert share_files(tmp_path / "linked", tmp_path / "data")
    for other in ("copy", "absent", "linked2"):
        assert not share_files(one, tmp_path / other)
    assert len(files_at(tmp_path / "data")) == 1
    assert file_ids([tmp_path / "absent", tmp_path / ("x" * 300), tmp_path]) == frozenset()
