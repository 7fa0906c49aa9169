import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from dpmerge.client.budget.ledger import Ledger
from dpmerge.client.budget.ledger_checks import check_against_release
from dpmerge.client.verification import verify_path
from dpmerge.common.release.format import ADAPTER, SIGNATURE, release_files, release_hash, to_files, write_files
from dpmerge.common.release.manifest import manifest_hash, manifest_of, parse_signature
from dpmerge.server.intake.receipts import make_receipt
from tests.signed_releases import KEY, SERVER_KEY, STRANGER, release, signed_files, statement

NOW = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def site(tmp_path):
    """A release that was paid for, signed, received: release/, ledger.jsonl, receipt.json and keys.toml."""
    ledger = Ledger(tmp_path / "ledger.jsonl").create()
    ledger.reserve(dataset="reviews", binding="earlier", charge=dict(statement()))
    reservation = ledger.reserve(dataset="reviews", binding="b", charge=dict(statement()))
    files = signed_files(ledger_head=ledger.head())
    write_files(tmp_path / "release", files)
    ledger.released(reservation, release_hash(files))
    manifest = manifest_of(parse_signature(files[SIGNATURE], "shop"), "shop")
    receipt = make_receipt(
        manifest, manifest_sha256=manifest_hash(files[SIGNATURE]), spool_sha256="e" * 64, time=NOW, key=SERVER_KEY
    )
    (tmp_path / "receipt.json").write_bytes(receipt)
    write_keys(tmp_path)
    return tmp_path


def write_keys(folder, revoked=None):
    keys = f'schema = 1\n[keys]\nshop = "{KEY.public}"\nserver = "{SERVER_KEY.public}"\n'
    if revoked is not None:
        keys += f'[[revoked]]\nkey_id = "{KEY.public.id}"\nsince = {revoked.isoformat()}\n'
    (folder / "keys.toml").write_text(keys)


def verdicts(text, name="verify"):
    told = json.loads(text)[name]
    return told["verdict"], {check["check"]: check["status"] for check in told["checks"]}


def test_a_release_with_all_that_belongs_to_it_passes(dpmerge, site):
    options = ["--allow", site / "keys.toml", "--receipt", site / "receipt.json", "--ledger", site / "ledger.jsonl"]
    code, out, err = dpmerge("verify", site / "release", *options, "--format", "json")
    verdict, checks = verdicts(out)
    assert (code, verdict, err) == (0, "PASS", "")
    assert {"signature", "epsilon by PRV", "receipt signature", "receipt", "ledger head", "ledger release"} <= set(
        checks
    )
    code, out, _ = dpmerge("verify", site / "release", *options)
    assert code == 0
    assert "epsilon by PLD" in out
    assert "Nobody can check" in out


def test_the_exit_code_tells_of_a_changed_byte(dpmerge, site):
    path = site / "release" / "adapter_config.json"
    path.write_bytes(path.read_bytes() + b"\n")
    code, out, _ = dpmerge("verify", site / "release", "--key", KEY.public, "--format", "json")
    assert (code, verdicts(out)) == (1, ("FAIL", {"signature": "PASS", "files": "FAIL"}))


def test_a_revoked_key_is_good_for_what_was_received_before(dpmerge, site):
    write_keys(site, revoked=NOW + timedelta(days=1))
    release, listed, receipt = site / "release", ["--allow", site / "keys.toml"], ["--receipt", site / "receipt.json"]
    assert dpmerge("verify", release, *listed)[0] == 1
    assert dpmerge("verify", release, *listed, *receipt)[0] == 0
    write_keys(site, revoked=NOW - timedelta(days=1))
    assert dpmerge("verify", release, *listed, *receipt)[0] == 1


def test_a_receipt_by_itself_and_of_another_release(dpmerge, site):
    receipt = site / "receipt.json"
    code, out, _ = dpmerge("verify", receipt, "--key", SERVER_KEY.public, "--format", "json")
    assert (code, verdicts(out)) == (0, ("PASS", {"format": "PASS", "signature": "PASS"}))
    assert dpmerge("verify", receipt, "--key", STRANGER.public)[0] == 1
    write_files(site / "other", signed_files(ledger_head="0" * 64))
    code, out, _ = dpmerge("verify", site / "other", "--receipt", receipt, "--format", "json")
    assert (code, verdicts(out)[1]["receipt"]) == (1, "FAIL")
    receipt.write_bytes(receipt.read_bytes()[:-1])
    code, out, _ = dpmerge("verify", receipt, "--format", "json")
    assert (code, verdicts(out)) == (1, ("FAIL", {"format": "FAIL"}))


