"""Records of a party's own: a CSV or JSONL file, or a data-set folder.

Nothing that leaves a party may depend on a single record, so a record that cannot be used (its text is empty, its label
is not declared, its line is broken) is left out in silence: no message, no count. What is refused is what the party
itself got wrong about the whole file, and a refusal names columns and declared labels, never a row.
"""

import csv
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dpmerge.common.errors import DpmergeError

CSV_SUFFIXES = (".csv", ".tsv")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
DELIMITERS = ",;\t"
MAX_FIELD_CHARACTERS = 2**31 - 1  # csv refuses the file at 131,072: one long record must not stop a party
SPLIT_MARK = "::"

Table: TypeAlias = tuple[list[str], Iterable[Mapping[str, Any]]]  # column names, rows


@dataclass(frozen=True)
class Records:
    """Texts and their classes, row by row; class `k` is the k-th declared label."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.labels):
            raise ValueError(f"Expected {len(self.labels)} texts in Records, one per label, got {len(self.texts)}.")

    def __len__(self) -> int:
        return len(self.texts)


def read_records(path: str | Path, *, text: str, label: str, labels: Mapping[str, str]) -> Records:
    """Read labelled texts from a party's own file or folder, without any use of the network.

    Args:
        path: A `.csv` or `.tsv` file (header line, UTF-8; comma, semicolon or tab between), a `.jsonl` file, a folder
            written by `datasets.save_to_disk`, or a folder of CSV, JSONL or Parquet files. A folder may name its split
            as `folder::split`; without, `train` is taken, or the only one.
        text: Name of the column with the text.
        label: Name of the column with the class.
        labels: Declared label → description. Cells are compared as strings; the order gives the class indices.

    Returns:
        The usable records in the order of the file.

    Raises:
        DpmergeError: DPM-203 if the file cannot be read, a column is missing or not one record is usable.

    Deviations:
        `labels` has no default: a set of labels read off private records would itself be private.
    """
    columns, rows = _read_table(path)
    for key, name in (("text", text), ("label", label)):
        if name not in columns:
            raise _missing_column(path, key, name, columns)
    index = {name: position for position, name in enumerate(labels)}
    usable = [
        (content.strip(), index[kind])
        for content, kind in ((row.get(text), str(row.get(label)).strip()) for row in rows)
        if isinstance(content, str) and content.strip() and kind in index
    ]
    if not usable:
        problem = f"no record of {path} has a text in column {text!r} and one of {', '.join(index)} in column {label!r}"
        raise DpmergeError("DPM-203", problem, f"check text, label and labels; the columns are {_some(columns)}")
    texts, classes = zip(*usable, strict=True)
    return Records(texts, classes)


def _read_table(path: str | Path) -> Table:
    """Choose a reader by suffix or kind of path, and turn its failures into refusals that quote nothing."""
    place, mark, split = str(path).rpartition(SPLIT_MARK) if SPLIT_MARK in str(path) else (str(path), "", "")
    source = Path(place)
    try:
        if source.is_dir():
            return _read_folder(source, split)
        if source.suffix.lower() in CSV_SUFFIXES and not mark:
            return _read_csv(source)
        if source.suffix.lower() in JSONL_SUFFIXES and not mark:
            return _read_jsonl(source)
    except UnicodeDecodeError:
        raise DpmergeError("DPM-203", f"{path} is not encoded in UTF-8", "save it as UTF-8") from None
    except csv.Error:
        raise DpmergeError("DPM-203", f"{path} is not a CSV file", "save it as CSV with a header line") from None
    except OSError as error:
        raise DpmergeError(
            "DPM-203", f"{path} cannot be read: {error.strerror}", "check path and permissions"
        ) from None
    problem = f"{path} is neither a {', '.join(CSV_SUFFIXES + JSONL_SUFFIXES)} file nor a folder"
    raise DpmergeError("DPM-203", problem, "name an existing file of these kinds, or a data-set folder")


def _read_csv(path: Path) -> Table:
    """Read a CSV file; the separator is the one that makes the most of the header line."""
    previous = csv.field_size_limit(MAX_FIELD_CHARACTERS)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            header = stream.readline()
            delimiter = max(DELIMITERS, key=lambda mark: len(next(csv.reader([header], delimiter=mark), [])))
            stream.seek(0)
            reader = csv.DictReader(stream, delimiter=delimiter, skipinitialspace=True)
            reader.fieldnames = columns = [name.strip() for name in reader.fieldnames or []]
            return columns, list(reader)
    finally:
        csv.field_size_limit(previous)


def _read_jsonl(path: Path) -> Table:
    """Read one JSON object per line; a line that is anything else counts as an unusable record."""
    rows = []
    for line in path.read_text(encoding="utf-8-sig").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return list(dict.fromkeys(key for row in rows for key in row)), rows


def _read_folder(folder: Path, split: str) -> Table:
    """Read a data-set folder; files are streamed, because the loaders' cache would keep private records elsewhere."""
    try:
        import datasets
    except ImportError:
        problem = f"{folder} is a data-set folder, and the package datasets is not installed"
        raise DpmergeError("DPM-203", problem, "run pip install 'dpmerge[datasets]'") from None
    datasets.config.HF_HUB_OFFLINE = True  # no look-up, no download count
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its warnings describe rows, and logs travel
    datasets.disable_progress_bars()
    place = str(folder.absolute())  # a relative path could be taken for the name of a public data set
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        loaded = datasets.load_from_disk(place) if saved else datasets.load_dataset(place, streaming=True)
        chosen = _choose_split(folder, loaded, split) if isinstance(loaded, dict) else loaded
        rows = list(chosen)
    except (OSError, ValueError, datasets.exceptions.DatasetsError):
        problem = f"{folder} is not a data set that the package datasets can read"
        raise DpmergeError(
            "DPM-203", problem, "write it with save_to_disk, or as CSV, JSONL or Parquet files"
        ) from None
    return list(dict.fromkeys(key for row in rows for key in row)), rows


def _choose_split(folder: Path, splits: dict[str, Any], wanted: str) -> Any:
    """Return the split asked for; without a wish `train`, or the only one."""
    names = [str(name) for name in splits]
    name = wanted or ("train" if "train" in names or len(names) > 1 else names[0])
    if name not in names:
        problem = f"{folder} has no split {name!r}"
        raise DpmergeError(
            "DPM-203", problem, f"name one as {folder}{SPLIT_MARK}{names[0]}; there are {', '.join(names)}"
        )
    return splits[name]


def _missing_column(path: str | Path, key: str, name: str, columns: list[str]) -> DpmergeError:
    """Name the columns that exist and the one that was probably meant."""
    lower = {column.lower(): column for column in columns}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    hint = f"; did you mean {lower[close[0]]!r}?" if close else ""
    return DpmergeError("DPM-203", f"{path} has no column {name!r}", f"set {key} to one of {_some(columns)}{hint}")


def _some(columns: list[str]) -> str:
    """List column names, the first twenty at most."""
    return ", ".join(map(repr, columns[:20])) + (" …" if len(columns) > 20 else "")
