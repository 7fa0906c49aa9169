"""What a federation file may choose under a site's policy, tried as somebody would who wants more than he may have."""

import hashlib
import os
import shutil

import pytest

from dpmerge.client.budget.composition import Cap, check_cap, total_epsilon
from dpmerge.client.budget.ledger import Ledger
from dpmerge.client.budget.policy import account_of, create_ledger, open_account
from dpmerge.client.budget.policy_file import load_policy
from dpmerge.common.config.federation import parse_federation, party_plan
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.accounting import epsilon_pld, epsilon_together
from dpmerge.common.privacy.mechanism import Mechanism

from .charges import charge_of

BASE = "b" * 64
PUBLIC = "good day\nsee you\n" * 8
POLICY = f"""
schema = 1
state = "state"
base_models = ["{BASE}"]
server_keys = ["ed25519:{"a" * 64}"]
public_texts = ["{hashlib.sha256(PUBLIC.encode()).hexdigest()}"]
[dataset.reviews]
data = "reviews.csv"
epsilon_cap = 2.0
delta = 1e-5
[dataset.questions]
task = "trec6"
epsilon_cap = 1.0
delta = 1e-6
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


def site_policy(folder, text=POLICY, *changes):
    """The policy in a folder, each data set with a ledger where there is none."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "policy.toml").write_text(text)
    policy = load_policy(folder / "policy.toml")
    for dataset in policy.datasets:
        if not policy.ledger_of(dataset).exists():
            create_ledger(policy, dataset)
    return policy


@pytest.fixture
def policy(tmp_path):
    return site_policy(tmp_path)


def plan_of(folder, data="reviews.csv", more=""):
    return party_plan(parse_federation(FEDERATION.format(data=data) + more, "test.toml", folder=folder), "shop")


def test_a_data_set_keeps_one_ledger_whatever_runs_on_it(policy, tmp_path):
    first = open_account(plan_of(tmp_path), BASE, tmp_path / "run-1", policy)
    second = open_account(plan_of(tmp_path), BASE, tmp_path / "run-2", policy)
    assert (first.dataset, first.cap) == ("reviews", Cap(epsilon=2.0, delta=1e-5))
    first.ledger.reserve(dataset=first.dataset, binding="b", charge=charge_of(mechanism()), cap=first.cap)
    assert [entry["kind"] for entry in second.ledger.entries()] == ["bound", "reserve"]
    path = tmp_path / "state" / "ledgers" / "reviews.jsonl"
    assert path.is_file()
    assert path.parent.stat().st_mode & 0o077 == 0
    alone = open_account(plan_of(tmp_path), BASE, tmp_path, None)  # a simulation's, made by the run itself
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


def test_training_without_privacy_is_refused(policy, tmp_path):
    text = FEDERATION.replace("epsilon = 1.0", "private = false")
    plan = party_plan(parse_federation(text.format(data="reviews.csv"), "test.toml", folder=tmp_path), "shop")
    with pytest.raises(DpmergeError, match="private = false is not allowed"):
        open_account(plan, BASE, tmp_path, policy)


def test_no_policy_allows_noise_that_somebody_knows(tmp_path):
    lenient = site_policy(tmp_path, POLICY, ("state =", "noise = 'fast'\nstate ="))
    open_account(plan_of(tmp_path, more="privacy = { noise = 'fast' }"), BASE, tmp_path, lenient)
    seeded = plan_of(tmp_path, more="privacy = { noise = 'fast', noise_seed = 7 }")
    with pytest.raises(DpmergeError, match="DPM-507: noise_seed"):
        open_account(seeded, BASE, tmp_path, lenient)


USERS = ("delta = 1e-5", "delta = 1e-5\nunit = 'user'\nuser = 'author'\ntext = 'body'\npopulation = 3000")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("user = 'review_id'\ntext = 'body'\nprivacy = { unit = 'user' }", "user = 'review_id'"),
        ("user = 'Author'\ntext = 'body'\nprivacy = { unit = 'user' }", "user = 'Author'"),
        ("user = 'author'\nprivacy = { unit = 'user' }", "text = 'text'"),
        ("text = 'body'", "unit = 'record'"),
        ("user = 'author'\ntext = 'body'\nprivacy = { unit = 'user', delta = 1e-4 }", "delta = 0.0001"),
        ("user = 'author'\ntext = 'body'\nprivacy = { unit = 'user', population = 300 }", "population = 300"),
    ],
)
def test_the_policy_fixes_whom_it_protects_and_how_far(tmp_path, more, problem):
    policy = site_policy(tmp_path, POLICY, USERS)

    def plan(more, text=FEDERATION):
        text = text.replace("population = 3000\n", "") if "population" in more else text
        return party_plan(parse_federation(text.format(data="reviews.csv") + more, "f", folder=tmp_path), "shop")

    open_account(plan("user = 'author'\ntext = 'body'\nprivacy = { unit = 'user' }"), BASE, tmp_path, policy)
    with pytest.raises(DpmergeError, match=f"DPM-507: {problem}"):
        open_account(plan(more), BASE, tmp_path, policy)


