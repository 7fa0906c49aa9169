from pathlib import Path

import pytest

from dpmerge.client.budget import Cap, check_cap, total_epsilon
from dpmerge.client.ledger import Ledger
from dpmerge.client.policy import ledger_path, load_policy, open_account, state_folder
from dpmerge.common.accounting import epsilon_pld, epsilon_together
from dpmerge.common.config import parse_federation, party_plan
from dpmerge.common.errors import DpmergeError
from dpmerge.common.mechanism import Mechanism

from .charges import charge_of

BASE = "b" * 64
POLICY = f"""
schema = 1
state = "state"
base_models = ["{BASE}"]
server_keys = ["ed25519:{"a" * 64}"]
[dataset.reviews]
data = "reviews.csv"
epsilon_cap = 2.0
delta = 1e-5
[dataset.questions]
task = "trec6"
epsilon_cap = 1.0
delta = 1e-6
unit = "user"
"""
FEDERATION = """
[base]
model = "minilm-l6"
[privacy]
epsilon = 1.0
[[party]]
name = "shop"
data = "{data}"
labels = {{ "1" = "bad", "5" = "good" }}
population = 3000
"""


def mechanism(sigma=2.0, **changes):
    numbers = {"l2_clip_norm": 1.0, "population": 2800, "expected_batch_size": 128, "num_steps": 40}
    return Mechanism(**{"noise_multiplier": sigma, "target_delta": 1e-5, "noise": "fast", **numbers, **changes})


@pytest.fixture
def policy(tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY)
    return load_policy(tmp_path / "policy.toml")


def plan_of(folder, data="reviews.csv", more=""):
    return party_plan(parse_federation(FEDERATION.format(data=data) + more, "test.toml", folder=folder), "shop")


def test_a_data_set_keeps_one_ledger_whatever_runs_on_it(policy, tmp_path):
    first = open_account(plan_of(tmp_path), BASE, tmp_path / "run-1", policy)
    second = open_account(plan_of(tmp_path), BASE, tmp_path / "run-2", policy)
    assert (first.dataset, first.cap) == ("reviews", Cap(epsilon=2.0, delta=1e-5))
    first.ledger.reserve(dataset=first.dataset, binding="b", charge=charge_of(mechanism()), cap=first.cap)
    assert len(second.ledger.entries()) == 1
    path = tmp_path / "state" / "ledgers" / "reviews.jsonl"
    assert path.is_file()
    assert path.parent.stat().st_mode & 0o077 == 0
    alone = open_account(plan_of(tmp_path), BASE, tmp_path, None)
    assert (alone.dataset, alone.cap, alone.ledger.entries()) == ("shop", None, [])


@pytest.mark.parametrize(
    ("data", "more", "base"),
    [
        ("others.csv", "", BASE),
        ("reviews.csv", "", "c" * 64),
        ("reviews.csv", "privacy = { noise = 'fast' }", BASE),
    ],
)
def test_what_the_policy_does_not_list_is_refused(policy, tmp_path, data, more, base):
    with pytest.raises(DpmergeError, match="DPM-507"):
        open_account(plan_of(tmp_path, data, more), base, tmp_path, policy)
    assert not (tmp_path / "state").exists()


def test_training_without_privacy_is_refused(policy, tmp_path):
    text = FEDERATION.replace("epsilon = 1.0", "private = false")
    plan = party_plan(parse_federation(text.format(data="reviews.csv"), "test.toml", folder=tmp_path), "shop")
    with pytest.raises(DpmergeError, match="private = false is not allowed"):
        open_account(plan, BASE, tmp_path, policy)


def test_no_policy_allows_noise_that_somebody_knows(tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY.replace("state =", "noise = 'fast'\nstate =", 1))
    lenient = load_policy(tmp_path / "policy.toml")
    open_account(plan_of(tmp_path, more="privacy = { noise = 'fast' }"), BASE, tmp_path, lenient)
    seeded = plan_of(tmp_path, more="privacy = { noise = 'fast', noise_seed = 7 }")
    with pytest.raises(DpmergeError, match="DPM-507: noise_seed"):
        open_account(seeded, BASE, tmp_path, lenient)


@pytest.mark.parametrize("public", ["trec6", "more/old.csv", "more", "link"])
def test_directions_of_a_data_set_of_the_site_are_refused_whatever_the_federation_calls_public(tmp_path, public):
    more = "[dataset.more]\ndata = 'more/old.csv'\nepsilon_cap = 1.0\ndelta = 1e-5\n"
    (tmp_path / "policy.toml").write_text(POLICY + more)
    (tmp_path / "link").symlink_to(tmp_path / "more")
    policy = load_policy(tmp_path / "policy.toml")

    def plan(public):
        subspace = f"training = {{ subspace = {{ k = 8, public = '{public}' }} }}"
        return plan_of(tmp_path, more=subspace)

    for allowed in ("sms", "none", "public.csv"):
        open_account(plan(allowed), BASE, tmp_path, policy)
    with pytest.raises(DpmergeError, match=r"DPM-507: subspace\.public"):
        open_account(plan(public), BASE, tmp_path, policy)


