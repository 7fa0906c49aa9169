"""Files as people's tools write them, each with what is to be used of it and what is to be dropped, and why.

The figures `file_cases` and `file_cases_wrong` of the benchmark `any_input` come from here. A case's truth was written
down by hand from what the file says, not by the reader.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpmerge.common.data.records import read_with_report
from dpmerge.common.data.tabular import rows as of
from dpmerge.common.data.tabular.rows import MAX_RECORD_BYTES
from dpmerge.common.errors import DpmergeError

LABELS = {"1": "a bad product", "5": "a great product"}
GOOD = (("fine, really", 1), ("bad", 0), ("grüße", 1))
REFUSED = "DPM-203"

Write = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One file.

    Attributes:
        about: What is particular about it.
        name: Of the file or folder.
        content: Its bytes, or what writes it.
        used: Text and class of each record that is to be used, in order.
        dropped: Reason → how many are to be dropped for it.
        labels: The declared labels.
        mark: What a plan says behind the name.
        user: The user column, if there is one.
        refused: Whether the file as a whole is to be refused by its schema.
    """

    about: str
    name: str = "own.csv"
    content: bytes | Write
    used: tuple[tuple[str, int], ...] = GOOD
    dropped: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=lambda: LABELS)
    mark: str = ""
    user: str | None = None
    refused: bool = False

    def problem(self, folder: Path) -> str:
        """Write the file into an empty folder, read it, and return what is wrong; nothing if all is right."""
        path = folder / self.name
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        else:
            self.content(path)
        try:
            records, report = read_with_report(
                f"{path}{self.mark}", text="body", label="stars", labels=self.labels, user=self.user
            )
        except DpmergeError as error:
            return "" if self.refused and error.code == REFUSED else f"{self.about}: {error}"
        used = tuple(zip(records.texts, records.labels, strict=True))
        dropped = {some.reason: some.count for some in report.dropped}
        if self.refused or used != self.used or dropped != self.dropped or report.num_used != len(used):
            return f"{self.about}: used {used!r:.300}, dropped {dropped}"
        return ""


def lines(*rows: str, end: str = "\n", encoding: str = "utf-8") -> bytes:
    return end.join([*rows, ""]).encode(encoding)


PLAIN = ("body,stars", '"fine, really",5', "bad,1", "grüße,5")
TABS = ("body\tstars", "fine, really\t5", "bad\t1", "grüße\t5")
SEMICOLONS = ("body;stars", "fine, really;5", "bad;1", "grüße;5")
OBJECTS = [{"body": "fine, really", "stars": 5}, {"body": "bad", "stars": 1}, {"body": "grüße", "stars": 5}]
WORDS = {"café": "a café", "bar": "a bar"}
TRUTHS = {"True": "yes", "False": "no"}
NAMES = {"neg": "a bad product", "pos": "a great product"}


def dumped(*values: Any, **options: Any) -> bytes:
    return "\n".join(json.dumps(value, **options) for value in values).encode()


