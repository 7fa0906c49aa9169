import doctest
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy import accounting, calibration
from dpmerge.common.privacy.accounting import (
    cross_check,
    epsilon_pld,
    epsilon_prv,
    epsilon_rdp,
    epsilon_together,
)
from dpmerge.common.privacy.calibration import calibrate
from dpmerge.common.privacy.mechanism import Mechanism

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "accounting.json").read_text())
DEMO = {
    "target_delta": 1e-5,
    "population": 2800,
    "expected_batch_size": 128,
    "num_steps": 40,
    "l2_clip_norm": 1.0,
}


def make(sigma=1.0, q=0.05, steps=40, delta=1e-5, **changes):
    population = 10**9
    values = {
        "noise_multiplier": sigma,
        "l2_clip_norm": 1.0,
        "population": population,
        "expected_batch_size": round(q * population),
        "num_steps": steps,
        "target_delta": delta,
        "noise": "fast",
    }
    return Mechanism(**{**values, **changes})


def test_docstring_examples():
    assert [doctest.testmod(module).failed for module in (accounting, calibration)] == [0, 0]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow) if row[0] < 1 or row[1] < 0.002 else row for row in GOLDEN["rows"]],
)
def test_golden_values_inside_the_bracket_of_all_accountants(row):
    sigma, q, steps, delta, rdp, pld = row
    result = cross_check(make(sigma, q, steps, delta))
    assert result.epsilon == pytest.approx(pld, abs=1e-3)
    assert result.epsilon_optimistic <= result.epsilon <= result.epsilon_prv <= result.epsilon + 0.03 * max(1, pld)
    assert rdp - 1e-4 <= result.epsilon_rdp <= 1.01 * rdp  # integer orders only: never tighter, hardly looser
    assert result.sampler_delta == 0
    assert result.accountant.startswith("dp-accounting 0.6.0")


@pytest.mark.slow
def test_opacus_golden_values():
    rdp, _, prv_sigma = GOLDEN["external"]
    opacus = make(rdp["noise_multiplier"], rdp["sampling_prob"], rdp["num_steps"], rdp["delta"])
    assert epsilon_rdp(opacus) == pytest.approx(rdp["epsilon"], rel=0.01)
    ours = calibrate(**{**DEMO, "population": 2500, "expected_batch_size": 100, "num_steps": 2000}, target_epsilon=8.0)
    assert ours.noise_multiplier == pytest.approx(prv_sigma["sigma"], abs=0.005)


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-11])
@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (5.0, 40), (300.0, 1)])
def test_without_sampling_the_closed_form_is_met_from_above(sigma, steps, delta):
    exact = get_epsilon_gaussian(sigma / math.sqrt(steps), delta)
    found = epsilon_pld(make(sigma, 1.0, steps, delta))
    assert exact - 1e-9 <= found <= exact + 1e-3


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.slow) if row[0] > 1 else row for row in GOLDEN["calibration"]["rows"]]
)
def test_golden_calibration(row):
    target, sigma, _ = row
    settings = {**DEMO, "population": 1000, "expected_batch_size": 64, "num_steps": 156}
    assert calibrate(**settings, target_epsilon=target).noise_multiplier == pytest.approx(sigma, abs=1e-3)


SLOW = pytest.mark.slow
FORMS = (
    {},
    {"noise": "secure", "num_coordinates": 49152},
    {"sharpness": "sam", "ascent_share": 0.2},
    {"sharpness": "sam", "ascent_share": 0.2, "ascent_sampling": "separate"},
)


@pytest.mark.parametrize(
    ("target", "form"),
    [
        pytest.param(target, form, marks=() if target == 0.01 or (target == 0.5 and "noise" in form) else SLOW)
        for target in (0.01, 0.5, 1.0, 3.0, 8.0)
        for form in FORMS
    ],
)
def test_calibration_never_overshoots_and_wastes_nothing(target, form):
    mechanism = calibrate(**DEMO, **form, target_epsilon=target)
    assert epsilon_pld(mechanism) <= target
    ascent = mechanism.ascent_noise_multiplier
    shrink = 1 - 1e-4
    less = replace(
        mechanism,
        noise_multiplier=mechanism.noise_multiplier * shrink,
        ascent_noise_multiplier=None if ascent is None else ascent * shrink,
    )
    assert epsilon_pld(less) > target


def test_the_same_setting_is_computed_once():
    first = calibrate(**DEMO, target_epsilon=0.6)
    assert calibrate(**DEMO, target_epsilon=0.6) is first


def test_paired_sam_costs_one_query_and_shares_the_precision():
    plain, sam = calibrate(**DEMO, target_epsilon=0.5), calibrate(**DEMO, target_epsilon=0.5, sharpness="sam")
    assert sam.noise_multiplier == sam.ascent_noise_multiplier
    assert sam.noise_multiplier == pytest.approx(math.sqrt(2) * plain.noise_multiplier, rel=1e-9)


def test_separate_sam_composes_both_queries():
    sam = {"sharpness": "sam", "ascent_sampling": "separate"}
    mixed = make(2.0, ascent_noise_multiplier=3.0, **sam)
    assert epsilon_pld(make(3.0, steps=80)) < cross_check(mixed).epsilon < epsilon_pld(make(2.0, steps=80))
    assert epsilon_pld(mixed) > 1.1 * epsilon_pld(make(2.0))
    nearly_equal = epsilon_pld(make(2.0, ascent_noise_multiplier=2.0 + 1e-9, **sam))
    assert nearly_equal == pytest.approx(epsilon_pld(make(2.0, steps=80)), abs=1e-5)


