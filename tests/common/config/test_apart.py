"""What a federation file calls public is no party's data, whatever it is called."""

import os

import pytest

from dpmerge.common.config.federation import load_federation, parse_federation, party_plan, plan_from_dict
from dpmerge.common.errors import DpmergeError

SHARED = '[base]\nmodel = "minilm-l6"\n[privacy]\nepsilon = 1\n'
PARTY = """
[[party]]
name = "{name}"
data = "{data}"
population = 3000
labels = {{ "1" = "a bad product", "5" = "a great product" }}
"""
HEADER = "text,label\n"


@pytest.fixture
def folder(tmp_path):
    """A party's file and folder of splits, another party's file, and other names of them."""
    for name in ("own.csv", "others.csv", "open.csv", "splits/train.csv", "splits/test.csv", "around/deep/private.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(HEADER + f"{name},1\n")
    (tmp_path / "soft.csv").symlink_to("others.csv")
    os.link(tmp_path / "others.csv", tmp_path / "hard.csv")
    (tmp_path / "box").mkdir()
    os.link(tmp_path / "others.csv", tmp_path / "box" / "test.csv")
    (tmp_path / "box" / "train.csv").write_text(HEADER)
    return tmp_path


def federation(folder, *, test=None, public=None, data="own.csv", others="others.csv"):
    text = SHARED if public is None else SHARED + f'[training]\nsubspace = {{ k = 4, public = "{public}" }}\n'
    text += PARTY.format(name="shop", data=data) + (f'test = "{test}"\n' if test else "")
    (folder / "f.toml").write_text(text + PARTY.format(name="library", data=others))
    return load_federation(folder / "f.toml")


OTHERS = ["others.csv", "./box/../others.csv", "soft.csv", "hard.csv", "box", "box::test", "box/test.csv"]


@pytest.mark.parametrize("path", [*OTHERS, "around", "around/deep/private.csv"])
def test_another_partys_data_is_no_test_file_and_no_public_text(folder, path):
    others = "around/deep" if path.startswith("around") else "others.csv"
    with pytest.raises(DpmergeError, match=r"DPM-103: party\[0\]\.test = .* is the private data of party library"):
        federation(folder, test=path, others=others)
    with pytest.raises(DpmergeError, match=r"DPM-103: training\.subspace\.public = .* is the data of party library"):
        federation(folder, public=path, others=others)


@pytest.mark.parametrize(
    ("data", "test", "is_free"),
    [
        ("splits::train", "splits::test", True),
        ("splits::train", "splits::train", False),
        ("splits::train", "splits::training", False),
        ("splits", "splits::test", False),  # which split is read, only the files tell
        ("splits::train", "splits", False),
        ("splits", "splits::train", False),
        ("splits::train", "splits/test.csv", False),
        ("own.csv", "open.csv", True),
        ("own.csv", "box::train", True),
    ],
)
def test_another_split_is_a_test_file_if_both_are_named_and_share_no_file(folder, data, test, is_free):
    if is_free:
        assert party_plan(federation(folder, data=data, test=test), "shop").source.test.endswith(test)
        return
    with pytest.raises(DpmergeError, match=r"test = .* is the private data itself"):
        federation(folder, data=data, test=test)


@pytest.mark.parametrize(("data", "test"), [("data", "data::test"), ("data::train", "data"), ("data", "data")])
def test_a_split_that_is_not_named_may_be_any_also_before_there_are_files(tmp_path, data, test):
    text = SHARED + PARTY.format(name="shop", data=data) + f'test = "{test}"\n'
    with pytest.raises(DpmergeError, match="is the private data itself"):
        parse_federation(text, "f.toml", folder=tmp_path)


def test_two_names_of_one_file_are_no_two_splits(folder):
    (folder / "splits" / "test.csv").unlink()
    os.link(folder / "splits" / "train.csv", folder / "splits" / "test.csv")
    with pytest.raises(DpmergeError, match="is the private data itself"):
        federation(folder, data="splits::train", test="splits::test")


def test_no_plan_takes_its_own_data_for_a_test_file_however_it_was_made(folder):
    tables = party_plan(federation(folder, test="open.csv"), "shop").to_dict()
    os.link(folder / "own.csv", folder / "own-too.csv")
    for test in ("own.csv", "own-too.csv", "../" + folder.name + "/own.csv"):
        with pytest.raises(DpmergeError, match=r"source\.test = .* is the private data itself"):
            plan_from_dict(tables | {"source": {**tables["source"], "test": str(folder / test)}})


@pytest.mark.parametrize("key", ["data", "test", "public"])
def test_a_path_holds_one_mark_at_most(folder, key):
    with pytest.raises(DpmergeError, match=r"DPM-103: .* at most one ::"):
        federation(folder, **{key: "box::x::train"})


def test_many_parties_are_compared_at_once(tmp_path):
    parties = "".join(PARTY.format(name=f"p{n}", data=f"{n}.csv") + f'test = "{n}-open.csv"\n' for n in range(300))
    assert len(parse_federation(SHARED + parties, "f.toml", folder=tmp_path).parties) == 300