def csv_cases() -> list[Case]:
    """CSV and TSV: separators, encodings, quotes."""
    encodings = ("utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-32")
    cases = [Case(about=f"commas in {name}", content=lines(*PLAIN, encoding=name)) for name in encodings]
    for name, mark in (("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff")):
        cases.append(Case(about=f"marked {name}", content=mark + lines(*PLAIN, encoding=name)))
    for end, about in (("\r\n", "CR LF"), ("\r", "CR"), ("\n", "LF")):
        cases.append(Case(about=f"lines end with {about}", content=lines(*PLAIN, end=end)))
    return [
        *cases,
        Case(about="semicolons", content=lines(*SEMICOLONS)),
        Case(about="tabs", name="own.tsv", content=lines(*TABS)),
        Case(about="bars", content=lines(*(row.replace(";", "|") for row in SEMICOLONS))),
        Case(about="Excel's sep=;", content=lines("sep=;", *SEMICOLONS)),
        Case(about="Excel's sep=, in UTF-16", content=lines("sep=,", *PLAIN, encoding="utf-16")),
        Case(about="Excel's sep=^", content=lines("sep=^", *(row.replace(";", "^") for row in SEMICOLONS))),
        Case(
            about="spaces around names and cells",
            content=lines(" body , stars ", "fine , 5 ", " bad, 1"),
            used=(("fine", 1), ("bad", 0)),
        ),
        Case(about="blank lines", content=lines("", *PLAIN[:2], "", "   ", *PLAIN[2:], "")),
        Case(about="no line end at the end", content="\n".join(PLAIN).encode()),
        Case(
            about="quotes doubled",
            content=lines("body,stars", '"say ""no"", please",1'),
            used=(('say "no", please', 0),),
        ),
        Case(
            about="quotes escaped",
            content=lines("body,stars", r'"say \"no\", please",1'),
            used=(('say "no", please', 0),),
        ),
        Case(
            about="escaped quote at the end",
            content=lines("body,stars", r'"he said \"no\"",1'),
            used=(('he said "no"', 0),),
        ),
        Case(
            about="a quote within",
            content=lines("body,stars", '5" screen,1', *PLAIN[1:]),
            used=(('5" screen', 0), *GOOD),
        ),
        Case(
            about="one opening quote in a TSV",
            name="own.tsv",
            content=lines(TABS[0], '"Best product\t5', *TABS[1:]),
            used=(('"Best product', 1), *GOOD),
        ),
        Case(
            about="words in quotes in a TSV",
            name="own.tsv",
            content=lines(TABS[0], '"So" they say\t1', *TABS[1:]),
            used=(('"So" they say', 0), *GOOD),
        ),
        Case(
            about="an unclosed quote in a CSV",
            content=lines(*PLAIN[:2], '"lost, all of it, 5', *PLAIN[2:]),
            dropped={of.TOO_MANY_FIELDS: 1},
        ),
        Case(
            about="an unclosed quote takes no later line",
            content=lines(PLAIN[0], *['"lost, a, b'] + ["bad,1"] * 39),
            used=(("bad", 0),) * 39,
            dropped={of.TOO_MANY_FIELDS: 1},
        ),
        Case(
            about="a field over two lines",
            content=lines(PLAIN[0], '"first', 'second",5', *PLAIN[1:]),
            used=(('second"', 1), *GOOD),
            dropped={of.NO_LABEL: 1},
        ),
        Case(about="too many fields", content=lines(*PLAIN, "good, cheap,5"), dropped={of.TOO_MANY_FIELDS: 1}),
        Case(about="empty fields behind", content=lines(PLAIN[0], *(f"{row},," for row in PLAIN[1:]))),
        Case(about="too few fields", content=lines(*PLAIN, "alone"), dropped={of.NO_LABEL: 1}),
        Case(about="empty texts", content=lines(*PLAIN, ",5", '"  ",1'), dropped={of.EMPTY_TEXT: 2}),
        Case(about="undeclared labels", content=lines(*PLAIN, "so,3", "so,"), dropped={of.UNDECLARED: 2}),
        Case(about="a null character", content=lines(*PLAIN, "a\0b,5"), used=(*GOOD, ("a\0b", 1))),
        Case(
            about="a line in cp1252 among UTF-8",
            content=lines(*PLAIN) + "caf\xe9,1\n".encode("latin-1"),
            used=(*GOOD, ("café", 0)),
        ),
        Case(about="bytes that cp1252 lacks", content=lines(*PLAIN) + b"a\x81b,5\n", used=(*GOOD, ("a\ufffdb", 1))),
        Case(
            about="a line beyond the bound",
            content=lines(*PLAIN[:2], "x" * MAX_RECORD_BYTES + ",5", *PLAIN[2:]),
            dropped={of.TOO_LONG: 1},
        ),
        Case(
            about="a text longer than csv likes",
            content=lines("body,stars", "x" * 200_000 + ",1"),
            used=(("x" * 200_000, 0),),
        ),
        Case(about="two columns of one name", content=lines("body,stars,stars", "a,1,5"), refused=True),
        Case(about="two unneeded columns of one name", content=lines("body,,stars,", "a,x,1,y"), used=(("a", 0),)),
        Case(about="no header", content=lines(*PLAIN[1:]), refused=True),
        Case(about="another column", content=lines("Body,stars", "a,1"), refused=True),
        Case(about="an empty file", content=b"", refused=True),
        Case(about="UTF-16 without mark", content=lines(*PLAIN, encoding="utf-16-le"), refused=True),
        Case(about="a header alone", content=lines("body,stars"), used=()),
        Case(
            about="users",
            content=lines("body,stars,who", "a,1,ann", "b,5,", "c,5, ann "),
            user="who",
            used=(("a", 0), ("c", 1)),
            dropped={of.NO_USER: 1},
        ),
        Case(
            about="a user with very many records",
            user="who",
            content=lines("body,stars,who", *["a,1,ann"] * 70, "b,5,bob"),
            used=(*[("a", 0)] * 64, ("b", 1)),
            dropped={of.USER_IS_FULL: 6},
        ),
    ]