def test_the_secure_samplers_error_is_charged_to_delta():
    values = 10**9  # far more than any adapter has, so that the charge shows
    ideal = make(2.0, num_coordinates=values)
    charged = cross_check(replace(ideal, noise="secure"))
    eta = 40 * values * 2.0**-68
    assert charged.sampler_delta == pytest.approx((1 + math.exp(charged.epsilon)) * eta, rel=1e-6)
    assert charged.epsilon > epsilon_pld(ideal)
    assert charged.epsilon == pytest.approx(epsilon_pld(replace(ideal, target_delta=1e-5 - charged.sampler_delta)))
    sam = replace(ideal, noise="secure", sharpness="sam", noise_multiplier=2.0, ascent_noise_multiplier=2.0)
    twice = cross_check(sam)
    assert twice.sampler_delta == pytest.approx((1 + math.exp(twice.epsilon)) * 2 * eta, rel=1e-6)
    with pytest.raises(DpmergeError, match="secure sampler"):
        epsilon_pld(replace(ideal, noise="secure", num_coordinates=10**12, target_delta=1e-7))


@pytest.mark.parametrize(
    ("mechanism", "reason"),
    [
        (make(delta=1e-13), "too small to account"),
        (make(sigma=1e-9, q=1.0, steps=10**6), "far above 100"),
        (make(sigma=0.2, q=0.5, steps=1000), "far above 100"),
        (make(sigma=0.2), "is above 100"),
    ],
)
def test_extremes_are_refused_with_a_reason(mechanism, reason):
    with pytest.raises(DpmergeError, match=f"DPM-501.*{reason}"):
        epsilon_pld(mechanism)


def test_extremes_that_are_right():
    assert epsilon_pld(make(sigma=1e6, q=1e-6, steps=1, delta=1e-2)) == 0  # δ alone covers it
    assert 4.6e-4 < epsilon_pld(make(sigma=1000.0)) < 5.2e-4  # cells of 1e-4 would say 7e-4
    assert epsilon_pld(make(sigma=100.0)) < 0.01


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"target_epsilon": 0.0}, "DPM-103"),
        ({"target_epsilon": math.nan}, "DPM-103"),
        ({"target_epsilon": math.inf}, "DPM-103"),
        ({"target_epsilon": 1.0, "ascent_share": 1.0, "sharpness": "sam"}, "DPM-103"),
        ({"target_epsilon": 1.0, "target_delta": 0.0}, "DPM-103"),
        ({"target_epsilon": 1.0, "target_delta": 1e-14}, "DPM-501"),
        ({"target_epsilon": 1.0, "target_delta": 0.5, "num_steps": 1}, "met without any noise"),
        ({"target_epsilon": 60.0, "noise": "secure", "num_coordinates": 49152}, "secure sampler"),
    ],
)
def test_targets_that_cannot_be_met_are_refused(changes, code):
    with pytest.raises(DpmergeError, match=code):
        calibrate(**{**DEMO, **changes})


@pytest.mark.parametrize(("witness", "shift"), [("epsilon_prv", -0.05), ("epsilon_prv", 0.05), ("epsilon_rdp", -1.0)])
def test_a_witness_that_disagrees_stops_the_claim(monkeypatch, witness, shift):
    mechanism = make(sigma=2.0, q=0.05 + abs(shift) / 1e3)  # not cached by another test
    truth = {"epsilon_prv": epsilon_prv, "epsilon_rdp": epsilon_rdp}[witness]
    monkeypatch.setattr(accounting, witness, lambda m: truth(m) + shift)
    with pytest.raises(DpmergeError, match="DPM-501"):
        cross_check(mechanism)


def test_no_privacy_has_no_epsilon():
    result = cross_check(make(0.0, private=False))
    assert result.epsilon == result.epsilon_prv == result.epsilon_rdp == math.inf


def test_trainings_together_are_composed_as_dp_accounting_composes_their_events():
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    rows = [row for row in GOLDEN["rows"] if row[1] < 1 and row[2] <= 500]
    oracle = PLDAccountant()
    for sigma, q, steps, *_ in rows:
        oracle.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)
    together = epsilon_together([make(sigma, q, steps, delta) for sigma, q, steps, delta, *_ in rows], 1e-5)
    assert together == pytest.approx(oracle.get_epsilon(1e-5), abs=2e-3)
    assert max(row[5] for row in rows) < together < sum(row[5] for row in rows)


def test_trainings_together_pay_for_every_sampler_and_keep_units_apart():
    free = make(num_coordinates=10**6)
    secure = replace(free, noise="secure")
    assert epsilon_together([], 1e-5) == 0.0
    assert epsilon_together([free, secure], 1e-5) == epsilon_together([secure, free], 1e-5)
    assert epsilon_together([free] * 2, 1e-9) < epsilon_together([free, secure], 1e-9)
    assert epsilon_together([free, secure], 1e-9) < epsilon_together([secure] * 2, 1e-9)
    assert math.isinf(epsilon_together([free, replace(free, noise_multiplier=0.0, private=False)], 1e-5))
    with pytest.raises(ValueError, match="one privacy_unit"):
        epsilon_together([free, replace(free, privacy_unit="user")], 1e-5)
