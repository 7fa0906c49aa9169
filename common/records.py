"""Records of a party's own: a CSV, JSONL or Parquet file, or a data-set folder.

Nothing that leaves a party may depend on a single record, so a record that cannot be used (its text is empty, its label
is not declared, its line is broken) is left out in silence: no message, no count. What is refused is what the party
itself got wrong about the whole file, and a refusal names columns and declared labels, never a row.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dpmerge.common.data_path import SPLIT_MARK, data_path, files_at
from dpmerge.common.errors import DpmergeError, closest

DELIMITERS = ",;\t"
MAX_FIELD_CHARACTERS = 2**31 - 1  # csv refuses the file at 131,072: one long record must not stop a party
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}

Table: TypeAlias = tuple[list[str], Iterable[Mapping[str, Any]]]  # column names, rows


@dataclass(frozen=True)
class Records:
    """Texts and their classes, row by row.

    Attributes:
        texts: The texts.
        labels: Class `k` is the k-th declared label.
        users: Whose record it is, numbered from 0 in order of appearance; None where users are not told apart.
    """

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    users: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.labels):
            raise ValueError(f"Expected {len(self.labels)} texts in Records, one per label, got {len(self.texts)}.")
        if self.users is not None and len(self.users) != len(self.labels):
            raise ValueError(f"Expected {len(self.labels)} users in Records, one per label, got {len(self.users)}.")

    def __len__(self) -> int:
        return len(self.texts)


def read_records(
    path: str | Path, *, text: str, label: str, labels: Mapping[str, str], user: str | None = None
) -> Records:
    """Read labelled texts from a party's own file or folder, without any use of the network.

    Args:
        path: A `.csv` or `.tsv` file (header line, UTF-8; comma, semicolon or tab between), a `.jsonl`, `.json` or
            `.parquet` file, a folder of such files, or one written by `datasets.save_to_disk`. A folder may name its
            split as `folder::split`; without, `train` is taken, or the only one.
        text: Name of the column with the text.
        label: Name of the column with the class.
        labels: Declared label → description. Cells are compared as strings; the order gives the class indices.
        user: Name of the column that tells whose record it is, or None. Cells are compared as strings, spaces around
            them aside: two spellings are two users. A record without a user is unusable.

    Returns:
        The usable records in the order of the file; there may be none, since whether there is one is private.

    Raises:
        DpmergeError: DPM-203 if the file cannot be read or a column is missing.

    Deviations:
        `labels` has no default: a set of labels read off private records would itself be private.
    """
    columns, rows = _read_table(path)
    for key, name in (("text", text), ("label", label), ("user", user)):
        if name is not None and name not in columns:
            raise _missing_column(path, key, name, columns)
    index = {name: position for position, name in enumerate(labels)}
    usable = [
        (_encodable(content.strip()), index[kind], owner)
        for content, kind, owner in ((row.get(text), str(row.get(label)).strip(), _owner(row, user)) for row in rows)
        if isinstance(content, str) and content.strip() and kind in index and owner is not None
    ]
    texts, classes, owners = zip(*usable, strict=True) if usable else ((), (), ())
    if user is None:
        return Records(texts, classes)
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    return Records(texts, classes, tuple(numbers[owner] for owner in owners))


def read_texts(path: str | Path, *, text: str) -> tuple[str, ...]:
    """Read texts without labels: the lines of a `.txt` file, or a column of what `read_records` takes.

    Raises:
        DpmergeError: DPM-203 if the file cannot be read, or the column is missing.
    """
    if SPLIT_MARK not in str(path) and Path(path).suffix.lower() == ".txt":
        try:
            lines: Iterable[Any] = Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror or type(error).__name__}"
            raise DpmergeError("DPM-203", problem, "check the path and the permissions") from None
    else:
        columns, rows = _read_table(path)
        if text not in columns:
            raise _missing_column(path, "text", text, columns)
        lines = (row.get(text) for row in rows)
    return tuple(_encodable(line.strip()) for line in lines if isinstance(line, str) and line.strip())


def _encodable(text: str) -> str:
    """Put a question mark where a lone surrogate stands, on which a tokenizer would stop."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _owner(row: Mapping[str, Any], user: str | None) -> str | None:
    """Tell whose record a row is: "" where users are not told apart, None where the cell is empty (or NaN)."""
    if user is None:
        return ""
    cell = row.get(user)
    return None if cell is None or cell != cell else str(cell).strip() or None


