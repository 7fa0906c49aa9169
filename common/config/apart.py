"""Whether what a federation file calls public is a party's private data under another name.

A file is found by its place and by its inode: another spelling, a link, a hard link, a folder around it or a file in
it. A copy is another file, and no configuration can tell it apart: in a deployment the site's policy allows public
texts by their hash (`client/budget/policy.py`), and test files are read by the server, at its own place, only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dpmerge.common.data.data_path import DataPath, FileId, data_path, file_ids, files_at
from dpmerge.common.data.tabular.places import SPLIT_WORDS, files_of_split


class OwnedFiles:
    """Files and folders with their owners.

    Args:
        owners: Party and absolute data path, which may name a split.
    """

    def __init__(self, owners: Iterable[tuple[str, str]]) -> None:
        self._at: dict[Path, list[tuple[str, DataPath]]] = {}
        self._above: dict[Path, str] = {}
        self._ids: dict[FileId, str] = {}
        for party, path in owners:
            named = data_path(path)
            place = named.place.resolve()
            self._at.setdefault(place, []).append((party, named))
            self._above |= dict.fromkeys(place.parents, party)
            self._ids |= dict.fromkeys(file_ids(_read_at(named)), party)

    def owner_of(self, path: str, *, split_may_differ: bool = False) -> str | None:
        """Return who owns a file that the path reads; None if nobody does.

        Args:
            path: An absolute data path.
            split_may_differ: Whether another split of an owned folder is free, if both are named and no file is in
                both.
        """
        named = data_path(path)
        place = named.place.resolve()
        at = self._at.get(place, [])
        for party, owned in at:
            if not (split_may_differ and _are_two_splits(named, owned)):
                return party
        if not at:
            for around in place.parents:
                if around in self._at:
                    return self._at[around][0][0]
            if place in self._above:
                return self._above[place]
        return next((self._ids[one] for one in file_ids(_read_at(named)) if one in self._ids), None)


def _read_at(named: DataPath) -> list[Path]:
    return files_of_split(named.place, named.split) if named.split else files_at(named.place)


def _are_two_splits(one: DataPath, other: DataPath) -> bool:
    first, second = (SPLIT_WORDS.get(named.split, named.split) for named in (one, other))
    return bool(first) and bool(second) and first != second
