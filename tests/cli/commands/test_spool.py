"""`dpmerge spool`: what is there, and a withdrawal that lasts, can be repeated and undoes nothing."""

import json
import os

import pytest

from dpmerge.server.intake.spool import Spool
from tests.signed_releases import STRANGER, signed_files, statement

SENT = {"cinema": signed_files(told=statement("cinema"), key=STRANGER), "shop": signed_files()}


@pytest.fixture
def folder(tmp_path):
    for party, files in SENT.items():
        Spool(tmp_path / "spool").accept(party, files)
    return tmp_path / "spool"


def shown(dpmerge, folder):
    code, out, _ = dpmerge("spool", "show", folder, "--format", "json")
    assert code == 0
    return {row["party"]: row for row in json.loads(out)["spool"]}


def test_every_release_is_shown_with_its_epsilon_withdrawn_or_not(dpmerge, folder):
    Spool(folder).withdraw("shop")
    rows = shown(dpmerge, folder)
    assert {party: row["sha256"] for party, row in rows.items()} == Spool(folder).hashes()
    assert {party: row["withdrawn"] for party, row in rows.items()} == {"cinema": False, "shop": True}
    told = statement()
    assert (rows["shop"]["epsilon"], rows["shop"]["delta"]) == (told["epsilon"], told["target_delta"])
    code, out, _ = dpmerge("spool", "show", folder)
    assert code == 0
    lines = {line.split()[1]: line.split()[-2] for line in out.splitlines() if line.startswith("│")}
    assert lines == {"cinema": "yes", "shop": "no"}


def test_a_withdrawal_lasts_and_may_be_repeated(dpmerge, folder, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor)))
    for _ in range(2):
        code, out, _ = dpmerge("spool", "withdraw", folder, "shop")
        assert code == 0
        assert "models merged before stay what they are" in out
        assert f"dpmerge merge --from-spool {folder} --out DIR" in out
    assert len(synced) >= 4  # file and folder, each time
    assert Spool(folder).releases() == {"cinema": SENT["cinema"]}
    assert Spool(folder).release("shop") == SENT["shop"]  # for the record


def test_the_last_withdrawal_leaves_nothing_to_merge(dpmerge, folder):
    dpmerge("spool", "withdraw", folder, "shop")
    code, out, _ = dpmerge("spool", "withdraw", folder, "cinema", "--format", "json")
    assert code == 0
    assert json.loads(out) == {"schema": 1, "withdrawn": "cinema", "left": [], "merge_again": None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["withdraw", "SPOOL", "bank"], "'bank' has no release here [unknown-party]; the spool holds cinema, shop"),
        (["withdraw", "SPOOL", "../shop"], "has no release here"),
        (["withdraw", "nowhere", "shop"], "DPM-403: nowhere is no spool"),
        (["show", "nowhere"], "DPM-403: nowhere is no spool"),
    ],
    ids=["stranger", "path", "withdraw nowhere", "show nowhere"],
)
def test_bad_input_is_one_line_and_exit_code_2(dpmerge, folder, arguments, words):
    code, out, err = dpmerge("spool", *(folder if argument == "SPOOL" else argument for argument in arguments))
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert not Spool(folder).withdrawn()


def test_damaged_bytes_are_told_by_party(dpmerge, folder):
    digest = Spool(folder).hashes()["shop"]
    path = folder / "releases" / digest / "statement.json"
    path.write_bytes(path.read_bytes() + b" ")
    code, out, err = dpmerge("spool", "show", folder)
    assert (code, out) == (2, "")
    assert "shop" in err
    assert "[corrupted]" in err