def test_a_merged_model_is_told_apart(dpmerge, site):
    one = release()
    record = {
        "schema": 1,
        "inputs": [{"party": "shop", "sha256": "a" * 64, "epsilon": 0.3, "weight": 1.0}],
        "method": "average",
        "versions": {"dpmerge": "0.1.0"},
        "parameters": {},
        "absent": [],
        "coefficient": 1.0,
        "truncation_error": 0.0,
        **dict.fromkeys(("base_sha256", "statistics_sha256", "factors", "noise", "robust")),
    }
    merged = replace(one, party="merged", statement={}, merge=record)
    write_files(site / "merged", to_files(merged))
    code, out, _ = dpmerge("verify", site / "merged", "--format", "json")
    assert (code, verdicts(out)[0], json.loads(out)["verify"]["kind"]) == (0, "WARN", "merged model")
    for number, wrong in enumerate(({"inputs": []}, {"schema": True}, {"schema": 1.0}, {"extra": 1})):
        write_files(site / f"wrong{number}", to_files(replace(merged, merge=record | wrong)))
        assert dpmerge("verify", site / f"wrong{number}")[0] == 1


@pytest.mark.parametrize("option", ["--key", "--allow", "--receipt", "--ledger"])
def test_options_that_say_nothing_about_what_lies_there_are_refused(dpmerge, site, option):
    values = {"--key": str(KEY.public), "--allow": site / "keys.toml", "--receipt": site / "receipt.json"}
    value = values.get(option, site / "receipt.json")
    merged = replace(release(), party="merged", statement={}, merge={"method": "average"})
    write_files(site / "merged", to_files(merged))
    code, _, err = dpmerge("verify", site / "merged", option, value)
    assert (code, f"{option} cannot be used with a merged model" in err) == (2, True)
    if option in ("--receipt", "--ledger"):
        code, _, err = dpmerge("verify", site / "receipt.json", option, value)
        assert (code, f"{option} cannot be used with a receipt" in err) == (2, True)


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse", "link", "many"])
def test_no_file_of_a_folder_is_waited_for_or_followed(dpmerge, site, kind):
    folder = site / "odd"
    write_files(folder, signed_files())
    victim = folder / ADAPTER
    if kind == "many":
        for number in range(200):
            (folder / f"more{number}").touch()
    else:
        victim.unlink()
    if kind == "pipe":
        os.mkfifo(victim)
    elif kind == "device":
        victim.symlink_to("/dev/zero")
    elif kind == "sparse":
        with victim.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "link":
        victim.symlink_to(site / "release" / ADAPTER)
    start = time.monotonic()
    assert dpmerge("verify", folder)[0] == 1
    assert time.monotonic() - start < 5


def test_bad_input_is_refused_in_one_line(dpmerge, site):
    release = site / "release"
    for arguments in (
        [site / "none"],
        [release, "--key", "abc"],
        [release, "--allow", site / "none"],
        [release, "--allow", site / "keys.toml", "--key", KEY.public],
        [release, "--receipt", site / "none"],
        [release, "--ledger", site / "none"],
    ):
        code, out, err = dpmerge("verify", *arguments)
        assert (code, out, err.count("\n"), err[:4]) == (2, "", 1, "DPM-")
    (release / "adapter_model.bin").touch()
    code, out, _ = dpmerge("verify", release, "--format", "json")
    assert (code, verdicts(out)) == (1, ("FAIL", {"format": "FAIL"}))


def test_a_cut_ledger_shows_against_release_and_receipt(dpmerge, site):
    path = site / "ledger.jsonl"
    against = ["--against", site / "release", "--against", site / "receipt.json"]
    code, out, _ = dpmerge("ledger", "verify", path, *against, "--format", "json")
    assert (code, verdicts(out, "ledger")[0]) == (0, "PASS")
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:1]))
    code, out, _ = dpmerge("ledger", "verify", path, "--format", "json")
    assert (code, verdicts(out, "ledger")) == (0, ("WARN", {"chain": "PASS", "ledger head": "WARN"}))
    for evidence in ("release", "receipt.json"):
        assert dpmerge("ledger", "verify", path, "--against", site / evidence)[0] == 1
    path.write_bytes(b"".join(whole[1:]))
    code, out, _ = dpmerge("ledger", "verify", path, "--format", "json")
    assert (code, verdicts(out, "ledger")) == (1, ("FAIL", {"chain": "FAIL"}))


def test_an_unsigned_release_is_found_in_the_ledger_without_a_head(dpmerge, site):
    (site / "release" / "signature.json").unlink()
    code, out, _ = dpmerge("ledger", "verify", site, "--against", site / "release", "--format", "json")
    _, checks = verdicts(out, "ledger")
    assert (code, checks["ledger head"], checks["ledger charge"], checks["ledger release"]) == (
        0,
        "WARN",
        "PASS",
        "PASS",
    )


def test_no_party_signs_its_own_receipt(site):
    files = release_files(site / "release")
    manifest = manifest_of(parse_signature(files[SIGNATURE], "shop"), "shop")
    own = {"manifest_sha256": manifest_hash(files[SIGNATURE]), "spool_sha256": "e" * 64, "time": NOW}
    (site / "receipt.json").write_bytes(make_receipt(manifest, **own, key=KEY))
    given = {"keys": [str(KEY.public)], "key_list": None, "receipt": site / "receipt.json", "ledger": None}
    _, checks = verify_path(site / "release", **given)
    assert {check.name for check in checks if check.status == "FAIL"} == {"receipt signature"}


