"""Pairs of data sets that differ in one hostile record, and whether what leaves a party tells them apart.

A record is arbitrary: bytes, texts, values that Hypothesis makes up, and those that have broken readers before. It is
put into a small data set of each format, and the party's `answer` is compared with that for the data set without it:
code, sentence, files and their sizes, what lies outside the party's folder. The figures `hostile_pairs` and
`hostile_pairs_told_apart` of the benchmark `claim` come from here.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from dpmerge.client import app
from dpmerge.client.app import answer
from dpmerge.client.budget.policy import open_account
from dpmerge.client.party import party
from dpmerge.client.party.preparation import Prepared, check_place, prepared
from dpmerge.common.config.federation import PartyPlan, parse_federation, party_plan
from dpmerge.common.data.tabular.rows import MAX_RECORD_BYTES
from dpmerge.common.encoder.base_model import load_base
from dpmerge.common.public.terms import terms_hash
from dpmerge.common.release.signing import SigningKey
from dpmerge.common.release.wire import Terms
from dpmerge.simulations.flower import SimulatedSite

KEY = SigningKey(bytes(range(32)))
FEDERATION = "hostile-1"
ROWS = (("fine, really", "5", "ann"), ('say "no"', "1", "bob"), ("grüße", "5", "ann"))

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Format:
    """How a data set of one format is written.

    Attributes:
        name: Of the file or folder, below the one that is given.
        records: Makes hostile records.
        write: Writes the usual rows with the hostile records put in at a place, none or one.
        path: What a plan calls it, if that is not the name.
    """

    name: str
    records: st.SearchStrategy[Any]
    write: Callable[[Path, list[Any], int], None]
    path: str = ""


def _line(record: bytes) -> bytes:
    return record.replace(b"\n", b"").replace(b"\r", b"")


CELLS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=40),
    st.lists(st.integers(), max_size=3),
    st.sampled_from(
        [
            10**4000,
            "5",
            "1",
            5.0,
            1e308,
            "\ud800",
            "\0",
            " ",
            "a" * 5000,
            "\u0301" * 3000,
            {"0": "x"},
            "\u2028",
            "\ufeff",
        ]
    ),
)
TALES = [  # each has broken a reader of ours or of a neighbouring tool
    b'"never closed,5',
    b'never opened",5',
    b'"',
    b"'" * 9,
    b'a,"b"c,5',
    b"a,b,c,d,e,f",
    b"sep=;",
    b"body,stars,author",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x00" * 50,
    b"\x1a",
    b"caf\xe9,5,zoe",
    b"x" * (MAX_RECORD_BYTES + 1),
    b'"' * 4001,
    b"\\" * 4001,
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"body": "a", "stars": ' + b"1" * 5000 + b"}",
    b'{"body": "a", "stars": NaN}',
    b'{"body": {"0": "a"}, "stars": {"0": 5}}',
    b'[{"body": "a", "stars": 5}, {"body": "b", "stars": 5}]',
    b'{"body": "a", "stars": 5, "author": ["x"]}',
    b"\t\t\t",
    b"fine;5;ann",
]
OBJECTS = st.dictionaries(st.sampled_from(["body", "stars", "author", "else"]), CELLS)
JSON_TEXTS = st.one_of(OBJECTS, CELLS).map(lambda value: json.dumps(value, ensure_ascii=False))
LINES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(TALES),
    JSON_TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(st.text(max_size=20), max_size=5).map(lambda cells: ",".join(cells).encode("utf-8", "surrogatepass")),
).map(_line)
ELEMENTS = st.one_of(
    JSON_TEXTS,
    st.sampled_from(
        [
            "1" * 5000,
            "[" * 50_000 + "]" * 50_000,
            "nan",
            "NaN",
            "{}",
            "[]",
            '"\\ud800"',
            "'x'",
            '{"body": "a\nb", "stars": 5}',
            '{"body": "[{\\"", "stars": 5, "author": "x"}',
            '"' + "x" * MAX_RECORD_BYTES + '"',
            "1:2",
            '{"a" 1}',
            "",
        ]
    ),
).map(lambda text: text.encode("utf-8", "surrogatepass"))
TABLE_ROWS = st.tuples(
    st.one_of(st.none(), st.binary(max_size=40), st.just(b"x" * (MAX_RECORD_BYTES + 1))),
    st.one_of(st.none(), st.binary(max_size=5), st.sampled_from([b"5", b"1", b"5.0"])),
    st.one_of(st.none(), st.binary(max_size=9), st.just(b"ann")),
    st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
)


def _lines_of(rows: list[bytes], head: list[bytes], extra: list[bytes], at: int) -> bytes:
    return b"\n".join([*head, *rows[:at], *extra, *rows[at:]]) + b"\n"


def _quoted(row: Row, separator: str) -> bytes:
    return separator.join('"' + cell.replace('"', '""') + '"' for cell in row).encode()


def _object(row: Row) -> bytes:
    return json.dumps(dict(zip(("body", "stars", "author"), row, strict=True))).encode()


def _delimited(separator: str) -> Callable[[Path, list[Any], int], None]:
    head = [separator.join(("body", "stars", "author")).encode()]
    rows = [_quoted(row, separator) for row in ROWS]
    return lambda path, extra, at: _write(path, _lines_of(rows, head, extra, at))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _write_array(path: Path, extra: list[bytes], at: int) -> None:
    rows = [_object(row) for row in ROWS]
    path.write_bytes(b"[" + b",\n".join([*rows[:at], *extra, *rows[at:]]) + b"]")


def _table(extra: list[Row], at: int) -> Any:
    rows: list[Row] = [(*(cell.encode() for cell in row), 0) for row in ROWS]
    columns = list(zip(*[*rows[:at], *extra, *rows[at:]], strict=True))
    texts = [pa.array(column, pa.binary()).view(pa.string()) for column in columns[:3]]
    dates = pa.array(columns[3], pa.int64()).view(pa.timestamp("us"))  # many of which no calendar has
    return pa.table([*texts, dates], names=["body", "stars", "author", "when"])


def _write_parquet(path: Path, extra: list[Row], at: int) -> None:
    parquet.write_table(_table(extra, at), path)


def _write_saved(path: Path, extra: list[Row], at: int) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset(_table(extra, at)).save_to_disk(str(path))


def _write_folder(path: Path, extra: list[bytes], at: int) -> None:
    path.mkdir()
    _delimited(",")(path / "a.csv", extra, at)
    _delimited("\t")(path / "b.tsv", [], 0)
    _write(path / "c.jsonl", _lines_of([_object(row) for row in ROWS], [], extra[:0], 0))


FORMATS = {
    "csv": Format("own.csv", LINES, _delimited(",")),
    "tsv": Format("own.tsv", LINES, _delimited("\t")),
    "jsonl": Format(
        "own.jsonl", LINES, lambda path, extra, at: _write(path, _lines_of([*map(_object, ROWS)], [], extra, at))
    ),
    "json lines": Format(
        "own.json",
        LINES,
        lambda path, extra, at: _write(path, _lines_of([*map(_object, ROWS)], [], extra, at)),
        "own.json::lines",
    ),
    "json array": Format("own.json", ELEMENTS, _write_array),
    "parquet": Format("own.parquet", TABLE_ROWS, _write_parquet),
    "saved data set": Format("own", TABLE_ROWS, _write_saved),
    "folder": Format("own", LINES, _write_folder),
}


def _plan(path: str, unit: str) -> PartyPlan:
    user = 'user = "author"' if unit == "user" else ""
    text = f"""
    [base]
    model = "minilm-l3"
    max_length = 8
    [lora]
    layers = "last:1"
    rank = 1
    targets = ["query"]
    [training]
    num_steps = 1
    expected_batch_size = 2
    [privacy]
    noise = "fast"
    unit = "{unit}"
    [[party]]
    name = "shop"
    data = "{path}"
    text = "body"
    label = "stars"
    labels = {{ "1" = "bad", "5" = "good" }}
    population = 4
    epsilon = 4.0
    {user}
    """
    return party_plan(parse_federation(text, "hostile.toml"), "shop")


class Bench:
    """Asks a party for its answer to one data set after another."""

    def __init__(self, folder: Path, unit: str = "record") -> None:
        """Work in a folder, which is left as it was found."""
        self._folder, self._unit = folder, unit
        self._base_sha256 = load_base("minilm-l3").sha256
        key = folder / "shop.pem"
        key.touch(mode=0o600)
        key.write_bytes(KEY.pem())

    def seen(self, form: Format, extra: list[Any], at: int) -> tuple[object, ...]:
        """Return all that others see of the answer to a data set."""
        place = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            form.write(place / form.name, extra, at)
            site = SimulatedSite(
                plan=_plan(str(place / (form.path or form.name)), self._unit),
                folder=place / "shop",
                num_threads=1,
                federation=FEDERATION,
                key_file=self._folder / "shop.pem",
                server_keys=(KEY.public,),
            )
            before = set(place.rglob("*"))
            outcome = answer(site, Terms(terms_hash(site.plan, self._base_sha256), FEDERATION))
            sizes = {name: len(data) for name, data in outcome.files.items()}
            made = {path for path in set(place.rglob("*")) - before if not path.is_relative_to(site.folder)}
            return outcome.code, outcome.reason, sizes, made
        finally:
            shutil.rmtree(place)


@contextmanager
def short_training(folder: Path, unit: str) -> Iterator[None]:
    """Make the public part once for all data sets, and leave out the steps: all that reads records still runs.

    What is left out sees the records through Poisson samples only, and other checks look at it.
    """
    base = load_base("minilm-l3")
    public = folder / f"public-{unit}.csv"
    public.write_text("body,stars,author\n")
    held = folder / f"held-{unit}"
    held.mkdir()

    with ExitStack() as stack:
        once = stack.enter_context(prepared(_plan(str(public), unit), base, held, None))

        @contextmanager
        def again(plan: PartyPlan, base: Any, folder: Path, policy: Any) -> Iterator[Prepared]:
            check_place(plan.source.path)  # type: ignore[union-attr]  # these plans have files
            yield replace(once, account=open_account(plan, base.sha256, folder, policy))

        stack.enter_context(mock.patch.object(app, "load_base", return_value=base))
        stack.enter_context(mock.patch.object(party, "prepared", again))
        stack.enter_context(mock.patch.object(party, "train", return_value=once.training.mechanism))
        yield


def pairs_told_apart(num_pairs: int, *, num_whole: int = 0) -> tuple[int, list[str]]:
    """Try pairs of every format; return how many, and a description of each that is told apart.

    Args:
        num_pairs: At least so many, with the steps of the training left out, half of them with users.
        num_whole: So many more through a whole training, which takes about a second each.
    """
    tried, apart = 0, list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for unit in ("record", "user"):
            bench = Bench(folder, unit)
            with short_training(folder, unit):
                without = bench.seen(FORMATS["csv"], [], 0)
                for form in FORMATS:
                    count, found = _search(bench, form, without, -(-num_pairs // (2 * len(FORMATS))))
                    tried, apart = tried + count, apart + found
        without = bench.seen(FORMATS["csv"], [], 0) if num_whole else ()
        for number in range(num_whole):
            count, found = _search(bench, list(FORMATS)[number % len(FORMATS)], without, 1)
            tried, apart = tried + count, apart + found
    return tried, apart


def figures(num_pairs: int, *, num_whole: int = 0) -> dict[str, int]:
    """Return the two figures of the benchmark; see `pairs_told_apart`."""
    tried, apart = pairs_told_apart(num_pairs, num_whole=num_whole)
    return {"hostile_pairs": tried, "hostile_pairs_told_apart": len(apart)}


def longest_record_seconds(turns: int = 3) -> dict[str, float]:
    """Return what the longest allowed record adds to an answer, and one of 16 MB that is dropped; the least of `turns`.

    The steps are left out: there a text of any length is `max_length` tokens.
    """
    whole = b"word " * (MAX_RECORD_BYTES // 5 - 10)
    records = {"none": [], "longest": [whole + b",5,zoe"], "dropped": [b"x" * 2**24 + b",5,zoe"]}
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        with short_training(Path(name), "record"):
            taken = {key: min(_seconds(bench, extra) for _ in range(turns)) for key, extra in records.items()}
    return {
        "longest_record_seconds": taken["longest"] - taken["none"],
        "dropped_record_seconds": taken["dropped"] - taken["none"],
    }


def _seconds(bench: Bench, extra: list[bytes]) -> float:
    started = time.perf_counter()
    bench.seen(FORMATS["csv"], extra, 0)
    return time.perf_counter() - started


def _search(bench: Bench, form: str, without: tuple[object, ...], num_pairs: int) -> tuple[int, list[str]]:
    """Try pairs of one format against what is seen of the data set without the record, in whatever format."""
    style, tried, apart = FORMATS[form], 0, list[str]()

    @settings(
        max_examples=num_pairs, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(record=style.records, at=st.integers(0, len(ROWS)))
    def one(record: Any, at: int) -> None:
        nonlocal tried
        tried += 1
        if bench.seen(style, [record], at) != without:
            apart.append(f"{form}: {repr(record)[:200]} at {at}")

    one()
    return tried, apart