@pytest.fixture
def disguises(tmp_path):
    """Private records under every name that a federation file could give them, and files that are public."""
    (tmp_path / "reviews.csv").write_text("text,label\nI am John Smith,1\n")
    (tmp_path / "public.txt").write_text(PUBLIC)
    (tmp_path / "same.txt").write_text(PUBLIC)
    (tmp_path / "other.txt").write_text(PUBLIC + "one more\n")
    os.link(tmp_path / "reviews.csv", tmp_path / "hard.csv")
    (tmp_path / "soft.csv").symlink_to("reviews.csv")
    shutil.copy(tmp_path / "reviews.csv", tmp_path / "copy.csv")
    (tmp_path / "folder").mkdir()
    os.link(tmp_path / "reviews.csv", tmp_path / "folder" / "train.csv")
    os.mkfifo(tmp_path / "pipe.txt")
    return tmp_path


def with_public(folder, public):
    return plan_of(folder, "else.csv", f"training = {{ subspace = {{ k = 8, public = '{public}' }} }}")


@pytest.mark.parametrize("public", ["sms", "none", "public.txt", "same.txt", "./folder/../public.txt"])
def test_tasks_random_directions_and_listed_files_are_public(disguises, public):
    policy = site_policy(
        disguises, POLICY, ("questions]", "more]\ndata='else.csv'\nepsilon_cap=1\ndelta=1e-5\n[dataset.q]")
    )
    open_account(with_public(disguises, public), BASE, disguises, policy)


@pytest.mark.parametrize(
    "public",
    "reviews.csv ./folder/../reviews.csv REVIEWS.CSV soft.csv hard.csv copy.csv folder folder::train folder/train.csv "
    "other.txt public.txt::train pipe.txt /dev/zero /etc/passwd absent.txt trec6".split(),
)
def test_nothing_else_is_public_and_every_refusal_reads_the_same(disguises, public):
    policy = site_policy(
        disguises, POLICY, ("questions]", "more]\ndata='else.csv'\nepsilon_cap=1\ndelta=1e-5\n[dataset.q]")
    )
    with pytest.raises(DpmergeError, match=r"DPM-507: subspace\.public") as refusal:
        open_account(with_public(disguises, public), BASE, disguises, policy)
    if public != "trec6":  # else it would tell what is on this machine
        assert refusal.value.problem == "subspace.public is no file that the policy lists as public texts"


def test_a_listed_hash_does_not_make_a_data_set_public(disguises):
    sha256 = hashlib.sha256((disguises / "reviews.csv").read_bytes()).hexdigest()
    changes = [("questions]", "more]\ndata='else.csv'\nepsilon_cap=1\ndelta=1e-5\n[dataset.q]")]
    policy = site_policy(disguises, POLICY, *changes, ("public_texts = [", f"public_texts = ['{sha256}', "))
    open_account(with_public(disguises, "copy.csv"), BASE, disguises, policy)  # the owner says so
    for public in ("reviews.csv", "hard.csv", "soft.csv"):
        with pytest.raises(DpmergeError, match="DPM-507"):
            open_account(with_public(disguises, public), BASE, disguises, policy)


@pytest.mark.parametrize("name", ["reviews.csv", "./reviews.csv", "link.csv", "reviews.csv::train"])
def test_another_way_to_write_the_path_is_the_same_data(policy, tmp_path, name):
    (tmp_path / "reviews.csv").touch()
    (tmp_path / "link.csv").symlink_to(tmp_path / "reviews.csv")
    assert policy.dataset_of(plan_of(tmp_path, name).source).id == "reviews"


@pytest.mark.parametrize("name", ["reviews.csv::x::train", "x/reviews.csv", "reviews.csv/../others.csv", "Reviews.csv"])
def test_what_reads_something_else_is_charged_to_nothing(policy, tmp_path, name):
    (tmp_path / "reviews.csv").touch()
    with pytest.raises(DpmergeError):
        policy.dataset_of(plan_of(tmp_path, name).source)