def label_cases() -> list[Case]:
    """Labels: accents, numbers, truth values."""
    composed, apart = "café", "cafe\u0301"
    return [
        Case(
            about="accents apart in the file",
            content=lines("body,stars", f"a,{apart}", "b,bar"),
            labels=WORDS,
            used=(("a", 0), ("b", 1)),
        ),
        Case(
            about="accents apart in the declaration",
            content=lines("body,stars", f"a,{composed}"),
            labels={apart: "", "bar": ""},
            used=(("a", 0),),
        ),
        Case(
            about="accented labels in cp1252",
            content=lines("body,stars", "a,café", "b,bar", encoding="cp1252"),
            labels=WORDS,
            used=(("a", 0), ("b", 1)),
        ),
        Case(about="labels with decimals", content=lines("body,stars", "a,1.0", "b,5.00"), used=(("a", 0), ("b", 1))),
        Case(
            about="declared with decimals",
            content=lines("body,stars", "a,1", "b,5"),
            labels={"1.0": "", "5.0": ""},
            used=(("a", 0), ("b", 1)),
        ),
        Case(
            about="truth values in capitals",
            content=lines("body,stars", "a,TRUE", "b,false"),
            labels=TRUTHS,
            used=(("a", 0), ("b", 1)),
        ),
        Case(
            about="truth values of JSON",
            name="own.jsonl",
            labels=TRUTHS,
            used=(("a", 0), ("b", 1)),
            content=dumped({"body": "a", "stars": True}, {"body": "b", "stars": False}),
        ),
        Case(
            about="numbers of JSON",
            name="own.jsonl",
            used=(("a", 0), ("b", 1), ("c", 1)),
            content=dumped(*({"body": body, "stars": stars} for body, stars in (("a", 1), ("b", 5.0), ("c", " 5 ")))),
        ),
        Case(
            about="zeros before are told apart",
            content=lines("body,stars", "a,01", "b,1"),
            labels={"1": "", "01": ""},
            used=(("a", 1), ("b", 0)),
        ),
        Case(
            about="letters of another case are another label",
            content=lines("body,stars", "a,Bar"),
            labels=WORDS,
            used=(),
            dropped={of.UNDECLARED: 1},
        ),
    ]


