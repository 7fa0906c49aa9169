"""The claimed ε against what cannot be wrong: the closed form without sampling, quadrature with it."""

import doctest
import importlib
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.accountants import pld_epsilon
from dpmerge.common.privacy.accounting import epsilon_pld
from dpmerge.common.privacy.loss import composition, loss_distribution
from dpmerge.common.privacy.loss.composition import Query, compose
from dpmerge.common.privacy.mechanism import Mechanism
from tests.common.privacy.quadrature import exact_delta

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(Path(__file__).parents[4] / "benchmarks")
    _closed_form = importlib.import_module("closed_form")
cases, exact_epsilon, shortfalls = _closed_form.cases, _closed_form.exact_epsilon, _closed_form.shortfalls


def test_docstring_examples():
    assert doctest.testmod(composition).failed == 0


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_claim_is_below_the_closed_form_and_hardly_above(full):
    found = shortfalls(cases(full=full))
    below = {case: value for case, value in found.items() if value is not None and value > 0}
    assert not below
    refused = [case for case, value in found.items() if value is None]
    assert not refused  # the bound is small against δ on the whole grid
    for (queries, delta), value in found.items():
        exact = exact_epsilon(math.fsum(count / sigma**2 for sigma, count in queries) ** -0.5, delta)
        assert -value < 1e-3 * max(exact, 0.1)


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 0.7), (0.3, 1.5)])
@pytest.mark.parametrize(("num_queries", "delta"), [(1, 1e-8), (2, 1e-5), (2, 1e-11)])
def test_with_sampling_the_claim_is_met_from_above(q, sigma, num_queries, delta):
    population = 10**6
    claimed = epsilon_pld(
        Mechanism(
            noise_multiplier=sigma,
            l2_clip_norm=1.0,
            population=population,
            expected_batch_size=round(q * population),
            num_steps=num_queries,
            target_delta=delta,
            noise="fast",
        )
    )

    def delta_at(epsilon):
        return max(exact_delta(sigma, q, num_queries, epsilon, add=add) for add in (True, False))

    assert delta_at(claimed) <= delta * (1 + 1e-7)
    assert delta_at(claimed - 1e-4 * max(1, claimed)) > delta


def test_the_charged_error_covers_what_the_transform_did():
    """Against products of a distribution with two cells, whose sums are binomial and known exactly."""
    from scipy.stats import binom

    share, count = 0.3, 4000
    query = Query(0, np.array([1 - share, share]), 0.0, count)
    tilted = composition._Tilted([query], 1e-2, 1e-9)
    composed = tilted.composed()
    heavier = share * math.exp(tilted._tilt * 1e-2)
    heavier /= heavier + 1 - share
    exact = binom.pmf(np.rint(composed.losses / 1e-2), count, heavier)
    again = composed.masses * np.exp(composed.tilt * composed.losses - composed.log_mass)
    error = float(np.sum(np.abs(again - exact)))
    assert 0 < error < composed.error < 1e-9


@pytest.mark.parametrize(("sigma", "coarseness", "epsilon"), [(0.8, 10, 0.6208), (0.7, 1, 1.2937)])
def test_the_window_of_rarely_sampled_queries_stays_small(sigma, coarseness, epsilon):
    """The tilt between two valleys once gave the direction "added" a window of 5·10⁷ cells, and a refusal."""
    found = pld_epsilon(((sigma, 512e-6, 10_000),), 1e-7, 1e-7, True, coarseness)
    assert found == pytest.approx(epsilon, abs=0.004)  # σ = 0.8: with cells a tenth as wide


def test_an_error_that_is_not_small_against_delta_is_refused(monkeypatch):
    parts = ((50.0, 1.0, 100),)
    loss = compose(parts, interval=1e-3, delta=1e-9)
    assert loss.epsilon(1e-9) > 0
    monkeypatch.setattr(loss_distribution, "_LARGEST_SHARE", 1e-15)
    with pytest.raises(DpmergeError, match=r"DPM-501.*rounding may be worth .* of delta"):
        loss.epsilon(1e-9)


_HOSTILE = """
import itertools, re, time
from dpmerge.common.privacy.accounting import epsilon_pld
from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.mechanism import Mechanism

slowest = 0.0
for sigma, (population, batch), steps, delta in itertools.product(SIGMAS, SAMPLES, STEPS, (1e-12, 0.999)):
    began = time.process_time()
    try:
        epsilon_pld(
            Mechanism(
                noise_multiplier=sigma, l2_clip_norm=1.0, noise="fast", population=population,
                expected_batch_size=batch, num_steps=steps, target_delta=delta,
            )
        )
    except DpmergeError as error:
        assert error.code == "DPM-501", error
    slowest = max(slowest, time.process_time() - began)
# not getrusage: its maximum begins with that of the process that was forked
print(slowest, int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2**20)
"""


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hostile_numbers_end_soon_and_in_little_memory(full):
    sigmas = "(1e-9, 1e-3, 0.2, 1.0, 30.0, 1e9)" if full else "(1e-9, 1.0, 1e9)"
    samples = "((1, 1), (10**12, 1), (10**6, 1), (100, 50))" if full else "((10**12, 1), (100, 50))"
    steps = "(1, 1000, 10**7, 10**12)" if full else "(10**12,)"
    head = f"SIGMAS, SAMPLES, STEPS = {sigmas}, {samples}, {steps}"
    done = subprocess.run([sys.executable, "-c", head + _HOSTILE], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    seconds, gib = map(float, done.stdout.split())
    assert seconds < 10
    assert gib < 1
