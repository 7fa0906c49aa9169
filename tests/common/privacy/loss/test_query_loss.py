"""The vectorised loss of one query is dp-accounting's, cell by cell."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from dpmerge.common.privacy.loss.query_loss import discretised

QUERIES = [(1.66, 128 / 2400), (0.5, 1e-3), (0.4, 0.9), (8.0, 0.5), (30.0, 0.01), (2.0, 1.0)]


@pytest.mark.parametrize("pessimistic", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("removed", [True, False], ids=["remove", "add"])
@pytest.mark.parametrize(
    ("sigma", "q"), [(1.66, 128 / 2400), (0.5, 1e-3), (0.4, 0.9), (8.0, 0.5), (30.0, 0.01), (2, 1)]
)
def test_masses_are_those_of_dp_accounting(sigma, q, removed, pessimistic):
    interval = 1e-3
    reference = pld.from_gaussian_mechanism(
        sigma,
        sampling_prob=q,
        pessimistic_estimate=pessimistic,
        value_discretization_interval=interval,
        use_connect_dots=pessimistic,
    )
    dense = (reference._pmf_remove if removed else reference._pmf_add).to_dense_pmf()
    lower, masses, infinite = discretised(sigma, q, interval=interval, pessimistic=pessimistic, removed=removed)
    assert infinite == pytest.approx(dense._infinity_mass, abs=1e-18)
    start = min(lower, dense._lower_loss)
    ours, theirs = (np.zeros(max(lower + len(masses), dense._lower_loss + len(dense._probs)) - start) for _ in "ab")
    ours[lower - start :][: len(masses)] = masses
    theirs[dense._lower_loss - start :][: len(dense._probs)] = dense._probs
    assert np.abs(ours - theirs).max() < 1e-11  # where dp-accounting subtracts what is nearly equal
    assert ours.sum() + infinite == pytest.approx(1.0, abs=1e-9)
    assert masses.min() >= 0