def test_a_second_release_on_a_charge_that_paid_for_the_first_fails(tmp_path):
    ledger, charge = Ledger(tmp_path / "ledger.jsonl").create(), json.loads(json.dumps(statement()))
    reservation = ledger.reserve(dataset="reviews", binding="b", charge=charge)
    told = [check_against_release(ledger.lines(), ledger.head(), charge, "2" * 64)[-1]]  # a crash: not yet recorded
    ledger.released(reservation, "1" * 64)
    told += [check_against_release(ledger.lines(), ledger.head(), charge, name * 64)[-1] for name in "12"]
    assert [check.status for check in told] == ["WARN", "PASS", "FAIL"]


def test_a_ledger_that_charged_something_else_fails(dpmerge, tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl").create()
    ledger.reserve(dataset="reviews", binding="b", charge={**statement(), "epsilon": 0.01})
    write_files(tmp_path / "release", signed_files(ledger_head=ledger.head()))
    code, out, _ = dpmerge("ledger", "verify", tmp_path, "--against", tmp_path / "release", "--format", "json")
    assert (code, verdicts(out, "ledger")[1]["ledger charge"]) == (1, "FAIL")


POLICY = f"""
schema = 1
state = "state"
base_models = ["{"c" * 64}"]
server_keys = ["{SERVER_KEY.public}"]
[dataset.reviews]
data = "reviews.csv"
epsilon_cap = 5.0
delta = 1e-5
[dataset.questions]
task = "trec6"
epsilon_cap = 1.0
delta = 1e-5
"""


def test_charges_are_shown_and_composed(dpmerge, site):
    policy = site / "policy.toml"
    policy.write_text(POLICY)
    assert dpmerge("ledger", "show", "--policy", policy)[1] == "no ledger yet\n"
    (site / "state" / "ledgers").mkdir(parents=True)
    (site / "state" / "ledgers" / "reviews.jsonl").write_bytes((site / "ledger.jsonl").read_bytes())
    assert "reviews: " in dpmerge("ledger", "show", "--policy", policy)[1]
    of_site = ["reviews", "--policy", policy]
    charges = json.loads(dpmerge("ledger", "show", *of_site, "--format", "json")[1])["ledger"]["charges"]
    assert [charge["state"] for charge in charges] == ["reserved", "released"]
    assert "released" in dpmerge("ledger", "show", *of_site)[1]
    one, both = (
        json.loads(dpmerge("ledger", "compose", *of_site, *chosen, "--format", "json")[1])["composition"]
        for chosen in (["--reservation", charges[0]["reservation"][:8]], [])
    )
    assert (one["charges"], both["charges"], both["delta"]) == (1, 2, 1e-5)
    assert one["epsilon"] == pytest.approx(statement()["epsilon"], abs=1e-6)
    assert one["epsilon"] < both["epsilon"] < 2 * one["epsilon"]
    assert dpmerge("ledger", "compose", *of_site, "--reservation", "")[0] == 2
    code, _, err = dpmerge("ledger", "show", "review", "--policy", policy)
    assert (code, "closest: reviews" in err) == (2, True)
    for arguments in ([], ["reviews"]):  # no place is looked at that nobody named
        assert dpmerge("ledger", "show", *arguments)[0] == 2


def test_a_ledger_is_created_and_bound_by_its_owner_and_once(dpmerge, tmp_path):
    policy, state = tmp_path / "policy.toml", tmp_path / "state" / "ledgers"
    policy.write_text(POLICY)
    assert dpmerge("ledger", "create", policy, "review")[0] == 2
    assert not state.exists()
    code, out, _ = dpmerge("ledger", "create", policy, "reviews", "--format", "json")
    assert (code, json.loads(out)["ledgers"]) == (0, {"reviews": str(state / "reviews.jsonl")})
    assert (state.stat().st_mode & 0o077, (state / "reviews.jsonl").stat().st_mode & 0o077) == (0, 0)
    before = (state / "reviews.jsonl").read_bytes()
    code, _, err = dpmerge("ledger", "create", policy, "reviews")
    assert (code, "DPM-504" in err) == (2, True)
    assert "questions" in dpmerge("ledger", "create", policy)[1]
    assert "has a ledger" in dpmerge("ledger", "create", policy)[1]
    assert (state / "reviews.jsonl").read_bytes() == before
    assert dpmerge("ledger", "verify", "reviews", "--policy", policy)[0] == 0
    assert "head" in dpmerge("ledger", "show", "reviews", "--policy", policy)[1]

    policy.write_text(POLICY.replace("reviews.csv", "moved.csv"))
    assert "moved.csv; before: reviews at" in dpmerge("ledger", "bind", policy, "reviews")[1]
    assert Ledger(state / "reviews.jsonl").bound().place == str(tmp_path / "moved.csv")
    dpmerge("ledger", "bind", policy, "reviews")
    assert len(Ledger(state / "reviews.jsonl").entries()) == 2
    (state / "questions.jsonl").unlink()
    assert dpmerge("ledger", "bind", policy, "questions")[0] == 2
    assert not (state / "questions.jsonl").exists()
