"""Public tasks: one split for every machine, declared populations, readers that agree with their sources."""

import hashlib
import json

import pytest

from dpmerge.common.data import tasks
from dpmerge.common.data.assets import ASSETS, listing
from dpmerge.common.data.tasks import TASKS, load_task, split
from dpmerge.common.errors import DpmergeError

# Records in both halves, and SHA-256 (first 16 digits) of the halves as JSON: equal under Python 3.11, 3.12 and 3.13.
GOLDEN = {
    "trec6": (2800, 700, "9eb16c3f18642985"),
    "movie": (2800, 700, "eee317e1db8aa88c"),
    "product": (2381, 596, "429a3ed7ee402930"),
    "editorial": (2344, 587, "01980b6ce431d14d"),
    "tweet": (2800, 700, "29d385d89081831a"),
    "sms": (2800, 700, "87c4fff99f4415c4"),
    "bbc": (1698, 425, "3c2be106c53fe7bc"),
    "mail": (2800, 700, "f32fa79bc70a055f"),
    "news": (2800, 700, "3b87ee92b442c721"),
}


@pytest.mark.parametrize("name", TASKS)
def test_halves_are_the_same_everywhere(name: str) -> None:
    asset = TASKS[name].asset
    if not next(row for row in listing() if row["name"] == asset)["present"]:
        pytest.skip(f"asset {asset} is not in the cache; run `dpmerge assets fetch {asset}`")
    data = load_task(name)
    rows = [[data.train.texts, data.train.labels], [data.test.texts, data.test.labels]]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
    assert (len(data.train), len(data.test), digest) == GOLDEN[name]
    assert not set(data.train.texts) & set(data.test.texts)
    assert set(data.train.labels) == set(data.test.labels) == set(range(len(TASKS[name].labels)))
    assert abs(TASKS[name].population - len(data.train)) <= 60  # declared, rounded, and not read off the records


def test_split_does_not_depend_on_the_order_of_the_source() -> None:
    rows = [(f"text {number}", "ab"[number % 2]) for number in range(500)]
    data = split(rows, ["a", "b"], 400)
    assert (len(data.train), len(data.test)) == (320, 80)
    assert split(rows[::-1], ["a", "b"], 400) == data
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in data.train.texts + data.test.texts]
    assert digests == sorted(digests)
    left_out = {text for text, _ in rows}.difference(data.train.texts, data.test.texts)
    assert min(hashlib.sha256(text.encode()).hexdigest() for text in left_out) > digests[-1]
    assert all(int(text.split()[1]) % 2 == label for text, label in zip(data.test.texts, data.test.labels, strict=True))


def test_split_keeps_the_first_of_equal_texts_and_drops_what_is_empty_or_undeclared() -> None:
    rows = [("same  text", "a"), ("same\ntext", "b"), ("  ", "a"), ("other", "c"), ("x" * 9000, "b")]
    data = split(rows, ["a", "b"], 10)
    pairs = dict(zip(data.train.texts + data.test.texts, data.train.labels + data.test.labels, strict=True))
    assert pairs == {"same text": 0, "x" * tasks.MAX_CHARACTERS: 1}


def test_unknown_task_lists_the_valid_ones() -> None:
    with pytest.raises(
        DpmergeError, match=r"DPM-104: task 'trec' is unknown; choose one of .*mail.*\(closest: trec6\)"
    ):
        load_task("trec")


def test_registry_and_assets_name_each_other() -> None:
    for name, task in TASKS.items():
        assert name == task.name
        assert name in ASSETS[task.asset].tasks
        assert len(set(task.labels.values())) == len(task.labels) >= 2
    assert sorted(name for asset in ASSETS.values() for name in asset.tasks) == sorted(TASKS)
