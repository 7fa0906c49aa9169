"""Own data: what is read, what is left out in silence, what is refused, and that nothing is quoted or sent."""

import json
import socket
import sys
from pathlib import Path

import pytest

from dpmerge.common.data.records import Records, read_records
from dpmerge.common.errors import DpmergeError

LABELS = {"1": "a bad product", "5": "a great product"}
WANTED = Records(("fine, really", "bad", "grüße"), (1, 0, 1))


def read(path: Path | str) -> Records:
    return read_records(path, text="body", label="stars", labels=LABELS)


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_with_any_delimiter_and_byte_order_mark(tmp_path: Path, delimiter: str, encoding: str) -> None:
    rows = [("stars", "id", "body "), ("5", "1", '"fine, really"'), ("1", "2", "bad"), ("5", "3", "grüße")]
    path = write(tmp_path / "own.csv", "\r\n".join(delimiter.join(row) for row in rows), encoding)
    assert read(path) == WANTED


def test_unusable_records_are_left_out_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = 'body,stars\n"fine, really",5\n,5\n   ,1\nbad,1\nundeclared,3\nshort\nlong,1x,2,3\ngrüße, 5 \n'
    assert read(write(tmp_path / "own.csv", body)) == WANTED
    assert capfd.readouterr() == ("", "")


def test_a_text_longer_than_the_csv_module_likes(tmp_path: Path) -> None:
    path = write(tmp_path / "own.csv", "body,stars\n" + "x" * 200_000 + ",1\n")
    assert len(read(path).texts[0]) == 200_000


def test_jsonl_compares_labels_as_strings_and_skips_broken_lines(tmp_path: Path) -> None:
    rows: list[object] = [
        {"body": "fine, really", "stars": 5},
        {"body": None, "stars": 5},
        {"body": 7, "stars": 5},
        {"stars": 1},
        [1, 2],
        {"body": "bad", "stars": "1"},
        {"body": "grüße", "stars": 5},
    ]
    text = "\n".join(json.dumps(row) for row in rows) + '\n\n{"body": "cut o'
    assert read(write(tmp_path / "own.jsonl", text)) == WANTED


def test_users_are_numbered_as_they_appear_and_a_record_without_one_is_left_out(tmp_path: Path) -> None:
    body = "body,stars,author\na,1,zoe\nb,5,\nc,7,kim\nd,5, ana \ne,1,zoe\nf,5\ng,5,ana\n"
    path = write(tmp_path / "own.csv", body)
    records = read_records(path, text="body", label="stars", labels=LABELS, user="author")
    assert records == Records(("a", "d", "e", "g"), (0, 1, 0, 1), (0, 1, 0, 1))
    assert read(path).users is None
    rows = [{"body": "a", "stars": 1, "author": author} for author in (7, None, " ", float("nan"), "7", 0)]
    lines = write(tmp_path / "own.jsonl", "\n".join(map(json.dumps, rows)))
    assert read_records(lines, text="body", label="stars", labels=LABELS, user="author").users == (0, 0, 1)
    with pytest.raises(DpmergeError, match=r"has no column 'autor'; set user to one of .*\(closest: author\)"):
        read_records(path, text="body", label="stars", labels=LABELS, user="autor")
    nobody = write(tmp_path / "nobody.csv", "body,stars,author\na,1,\n")
    assert read_records(nobody, text="body", label="stars", labels=LABELS, user="author") == Records((), (), ())