def json_cases() -> list[Case]:
    """JSON: lines, arrays, columns."""
    array = json.dumps(OBJECTS, indent=1, ensure_ascii=False).encode()
    columns = {
        "body": {str(n): row["body"] for n, row in enumerate(OBJECTS)},
        "stars": {str(n): row["stars"] for n, row in enumerate(OBJECTS)},
    }
    first, *rest = (json.dumps(row).encode() for row in OBJECTS)
    broken = b"[" + b", ".join([first, b"%s", *rest]) + b"]"
    hostile = {
        "a number of 5,000 digits": b'{"body": "x", "stars": ' + b"1" * 5000 + b"}",
        "deep nesting": b"[" * 100_000 + b"]" * 100_000,
        "no JSON": b"nan and void",
        "a list": b'[{"body": "x", "stars": 5}]',
    }
    cases = [
        Case(
            about=f"an array with {name}",
            name="own.json",
            content=broken.replace(b"%s", element),
            dropped={of.NOT_A_RECORD: 1},
        )
        for name, element in hostile.items()
    ]
    cases += [
        Case(
            about=f"lines with {name}",
            name="own.jsonl",
            content=dumped(*OBJECTS) + b"\n" + line,
            dropped={of.NOT_A_RECORD: 1},
        )
        for name, line in hostile.items()
    ]
    return [
        *cases,
        Case(about="lines", name="own.jsonl", content=dumped(*OBJECTS)),
        Case(about="lines in UTF-8, not escaped", name="own.ndjson", content=dumped(*OBJECTS, ensure_ascii=False)),
        Case(about="lines in UTF-16", name="own.jsonl", content=dumped(*OBJECTS).decode().encode("utf-16")),
        Case(
            about="lines cut off",
            name="own.jsonl",
            content=dumped(*OBJECTS) + b'\n{"body": "cut o',
            dropped={of.NOT_A_RECORD: 1},
        ),
        Case(
            about="lines of other types",
            name="own.jsonl",
            dropped={of.NO_TEXT: 3, of.NO_LABEL: 2},
            content=dumped(
                *OBJECTS,
                {"body": 7, "stars": 5},
                {"body": None, "stars": 5},
                {"stars": 5},
                {"body": "a"},
                {"body": "a", "stars": [5]},
            ),
        ),
        Case(
            about="a label that is no number",
            name="own.jsonl",
            dropped={of.NO_LABEL: 1},
            content=dumped(*OBJECTS, {"body": "a", "stars": float("nan")}),
        ),
        Case(
            about="a column that no line has",
            name="own.jsonl",
            content=dumped({"text": "a", "stars": 1}),
            used=(),
            dropped={of.NO_TEXT: 1},
        ),
        Case(about="an array", name="own.json", content=array),
        Case(about="an array with a byte order mark", name="own.json", content=b"\xef\xbb\xbf" + array),
        Case(about="an array in UTF-16", name="own.json", content=array.decode().encode("utf-16")),
        Case(about="an array on one line", name="own.json", content=json.dumps(OBJECTS).encode()),
        Case(
            about="brackets and quotes in texts",
            name="own.json",
            used=(('a "]} [{ \\', 0), ("b", 1)),
            content=json.dumps([{"body": 'a "]} [{ \\', "stars": 1}, {"body": "b", "stars": 5}]).encode(),
        ),
        Case(
            about="an array cut off",
            name="own.json",
            content=array[:-2] + b', {"body": "cut o',
            dropped={of.NOT_A_RECORD: 1},
        ),
        Case(
            about="an element beyond the bound",
            name="own.json",
            dropped={of.TOO_LONG: 1},
            content=broken.replace(b"%s", b'{"body": "' + b"x" * MAX_RECORD_BYTES + b'", "stars": 5}'),
        ),
        Case(about="an empty array", name="own.json", content=b"[]", used=()),
        Case(
            about="lines called .json", name="own.json", content=dumped(*OBJECTS), used=(), dropped={of.NOT_AN_ARRAY: 1}
        ),
        Case(about="lines called .json, told", name="own.json", content=dumped(*OBJECTS), mark="::lines"),
        Case(about="columns of pandas", name="own.json", content=json.dumps(columns).encode(), mark="::columns"),
        Case(
            about="columns with others between",
            name="own.json",
            mark="::columns",
            content=json.dumps({"id": {"0": 1, "1": [2], "2": {}}, **columns, "n": 3}, indent=2).encode(),
        ),
        Case(
            about="columns with a broken cell",
            name="own.json",
            mark="::columns",
            used=(("b", 1),),
            content=b'{"body": {"0": ' + b"1" * 5000 + b', "1": "b"}, "stars": {"0": 1, "1": 5}}',
            dropped={of.NOT_A_RECORD: 1},
        ),
        Case(
            about="a lone surrogate", name="own.jsonl", content=b'{"body": "a\\ud800", "stars": 1}', used=(("a?", 0),)
        ),
    ]


