"""`dpmerge merge --from-spool`: whoever has the spool merges again, to the same bytes, with or without a party."""

from dataclasses import replace

import pytest

from dpmerge.client.party.signed_release import sign_release
from dpmerge.common.release.format import MERGE, README, release_files, to_files
from dpmerge.common.untrusted.parsing import parse_json
from dpmerge.server.intake.spool import Spool
from dpmerge.server.merging.adapters.deltas import adapter_from_files
from dpmerge.server.merging.merge import as_release, merge
from dpmerge.server.merging.spec.spec import spec_of
from tests.signed_releases import FEDERATION, HEAD, KEY, STRANGER, release, statement

PEFT_SAYS = {"peft_type": "LORA", "bias": "none"}


def sent_by(party, key):
    plain = release(statement(party))
    whole = replace(plain, adapter_config=plain.adapter_config | PEFT_SAYS)
    return sign_release(to_files(whole), federation=FEDERATION, ledger_head=HEAD, key=key)


SENT = {"shop": sent_by("shop", KEY), "cinema": sent_by("cinema", STRANGER)}


@pytest.fixture
def spool(tmp_path):
    spool = Spool(tmp_path / "spool")
    for party, files in SENT.items():
        spool.accept(party, files)
    return spool


def merged(dpmerge, tmp_path, *options):
    where = ["--from-spool", str(tmp_path / "spool"), "--out", str(tmp_path / "out")]
    assert dpmerge("merge", *where, "--method", "average", "--seed", "7", *options)[0] == 0
    files = release_files(tmp_path / "out")
    del files[README]  # for people; a simulation writes none
    return files


def expected(*parties):
    adapters = [adapter_from_files(SENT[party], party) for party in parties]
    return to_files(as_release(merge(adapters, spec_of("average", seed=7)), adapters))


def test_a_spool_is_merged_to_the_bytes_of_the_run_that_filled_it(spool, dpmerge, tmp_path):
    assert merged(dpmerge, tmp_path) == expected("cinema", "shop")


def test_a_party_is_left_out_for_once_or_for_good(spool, dpmerge, tmp_path):
    alone = merged(dpmerge, tmp_path, "--without", "shop")
    assert alone == expected("cinema")
    spool.withdraw("shop")
    (tmp_path / "out").rename(tmp_path / "before")
    assert merged(dpmerge, tmp_path) == alone
    assert [entry["party"] for entry in parse_json(alone[MERGE], MERGE)["inputs"]] == ["cinema"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--from-spool", "nowhere"], "DPM-403"),
        (["--from-spool", "SPOOL", "--without", "bank"], "DPM-104"),
        (["--without", "shop"], "--from-spool"),
    ],
)
def test_no_spool_or_no_such_party_is_said(spool, dpmerge, tmp_path, options, code):
    options = [str(tmp_path / "spool") if option == "SPOOL" else option for option in options]
    status, _, told = dpmerge("merge", *options, "--out", tmp_path / "out")
    assert status == 2
    assert code in told
    assert not (tmp_path / "out").exists()
