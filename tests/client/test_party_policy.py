"""A party under its site's policy: one ledger whatever the folder, a cap before training, a signed release on top."""

from datetime import UTC, datetime

import pytest

from dpmerge.client import party as party_module
from dpmerge.client.budget import Cap
from dpmerge.client.ledger import Ledger
from dpmerge.client.ledger_checks import check_against_release
from dpmerge.client.party import run_party
from dpmerge.client.policy import DataSet, Policy
from dpmerge.client.signed_release import sign_release
from dpmerge.common.errors import DpmergeError
from dpmerge.common.manifest import manifest_of, parse_signature
from dpmerge.common.model import load_base
from dpmerge.common.release import SIGNATURE, release_from_files, release_hash
from dpmerge.common.verify import Trust, check_release, verdict
from tests.signed_releases import FEDERATION, KEY, KEYS

from .test_party import make_plan


def train(plan, folder, policy):
    return run_party(plan, load_base(plan.base.model), folder, policy=policy)


@pytest.fixture
def plan(product_files):
    return make_plan(product_files[0], privacy={"noise": "secure", "noise_seed": None, "epsilon": 1.0})


@pytest.fixture
def policy(product_files, tmp_path):
    dataset = DataSet(id="reviews", source=product_files[0].resolve(), cap=Cap(epsilon=1.2, delta=1e-5))
    return Policy(state=tmp_path / "state", datasets=(dataset,))


def test_a_second_training_beyond_the_cap_never_starts(plan, policy, tmp_path, monkeypatch):
    files = train(plan, tmp_path / "a", policy)
    ledger = Ledger(tmp_path / "state" / "ledgers" / "reviews.jsonl")
    assert [entry["kind"] for entry in ledger.entries()] == ["reserve", "released"]
    assert not (tmp_path / "a" / "ledger.jsonl").exists()
    assert train(plan, tmp_path / "a", policy) == files  # the same folder: nothing more
    before = ledger.head()
    monkeypatch.setattr(party_module, "train", lambda *_args, **_kwargs: pytest.fail("trained beyond the cap"))
    with pytest.raises(
        DpmergeError, match=r"DPM-506: data set 'reviews': requested epsilon = 1, spent 1, together 1\."
    ):
        train(plan, tmp_path / "b", policy)
    assert ledger.head() == before

    signed = sign_release(files, federation=FEDERATION, ledger_head=before, key=KEY)
    assert verdict(check_release(signed, Trust(datetime.now(UTC), key_list=KEYS))) == "WARN"  # tuning: not disclosed
    manifest = manifest_of(parse_signature(signed[SIGNATURE], "shop"), "shop")
    statement = release_from_files(signed).statement
    checks = check_against_release(ledger.lines(), manifest.ledger_head, statement, release_hash(files))
    assert verdict(checks) == "PASS"


def test_what_the_policy_forbids_reads_no_record(plan, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(party_module, "read_training", lambda _plan: pytest.fail("records were read"))
    other = Policy(state=policy.state, datasets=policy.datasets, base_models=frozenset({"0" * 64}))
    with pytest.raises(DpmergeError, match="DPM-507"):
        train(plan, tmp_path / "a", other)
