"""From a path to tables: one file, or the files of a folder's split."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dpmerge.common.data.data_path import SPLIT_MARK, data_path, files_at
from dpmerge.common.data.tabular.columnar import read_parquet, read_saved
from dpmerge.common.data.tabular.delimited import read_delimited
from dpmerge.common.data.tabular.json_records import COLUMNS, LINES, read_json_array, read_json_columns, read_json_lines
from dpmerge.common.data.tabular.rows import Table, check_columns
from dpmerge.common.errors import DpmergeError

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
Wanted = Mapping[str, str]
READERS: dict[str, Callable[[Path, Wanted], Table]] = {
    ".csv": lambda path, _: read_delimited(path),
    ".tsv": lambda path, _: read_delimited(path),
    ".jsonl": lambda path, _: read_json_lines(path),
    ".ndjson": lambda path, _: read_json_lines(path),
    ".json": lambda path, _: read_json_array(path),
    ".parquet": lambda path, wanted: read_parquet(path, wanted.values()),
}
FORMS: dict[str, Callable[[Path, Wanted], Table]] = {
    LINES: lambda path, _: read_json_lines(path),
    COLUMNS: lambda path, wanted: read_json_columns(path, wanted.values()),
}
"""What may stand behind the mark of a `.json` file."""


def check_place(path: str | Path) -> None:
    """Refuse a path that cannot be data, by its name and kind alone: not a byte of it is read.

    Raises:
        DpmergeError: DPM-203 if nothing is there, or nothing of a known kind.
    """
    source, mark = data_path(path)
    suffix = source.suffix.lower()
    if source.is_dir() or (source.is_file() and _reader(suffix, mark) is not None):
        return
    if not source.exists() and (not suffix or suffix in READERS):
        raise DpmergeError("DPM-203", f"{path} cannot be read: No such file or directory", "check the path")
    problem = f"{path} is neither a {', '.join(READERS)} file nor a folder"
    raise DpmergeError("DPM-203", problem, "name an existing file of these kinds, or a data-set folder")


def tables(path: str | Path, wanted: Wanted) -> Iterator[tuple[str, Table]]:
    """Yield the tables of a place, each with the name of its file below it ("" for a single one).

    Args:
        path: A file, or a folder, with `::` and a split or form behind it.
        wanted: Setting → column that is to be read, such as {"text": "body"}.

    Raises:
        DpmergeError: DPM-203 if it cannot be read, or the declared schema lacks a wanted column. Of a folder's files
            one must have it, if all declare a schema.
    """
    check_place(path)
    source, mark = data_path(path)
    reader = _reader(source.suffix.lower(), mark)
    if source.is_file() and reader is not None:
        table = reader(source, wanted)
        check_columns(path, wanted, table.columns)
        yield "", table
        return
    if any((source / name).is_file() for name in ("dataset_dict.json", "state.json")):
        yield "", _saved(path, source, mark, wanted)
        return
    files = _files(source, mark)
    schemas = [READERS[file.suffix.lower()](file, wanted).columns for file in files]
    if None not in schemas:
        check_columns(path, wanted, tuple(dict.fromkeys(name for columns in schemas for name in columns or ())))
    for file, columns in zip(files, schemas, strict=True):
        present = {key: name for key, name in wanted.items() if name in (columns or ())}
        check_columns(file, present, columns)  # for those that are there twice
        yield f"{file.relative_to(source)} ", READERS[file.suffix.lower()](file, wanted)


def _reader(suffix: str, mark: str) -> Callable[[Path, Wanted], Table] | None:
    if not mark:
        return READERS.get(suffix)
    return FORMS.get(mark) if suffix == ".json" else None


def _saved(path: str | Path, folder: Path, split: str, wanted: Wanted) -> Table:
    """Read what `save_to_disk` wrote.

    Only that goes through `datasets`. Its loaders of plain files are avoided: they follow remote addresses in a
    folder's README, log what is wrong with a row, and may keep private records in a cache of their own.
    """
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    data = splits[_choose_split(folder, list(splits), split)]
    check_columns(path, wanted, tuple(data.column_names))
    return read_saved(data, wanted.values())


def files_of_split(place: Path, split: str) -> list[Path]:
    """Return the files that hold a split of a data-set folder, none where it has no such split; a file is itself.

    Args:
        place: A folder.
        split: Name of the split, or nothing.
    """
    if (place / "dataset_dict.json").is_file():  # `save_to_disk` writes a folder for each split
        return files_at(place / split) if (place / split).is_dir() else []
    if not place.is_dir() or (place / "state.json").is_file():
        return files_at(place)
    return _files_by_split(place).get(SPLIT_WORDS.get(split, split), [])


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in READERS and path.is_file():
            files.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    return files


def _files(folder: Path, split: str) -> list[Path]:
    files = _files_by_split(folder)
    if not files:
        problem = f"{folder} holds neither a saved data set nor a {', '.join(READERS)} file"
        raise DpmergeError("DPM-203", problem, "write it with save_to_disk, or put such files into it")
    return files[_choose_split(folder, list(files), SPLIT_WORDS.get(split, split))]


def _split_of(path: Path) -> str:
    """Tell a file's split by the words of its name and folders, the last one first; without a word it is `train`."""
    words = re.findall("[a-z]+", path.as_posix().lower())
    return next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), "train")


def _choose_split(folder: Path, names: list[str], wanted: str) -> str:
    """Return the split asked for; without a wish `train`, or the only one."""
    name = wanted or (names[0] if len(names) == 1 else "train")
    if name not in names:
        fix = f"name one as {folder}{SPLIT_MARK}{names[0]}; there are {', '.join(names)}"
        raise DpmergeError("DPM-203", f"{folder} has no split {name!r}", fix)
    return name
