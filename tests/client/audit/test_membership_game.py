"""The audit: sound on closed forms, tight on the real parts, and sharp enough to see an uncharged query."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dpmerge.client.audit import membership_game as audit_module
from dpmerge.client.audit.membership_game import audit_mechanism
from dpmerge.common.privacy.accounting import epsilon_pld
from dpmerge.common.privacy.calibration import calibrate
from dpmerge.common.privacy.mechanism import Mechanism

from ..training.loop import defects


def calibrated(**changes) -> Mechanism:
    """Return a mechanism that few trials suffice to audit: at a large δ, violations are frequent."""
    settings = {
        "target_epsilon": 1.0,
        "target_delta": 0.05,
        "population": 256,
        "expected_batch_size": 64,
        "num_steps": 4,
        "l2_clip_norm": 0.3,
        "noise": "secure",
        "num_coordinates": 2000,
    }
    return calibrate(**(settings | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sharpness": "sam"},
        pytest.param({"sharpness": "sam", "ascent_sampling": "separate"}, marks=pytest.mark.slow),
        {"noise": "fast", "expected_batch_size": 256, "num_steps": 2},
        {"sharpness": "sat", "privacy_unit": "user"},
        pytest.param({"sharpness": "sat-momentum"}, marks=pytest.mark.slow),
    ],
    ids=["none", "sam", "sam-separate", "full-batch", "sat-users", "sat-momentum"],
)
def test_claim_holds_and_more_than_half_of_it_is_witnessed(changes):
    result = audit_mechanism(calibrated(**changes), num_trials=24_000)
    assert result.holds
    assert result.epsilon_lower > 0.5 * result.epsilon_claimed
    assert (result.num_trials, result.target_delta, result.confidence) == (24_000, 0.05, 0.999)


def test_ascent_query_that_is_not_charged_is_seen():
    charged = calibrated()
    sigma = charged.noise_multiplier
    both = replace(charged, sharpness="sam", ascent_noise_multiplier=sigma / 2)
    result = audit_mechanism(both, num_trials=12_000)
    assert result.holds
    assert result.epsilon_lower > epsilon_pld(charged)


@pytest.mark.parametrize(
    ("defect", "changes"),
    [
        ("noise x0.5", {}),
        ("clipping off", {}),
        ("no noise at all", {"sharpness": "sat"}),
        ("norm over some layers only", {}),
        ("raw gradient in the step", {}),
        ("half the ascent's noise", {"sharpness": "sam"}),
        ("ascent from the raw gradient", {"sharpness": "sam"}),
    ],
)
def test_defect_in_the_loop_refutes_the_claim(defect, changes):
    with defects.planted(defect):
        result = audit_mechanism(calibrated(**changes), num_trials=24_000)
    assert not result.holds, result


def test_bound_covers_the_truth_as_often_as_it_says():
    """Randomised response: ε = log(p/(1 − p)) is known, both events attain it, and the bound is 90 % confident."""
    rng, p, delta, level, num_repeats = np.random.default_rng(1), 0.7, 0.0, 0.05, 600
    too_high = 0
    for repeat in range(num_repeats):
        present, absent = rng.random(1000) < p, rng.random(1000) < 1 - p
        trials = audit_module._Trials(np.sort(present.astype(float)), np.sort(absent.astype(float)))
        test = audit_module._Test(np.array([0.5]), inverted=bool(repeat % 2))
        too_high += audit_module._lower_bounds(trials, test, delta, level)[0] > math.log(p / (1 - p))
    assert 0 < too_high < 0.1 * num_repeats


def test_bound_of_a_perfect_guess_is_its_closed_form():
    trials, n, level = audit_module._Trials(np.ones(50), np.zeros(50)), 50, 5e-4
    for inverted in (False, True):
        bound = audit_module._lower_bounds(trials, audit_module._Test(np.array([0.5]), inverted), 0.01, level)[0]
        assert bound == pytest.approx(math.log((level ** (1 / n) - 0.01) / (1 - level ** (1 / n))))
    nothing = audit_module._Test(np.array([0.0, 1.0]), inverted=False)  # everybody is present; nobody is
    assert audit_module._lower_bounds(audit_module._Trials(np.ones(50), np.ones(50)), nothing, 0.01, level).max() == 0


def test_statistic_is_the_log_likelihood_ratio_of_a_sampled_gaussian():
    answers, sigma, q = torch.linspace(-3, 4, 8, dtype=torch.float64), 0.7, 0.2
    normal = torch.distributions.Normal
    without, with_it = (normal(mean, sigma).log_prob(answers).exp() for mean in (0.0, 1.0))
    evidence = (2 * answers - 1) / (2 * sigma**2)
    ratio = audit_module._sampled_ratio(evidence, q)
    torch.testing.assert_close(ratio, (((1 - q) * without + q * with_it) / without).log())
    torch.testing.assert_close(audit_module._sampled_ratio(evidence, 1.0), evidence)


def test_time_limit_leaves_one_pair_of_runs():
    mechanism = replace(calibrated(), num_coordinates=500)
    assert audit_mechanism(mechanism, num_trials=10**9, max_seconds=0).num_trials == 1000


def test_what_cannot_be_audited_is_refused():
    mechanism = calibrated()
    open_ = Mechanism(
        noise_multiplier=0.0,
        l2_clip_norm=None,
        population=4,
        expected_batch_size=2,
        num_steps=1,
        target_delta=0.01,
        num_coordinates=8,
        private=False,
    )
    for suspect, options in (
        (open_, {}),
        (replace(mechanism, noise="fast", num_coordinates=0), {}),
        (replace(mechanism, num_clip_queries=1), {}),
        (mechanism, {"num_trials": 0}),
        (mechanism, {"confidence": 1.0}),
    ):
        with pytest.raises(ValueError, match="Expected"):
            audit_mechanism(suspect, **options)
