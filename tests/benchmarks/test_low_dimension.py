"""The benchmark of few directions: whose cells it shares, and what its figures mean."""

import importlib
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module("low_dimension")


def test_the_full_arm_finds_the_cells_of_other_benchmarks(bench):
    plan_of = importlib.import_module("trained_adapters").plan_of
    assert bench.plan_of_arm("movie", "full", 1.0, 2).fingerprint() == plan_of("movie", 1.0, 2).fingerprint()


def test_every_arm_is_a_plan_of_its_own(bench):
    plans = {arm: bench.plan_of_arm("movie", arm, 1.0, 0) for arm in bench.ALL_ARMS}
    assert len({plan.fingerprint() for plan in plans.values()}) == len(plans)
    assert {plan.privacy.noise_seed for plan in plans.values()} == {plans["full"].privacy.noise_seed}
    assert plans["public mail"].training.subspace.public == "mail"
    assert (plans["k = 1024"].training.subspace.k, plans["k = 1024"].training.subspace.num_public) == (1024, 2048)
    assert plans["allocation history"].training.subspace.refresh_every_steps == 10
    assert plans["rank 2"].lora.alpha / 2 == plans["full"].lora.alpha / 8


def scores_of(right: dict[str, float]):
    """Own and merged answers on 100 records, the first so many of which are right."""
    kinds = ("base", "own", "average", "geometry")
    return {kind: {"movie": np.arange(100) < right.get(kind, 50)} for kind in kinds}


def test_gains_are_over_full_lora_on_shared_seeds_and_ablations_are_over_ours(bench):
    scores = {
        ("full", 1.0, 0): scores_of({"own": 60, "average": 50}),
        ("full", 1.0, 1): scores_of({"own": 70, "average": 50}),
        ("public sms", 1.0, 0): scores_of({"own": 64, "average": 58}),
        ("public sms", 1.0, 1): scores_of({"own": 72, "average": 54}),
        ("k = 64", 1.0, 1): scores_of({"own": 70}),
    }
    table = bench.rows(scores)
    found = bench.figures(table)
    assert found["own_gain_epsilon_1"] == pytest.approx(3.0)
    assert found["merged_average_gain_epsilon_1"] == pytest.approx(6.0)
    assert found["own_gain_epsilon_1_ci_low"] < 3.0 < found["own_gain_epsilon_1_ci_high"]
    assert not any("epsilon_8" in key for key in found)
    ablation = next(row for row in table if row["arm"] == "k = 64")
    assert (ablation["reference"], ablation["own_gain"]) == ("public sms", pytest.approx(-2.0))
    assert "k = 64 | 1 | 70.0 | -2.0" in bench.markdown(table)