def test_a_ledger_that_is_not_there_is_an_error_and_not_zero(tmp_path, monkeypatch):
    policy = site_policy(tmp_path)
    state = tmp_path / "state"
    state.rename(tmp_path / "unmounted")
    for variable in ("HOME", "XDG_STATE_HOME", "DPMERGE_STATE"):
        monkeypatch.setenv(variable, str(tmp_path / "fresh"))
    monkeypatch.chdir("/")
    for empty in (False, True):
        if empty:
            (state / "ledgers").mkdir(parents=True)
        with pytest.raises(DpmergeError, match=r"DPM-504: data set 'reviews' has no ledger .* ledger create POLICY"):
            open_account(plan_of(tmp_path), BASE, tmp_path / "run", policy)
    assert list(state.rglob("*.jsonl")) == []
    (tmp_path / "unmounted" / "ledgers" / "reviews.jsonl").rename(state / "ledgers" / "reviews.jsonl")
    open_account(plan_of(tmp_path), BASE, tmp_path / "run", policy)


@pytest.mark.parametrize("change", ["renamed", "renamed with its ledger", "moved", "empty", "swapped"])
def test_a_ledger_of_another_name_or_place_is_found_out(tmp_path, change):
    site_policy(tmp_path)
    ledgers = tmp_path / "state" / "ledgers"
    name, data = "reviews", "reviews.csv"
    changes = []
    if change.startswith("renamed"):
        name, changes = "opinions", [("dataset.reviews", "dataset.opinions")]
    if change == "renamed with its ledger":
        (ledgers / "reviews.jsonl").rename(ledgers / "opinions.jsonl")
    if change == "moved":
        data, changes = "new/reviews.csv", [("reviews.csv", "new/reviews.csv")]
    if change == "empty":
        (ledgers / "reviews.jsonl").write_bytes(b"")
    if change == "swapped":
        (ledgers / "questions.jsonl").rename(ledgers / "reviews.jsonl")
    text = POLICY
    for old, new in changes:
        text = text.replace(old, new, 1)
    (tmp_path / "policy.toml").write_text(text)
    policy = load_policy(tmp_path / "policy.toml")
    told = "has no ledger" if change == "renamed" else "is bound to"
    for opened in (
        lambda: open_account(plan_of(tmp_path, data), BASE, tmp_path, policy),
        lambda: account_of("shop", plan_of(tmp_path, data).source, tmp_path, policy),
    ):
        with pytest.raises(
            DpmergeError, match=f"DPM-504: .*{told}.*{name}" if told == "is bound to" else f"DPM-504: .*{name}.*{told}"
        ):
            opened()


def test_all_that_was_charged_goes_on_to_count_under_a_new_name(tmp_path):
    old = site_policy(tmp_path)
    account = open_account(plan_of(tmp_path), BASE, tmp_path, old)
    account.ledger.reserve(dataset="reviews", binding="b", charge=charge_of(mechanism(1.2)), cap=account.cap)
    ledgers = tmp_path / "state" / "ledgers"
    (ledgers / "reviews.jsonl").rename(ledgers / "opinions.jsonl")
    new = site_policy(tmp_path, POLICY, ("dataset.reviews", "dataset.opinions"))
    new.ledger_of(new.datasets[0]).bind(new.datasets[0].bound)
    account = open_account(plan_of(tmp_path), BASE, tmp_path, new)
    with pytest.raises(DpmergeError, match="DPM-506: data set 'opinions'"):
        account.ledger.reserve(dataset="opinions", binding="b", charge=charge_of(mechanism(1.2)), cap=account.cap)
    with pytest.raises(DpmergeError, match="DPM-504"):
        account.ledger.reserve(dataset="reviews", binding="b", charge=charge_of(mechanism(9.0)), cap=account.cap)


def test_a_simulations_ledger_that_is_gone_is_not_made_anew(tmp_path):
    account = open_account(plan_of(tmp_path), BASE, tmp_path, None)
    (tmp_path / "reservation").write_text("0" * 32)
    open_account(plan_of(tmp_path), BASE, tmp_path, None)
    account.ledger.path.unlink()
    with pytest.raises(DpmergeError, match=r"DPM-504: .* its ledger is gone"):
        open_account(plan_of(tmp_path), BASE, tmp_path, None)


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
    with pytest.raises(DpmergeError, match="DPM-506"):  # a ledger is of one data set, whatever it was called then
        check_cap(reserved(charge_of(first), dataset="others"), "reviews", charge_of(second), cap)


def test_the_cap_counts_at_its_own_delta_and_whatever_became_of_a_reservation(tmp_path):
    ledger, charge = Ledger(tmp_path / "ledger.jsonl").create(), charge_of(mechanism())
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