def _read_table(path: str | Path) -> Table:
    """Read one file, or the files of a folder's split; turn failures into refusals that quote nothing."""
    named = data_path(path)
    source = named.place
    try:
        if source.is_dir():
            return _read_folder(source, named.split)
        if source.suffix.lower() in READERS and SPLIT_MARK not in str(path):
            return READERS[source.suffix.lower()](source)
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror or type(error).__name__}"
        raise DpmergeError("DPM-203", problem, "check the path and the permissions") from None
    except (csv.Error, ValueError, KeyError, TypeError):
        raise DpmergeError("DPM-203", f"{path} is damaged, or not of the kind it seems", "write it anew") from None
    except ImportError as error:
        problem = f"{path} needs the package {error.name}, which is not installed"
        raise DpmergeError("DPM-203", problem, "run pip install 'dpmerge[datasets]'") from None
    problem = f"{path} is neither a {', '.join(READERS)} file nor a folder"
    raise DpmergeError("DPM-203", problem, "name an existing file of these kinds, or a data-set folder")


def _read_csv(path: Path) -> Table:
    """Read a CSV file; the separator is the one that makes the most of the header line."""
    previous = csv.field_size_limit(MAX_FIELD_CHARACTERS)
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
            start, header = 0, stream.readline()
            while header and not header.strip():
                start, header = stream.tell(), stream.readline()
            delimiter = max(DELIMITERS, key=lambda mark: len(next(csv.reader([header], delimiter=mark), [])))
            stream.seek(start)
            reader = csv.DictReader(stream, delimiter=delimiter, skipinitialspace=True)
            reader.fieldnames = columns = [name.strip() for name in reader.fieldnames or []]
            return columns, list(reader)
    finally:
        csv.field_size_limit(previous)


def _read_json(path: Path) -> Table:
    """Read one JSON object per line, or one array of objects; whatever is no object counts as an unusable record."""
    content = path.read_text(encoding="utf-8-sig", errors="replace")
    rows: list[Any] = []
    is_array = path.suffix.lower() == ".json" and content.lstrip().startswith("[")
    for part in [content] if is_array else content.split("\n"):
        try:
            parsed = json.loads(part)
        except (ValueError, RecursionError):
            continue
        rows += parsed if isinstance(parsed, list) else [parsed]
    return _table(row for row in rows if isinstance(row, dict))


def _read_parquet(path: Path) -> Table:
    """Read a Parquet file."""
    from pyarrow import parquet  # type: ignore[import-untyped]  # has no stubs

    return _table(parquet.ParquetFile(path).read().to_pylist())


READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _read_folder(folder: Path, split: str) -> Table:
    """Read a split of a data-set folder.

    Only what `save_to_disk` wrote goes through `datasets`. Its loaders of plain files are avoided: they follow remote
    addresses in a folder's README, log what is wrong with a row, and may keep private records in a cache of their own.
    """
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        import datasets

        loaded = datasets.load_from_disk(str(folder))
        splits = loaded if isinstance(loaded, dict) else {"train": loaded}
        chosen = splits[_choose_split(folder, list(splits), split)]
        return list(chosen.column_names), chosen
    files = _files_by_split(folder)
    if not files:
        problem = f"{folder} holds neither a saved data set nor a {', '.join(READERS)} file"
        raise DpmergeError("DPM-203", problem, "write it with save_to_disk, or put such files into it")
    paths = files[_choose_split(folder, list(files), SPLIT_WORDS.get(split, split))]
    return _table(row for path in paths for row in READERS[path.suffix.lower()](path)[1])


def files_of_split(folder: Path, split: str) -> list[Path]:
    """Return the files that hold a split of a data-set folder; none where the folder has no such split."""
    if (folder / "dataset_dict.json").is_file():  # `save_to_disk` writes a folder for each split
        return files_at(folder / split) if (folder / split).is_dir() else []
    if (folder / "state.json").is_file():
        return files_at(folder)
    return _files_by_split(folder).get(SPLIT_WORDS.get(split, split), [])


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in READERS:
            files.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    return files


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


def _table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Collect rows and the columns that any of them has."""
    kept = list(rows)
    return list(dict.fromkeys(key for row in kept for key in row)), kept


def _missing_column(path: str | Path, key: str, name: str, columns: list[str]) -> DpmergeError:
    """Name the columns that exist and the one that was probably meant."""
    fix = f"set {key} to one of {_some(columns)}{closest(name, columns)}" if columns else "begin it with a header line"
    return DpmergeError("DPM-203", f"{path} has no column {name!r}", fix)


def _some(columns: list[str]) -> str:
    """List column names, the first twenty at most."""
    return ", ".join(map(repr, columns[:20])) + (" …" if len(columns) > 20 else "")
