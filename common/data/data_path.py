"""A data path, `file` or `folder::split`: read in one place, so that what is charged is what is read.

Whether two of them share records is told by the files themselves (device and inode): another spelling, a link or a hard
link is the same file. A copy is not found so; what may only be used if it is no copy is allowed by its hash instead.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import is_within

SPLIT_MARK = "::"

FileId: TypeAlias = tuple[int, int]  # device, inode


class DataPath(NamedTuple):
    """What a data path names.

    Attributes:
        place: The file or folder, as it was written.
        split: The split of the folder; empty where none is named.
    """

    place: Path
    split: str = ""


def is_data_path(text: str) -> bool:
    """Whether a text names a place, and at most one split of it.

    >>> is_data_path("data"), is_data_path("data::train"), is_data_path("data::x::train"), is_data_path("::train")
    (True, True, False, False)
    """
    place, *splits = text.split(SPLIT_MARK)
    return bool(place) and len(splits) <= 1


def data_path(path: str | Path) -> DataPath:
    """Take a data path apart.

    >>> data_path("data::train").split
    'train'

    Raises:
        DpmergeError: DPM-203 if it holds more than one split mark, or nothing before it.
    """
    text = str(path)
    if not is_data_path(text):
        fix = f"write folder{SPLIT_MARK}split, and rename folders whose names hold the mark"
        raise DpmergeError("DPM-203", f"{text} holds more than one {SPLIT_MARK}, or no place before it", fix)
    place, _, split = text.partition(SPLIT_MARK)
    return DataPath(Path(place), split)


def place_of(path: str | Path) -> Path:
    """Return the file or folder that a data path names, whatever its split, with links resolved.

    Raises:
        DpmergeError: DPM-203 as `data_path`.
    """
    return data_path(path).place.resolve()


def files_at(place: Path) -> list[Path]:
    """Return a place itself, or all the files below it if it is a folder, through linked folders too."""
    if not place.is_dir():
        return [place]
    files, seen = [], set()
    for folder, names, others in os.walk(place, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # a link back to where we were
            names.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        files += [Path(folder, name) for name in others]
    return files


def file_ids(files: Iterable[Path]) -> frozenset[FileId]:
    """Return which files these are, through links; those that do not exist are left out."""
    found = set()
    for path in files:
        try:
            status = path.stat()
        except (OSError, ValueError):  # a name too long, or one with a null character
            continue
        if not stat.S_ISDIR(status.st_mode):
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def share_files(one: Path, other: Path) -> bool:
    """Whether two resolved places are the same, lie one in the other, or have a file in common under two names.

    Args:
        one: A file or folder.
        other: Another.
    """
    return is_within(one, other) or not file_ids(files_at(one)).isdisjoint(file_ids(files_at(other)))