def table_cases() -> list[Case]:
    """Parquet files, saved data sets, folders."""
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    datasets.disable_progress_bars()
    texts, stars = [text for text, _ in GOOD], [5, 1, 5]

    def table(**columns: Any) -> Write:
        return lambda path: parquet.write_table(pa.table({"body": texts, "stars": stars} | columns), path)

    def saved(classes: list[str], cells: list[int]) -> Write:
        features = datasets.Features({"body": datasets.Value("string"), "stars": datasets.ClassLabel(names=classes)})
        return lambda path: datasets.Dataset.from_dict({"body": texts, "stars": cells}, features).save_to_disk(
            str(path)
        )

    def stored(path: Path) -> None:
        features = datasets.Features(
            {"body": datasets.Value("string"), "stars": datasets.ClassLabel(names=list(NAMES))}
        )
        datasets.Dataset.from_dict({"body": texts, "stars": [1, 0, 1]}, features).to_parquet(str(path))

    def folder(path: Path) -> None:
        path.mkdir()
        (path / "a.csv").write_bytes(lines(*PLAIN[:2]))
        (path / "b.tsv").write_bytes(lines(TABS[0], '"', TABS[2]))
        (path / "c.jsonl").write_bytes(dumped(OBJECTS[2]))

    bad_text = pa.array([b"fine, really", b"\xff\xfe", b"gr\xc3\xbc\xc3\x9fe"], pa.binary()).view(pa.string())
    no_date = pa.array([0, 2**62, -(2**62)], pa.int64()).view(pa.timestamp("us"))
    return [
        Case(about="Parquet", name="own.parquet", content=table()),
        Case(
            about="Parquet with floats and a gap",
            name="own.parquet",
            content=table(stars=[5.0, None, 5.0]),
            used=(GOOD[0], GOOD[2]),
            dropped={of.NO_LABEL: 1},
        ),
        Case(
            about="Parquet with categories",
            name="own.parquet",
            content=table(stars=pa.array(["5", "1", "5"]).dictionary_encode()),
        ),
        Case(
            about="Parquet with a cell that is no UTF-8",
            name="own.parquet",
            content=table(body=bad_text),
            used=(GOOD[0], GOOD[2]),
            dropped={of.NO_TEXT: 1},
        ),
        Case(about="Parquet with dates out of range", name="own.parquet", content=table(when=no_date)),
        Case(
            about="Parquet with lists for texts",
            name="own.parquet",
            content=table(body=[["a"], ["b"], []]),
            used=(),
            dropped={of.NO_TEXT: 3},
        ),
        Case(
            about="Parquet without the column",
            name="own.parquet",
            content=lambda path: parquet.write_table(pa.table({"body": texts}), path),
            refused=True,
        ),
        Case(about="Parquet that is none", name="own.parquet", content=b"PAR1 nothing", refused=True),
        Case(about="Parquet with class names", name="own.parquet", content=stored, labels=NAMES),
        Case(about="a saved data set, labels by name", name="own", content=saved(list(NAMES), [1, 0, 1]), labels=NAMES),
        Case(
            about="a saved data set, labels by number",
            name="own",
            content=saved(list(NAMES), [1, 0, 1]),
            labels={"0": "", "1": ""},
        ),
        Case(about="a saved data set, numbers as names", name="own", content=saved(["5", "1"], [0, 1, 0])),
        Case(about="a folder of files", name="own", content=folder, dropped={of.NO_LABEL: 1}),
    ]


def all_cases() -> list[Case]:
    """Return every case."""
    return [*csv_cases(), *label_cases(), *json_cases(), *table_cases()]


def figures() -> dict[str, int]:
    """Return how many cases there are, and how many are read wrongly."""
    cases, wrong = all_cases(), 0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            wrong += bool(case.problem(Path(folder)))
    return {"file_cases": len(cases), "file_cases_wrong": wrong}