@pytest.mark.parametrize("name", ["reviews.csv", "./reviews.csv", "link.csv", "reviews.csv::train"])
def test_another_way_to_write_the_path_is_the_same_data(policy, tmp_path, name):
    (tmp_path / "reviews.csv").touch()
    (tmp_path / "link.csv").symlink_to(tmp_path / "reviews.csv")
    assert policy.dataset_of(plan_of(tmp_path, name).source).id == "reviews"


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("schema = 1", "schema = 2", "DPM-103"),
        ("schema = 1", "schema = 1\ncap = 1", "DPM-102"),
        ("schema = 1", "schema = ", "DPM-101"),
        ("[dataset.reviews]", "[dataset.'../x']", "DPM-103"),
        ("epsilon_cap = 2.0", "epsilon_cap = inf", "DPM-103"),
        ("epsilon_cap = 2.0", "epsilon_cap = nan", "DPM-103"),
        ("epsilon_cap = 2.0", "epsilon_cap = true", "DPM-103"),
        ("epsilon_cap = 2.0", "", "DPM-103"),
        ("epsilon_cap = 2.0", "epsilon = 2.0", "DPM-102"),
        ("delta = 1e-5", "delta = 0", "DPM-103"),
        ("delta = 1e-5", "delta = 1e-5\nunit = 'family'", "DPM-103"),
        ('task = "trec6"', 'data = "./reviews.csv"', "DPM-103"),  # one file, two ledgers
        ('task = "trec6"', 'data = "reviews.csv/.."', "DPM-103"),  # a folder and a file in it
        ('task = "trec6"', 'data = "reviews.csv/part.csv"', "DPM-103"),
        ('task = "trec6"', 'task = "trec6"\ndata = "x.csv"', "DPM-103"),
        ('task = "trec6"', "", "DPM-103"),
        ('state = "state"', "state = 1", "DPM-103"),
        ('state = "state"', 'noise = "none"', "DPM-103"),
        (BASE, "short", "DPM-103"),
        ("ed25519:", "", "DPM-205"),
    ],
)
def test_a_policy_that_is_not_understood_is_refused(tmp_path, old, new, code):
    path = tmp_path / "policy.toml"
    path.write_text(POLICY.replace(old, new, 1))
    with pytest.raises(DpmergeError, match=code):
        load_policy(path)


def test_the_state_folder_is_the_sites_or_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("DPMERGE_STATE", str(tmp_path))
    assert state_folder() == tmp_path
    monkeypatch.delenv("DPMERGE_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_folder() == Path("/state/dpmerge")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == Path.home() / ".local/state/dpmerge"
    assert ledger_path(tmp_path / "new", "reviews") == tmp_path / "new/ledgers/reviews.jsonl"


def reserved(*charges, dataset="reviews"):
    return [{"kind": "reserve", "dataset": dataset, "charge": charge} for charge in charges]


def test_the_cap_holds_the_composition_and_says_what_is_missing():
    first, second = mechanism(2.0), mechanism(1.5, num_steps=10)
    spent, requested = epsilon_pld(first), epsilon_pld(second)
    together = epsilon_together([first, second], 1e-5)
    assert together < spent + requested
    entries = reserved(charge_of(first))
    check_cap(entries, "reviews", charge_of(second), Cap(epsilon=together + 1e-6, delta=1e-5))
    cap = Cap(epsilon=together - 0.01, delta=1e-5)
    with pytest.raises(DpmergeError) as refusal:
        check_cap(entries, "reviews", charge_of(second), cap)
    told = str(refusal.value)
    assert refusal.value.code == "DPM-506"
    for words, number in (("requested epsilon = ", requested), ("spent ", spent), ("together ", together)):
        assert float(told.split(words)[1].split()[0].rstrip(",")) == pytest.approx(number, abs=2e-4)
    assert f"remaining {cap.epsilon - spent:.4g}, short by 0.01)" in told
    check_cap(reserved(charge_of(first), dataset="others"), "reviews", charge_of(second), cap)


def test_the_cap_counts_at_its_own_delta_and_whatever_became_of_a_reservation(tmp_path):
    ledger, charge = Ledger(tmp_path / "ledger.jsonl"), charge_of(mechanism())
    alone = total_epsilon([charge], 1e-7)
    assert alone > total_epsilon([charge], 1e-5)
    cap = Cap(epsilon=alone + 1e-6, delta=1e-7)
    ledger.reserve(dataset="reviews", binding="b", charge=charge, cap=cap)
    ledger.abandon()
    with pytest.raises(DpmergeError, match="DPM-506"):
        ledger.reserve(dataset="reviews", binding="b", charge=charge, cap=cap)
    assert [entry["kind"] for entry in ledger.entries()] == ["reserve", "abandoned"]


@pytest.mark.parametrize(
    ("charge", "code"),
    [
        (charge_of(mechanism(noise_multiplier=0.0, private=False)), "DPM-506"),
        (charge_of(mechanism(0.1)), "DPM-506"),
        (charge_of(mechanism(privacy_unit="user")), "DPM-507"),
        ({"epsilon": 0.1}, "DPM-504"),
        (charge_of(mechanism()) | {"num_steps": -1}, "DPM-504"),
    ],
)
def test_what_cannot_be_held_against_a_cap_is_refused(charge, code):
    with pytest.raises(DpmergeError, match=code):
        check_cap([], "reviews", charge, Cap(epsilon=50.0, delta=1e-5))


def test_charges_of_two_units_do_not_compose():
    with pytest.raises(DpmergeError, match="do not compose"):
        total_epsilon([charge_of(mechanism()), charge_of(mechanism(privacy_unit="user"))], 1e-5)
