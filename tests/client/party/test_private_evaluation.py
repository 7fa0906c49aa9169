import math

import numpy as np
import pytest
from scipy.stats import kstest, norm

from dpmerge.client.budget.composition import Cap, charged_mechanism
from dpmerge.client.budget.ledger import Ledger
from dpmerge.client.budget.policy import Account
from dpmerge.client.party import private_evaluation
from dpmerge.client.party.private_evaluation import private_accuracy
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.accounting import epsilon_pld


@pytest.fixture
def account(tmp_path):
    return Account(Ledger(tmp_path / "ledger.jsonl").create(), "reviews", Cap(epsilon=1.2, delta=1e-5))


def ask(account, is_right, **changes):
    settings = {"model_sha256": "a" * 64, "population": 1000, "epsilon": 1.0, "delta": 1e-5}
    return private_accuracy(is_right, **{**settings, **changes}, account=account)


def test_it_is_charged_once_and_the_cap_bounds_how_often_it_is_asked(account):
    told = ask(account, [True] * 800 + [False] * 200)
    reserved, released = account.ledger.entries()
    assert (reserved["kind"], released["kind"]) == ("reserve", "released")
    mechanism = charged_mechanism(reserved["charge"])
    assert (mechanism.sampling_prob, mechanism.num_steps, mechanism.noise) == (1.0, 1, "secure")
    assert told.epsilon == epsilon_pld(mechanism) <= 1.0
    assert told.accuracy == pytest.approx(0.8, abs=6 * told.noise_standard_error)
    with pytest.raises(DpmergeError, match="DPM-506"):
        ask(account, [True])
    assert len(account.ledger.entries()) == 2


def test_nothing_is_drawn_before_it_is_charged(account, monkeypatch):
    monkeypatch.setattr(private_evaluation, "SecureNoise", lambda: pytest.fail("noise before the charge"))
    account = Account(account.ledger, account.dataset, Cap(epsilon=0.5, delta=1e-5))
    with pytest.raises(DpmergeError, match="DPM-506"):
        ask(account, [True])
    assert account.ledger.entries() == []


def test_few_records_under_the_noise_are_no_accuracy(account):
    told = ask(account, [])
    assert told.accuracy is told.noise_standard_error is None
    assert math.isfinite(told.num_right)


def test_both_counts_carry_the_stated_noise(tmp_path):
    account = Account(Ledger(tmp_path / "ledger.jsonl").create(), "reviews")
    told = [ask(account, [True] * 30 + [False] * 10) for _ in range(60)]
    scale = told[0].count_noise_std
    values = [(answer.num_right - 30) / scale for answer in told] + [(answer.num_wrong - 10) / scale for answer in told]
    assert scale == pytest.approx(4.2, abs=0.6)
    assert kstest(values, norm.cdf).pvalue > 1e-4
    assert 0.7 < float(np.std(values)) < 1.3