def test_class_order_is_that_of_the_declaration(tmp_path: Path) -> None:
    path = write(tmp_path / "own.csv", "body,stars\na,1\nb,5\n")
    assert read_records(path, text="body", label="stars", labels={"5": "great", "1": "bad"}).labels == (1, 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Body,stars\nsecret,1\n", "has no column 'body'; set text to one of 'Body', 'stars' (closest: Body)"),
        ("body,star\nsecret,1\n", "has no column 'stars'; set label to one of 'body', 'star' (closest: star)"),
        ("", "has no column 'body'"),
    ],
)
def test_what_is_wrong_with_a_whole_file_is_refused_without_quoting_it(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(DpmergeError, match="DPM-203") as refusal:
        read(write(tmp_path / "own.csv", content))
    assert said in str(refusal.value)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("content", ["body,stars\nsecret,7\n", "body,stars\n"])
def test_a_file_without_a_usable_record_is_read_like_any_other(tmp_path: Path, content: str) -> None:
    """One record more or less may not decide whether a party goes on."""
    assert len(read(write(tmp_path / "own.csv", content))) == 0


def test_one_broken_record_does_not_stop_its_party(tmp_path: Path) -> None:
    latin = write(tmp_path / "latin.csv", "body,stars\ncaf\xe9,1\nfine,5\n", "latin-1")
    assert read(latin).texts == ("café", "fine")
    deep = write(tmp_path / "deep.jsonl", "[" * 100_000 + '\n{"body": "a\\ud800", "stars": 1}\n')
    assert read(deep).texts == ("a?",)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    latin = write(tmp_path / "latin.csv", "body,stars\nsecret é,1\n", "latin-1")
    for path, said in [
        (tmp_path / "none.csv", "No such file"),
        (write(tmp_path / "own.xlsx", "secret"), "neither a .csv"),
        (f"{latin}::train", "neither a .csv"),
    ]:
        with pytest.raises(DpmergeError, match="DPM-203") as refusal:
            read(path)
        assert said in str(refusal.value)
        assert "secret" not in str(refusal.value)


def test_a_json_array_of_objects(tmp_path: Path) -> None:
    rows = [{"body": text, "stars": stars} for text, stars in (("fine, really", 5), ("bad", 1), ("grüße", 5))]
    assert read(write(tmp_path / "own.json", json.dumps(rows, indent=1))) == WANTED


@pytest.mark.parametrize(("file", "package"), [("state.json", "datasets"), ("own.parquet", "pyarrow")])
def test_a_missing_package_is_named(tmp_path: Path, file: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    write(tmp_path / file, "{}")
    with pytest.raises(DpmergeError, match=rf"DPM-203.*{package}.*pip install 'dpmerge\[datasets\]'"):
        read(tmp_path)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []  # recorded, not only refused: libraries swallow failures of their download counters

    def refuse(*arguments: object, **_: object) -> None:
        calls.append(arguments)
        raise OSError("no network in this test")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return calls


def test_saved_data_sets_and_parquet(
    tmp_path: Path, no_network: list[object], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    datasets.disable_progress_bars()
    train = datasets.Dataset.from_dict({"body": ["fine, really", "", "bad", "grüße"], "stars": [5, 5, 1, 5]})
    test = datasets.Dataset.from_dict({"body": ["test half"], "stars": [1]})
    train.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"test": test, "train": train}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    train.to_parquet(str(tmp_path / "parquet" / "data" / "train-00000-of-00001.parquet"))
    test.to_parquet(str(tmp_path / "parquet" / "data" / "test-00000-of-00001.parquet"))
    for folder in ("saved", "splits", "parquet"):
        assert read(tmp_path / folder) == WANTED, folder
    for folder in ("splits", "parquet"):
        assert read(f"{tmp_path / folder}::test") == Records(("test half",), (0,)), folder
    with pytest.raises(DpmergeError, match=r"has no split 'val'; name one as .*::test; there are test, train"):
        read(tmp_path / "splits::val")
    assert no_network == []
    assert not cache.exists()
    assert capfd.readouterr() == ("", "")


def test_folders_of_plain_files(tmp_path: Path, no_network: list[object]) -> None:
    remote = '---\nconfigs:\n- config_name: default\n  data_files: "hf://datasets/a/b/c.csv"\n---\n'
    write(tmp_path / "README.md", remote)  # the loaders of the package datasets would follow this
    (tmp_path / "training_set").mkdir()
    write(tmp_path / "training_0.csv", 'body,stars\n"fine, really",5\nlong,9,2,3\n')
    write(tmp_path / "training_1.jsonl", '{"body": "bad", "stars": 1}\n{"body": "grüße", "stars": 5}\n')
    write(tmp_path / "training_set" / "test.csv", "body;stars\ntest half;1\n")
    assert read(tmp_path) == WANTED
    assert read(f"{tmp_path}::train") == WANTED
    assert read(f"{tmp_path}::test") == Records(("test half",), (0,))
    assert read(tmp_path / "training_set") == Records(("test half",), (0,))
    with pytest.raises(DpmergeError, match=r"has no split 'validation'; name one as .*; there are train, test"):
        read(f"{tmp_path}::val")
    assert no_network == []


def test_folders_that_hold_nothing_or_rubbish(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, content, said in [
        ("notes.txt", "secret", "holds neither a saved data set nor"),
        ("own.parquet", "secret", "is damaged"),
        ("state.json", "secret", "cannot be read"),
    ]:
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        write(folder / name, content)
        with pytest.raises(DpmergeError, match="DPM-203") as refusal:
            read(folder)
        assert said in str(refusal.value)
        assert "secret" not in str(refusal.value)
    assert capfd.readouterr() == ("", "")
