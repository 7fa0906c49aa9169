"""The estimate of how much of an adapter is noise, in the full space and in a subspace."""

from dataclasses import replace

import pytest
import torch

from dpmerge.common.config.federation import SubspaceSettings, TrainingSettings
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.server.merging.adapters.deltas import LowRankDelta
from dpmerge.server.merging.noise.from_statement import noise_share

WIDTH, RANK = 48, 4
MECHANISM = Mechanism(
    noise_multiplier=1.0,
    l2_clip_norm=0.3,
    population=2800,
    expected_batch_size=128,
    num_steps=40,
    target_delta=1e-5,
    num_coordinates=2 * WIDTH * RANK,
    noise="fast",
)


def modules():
    torch.manual_seed(0)
    a = torch.linalg.qr(torch.randn(WIDTH, RANK)).Q.T  # A Aᵀ = 1, as the estimate takes it to be up to a factor
    return {name: LowRankDelta(a.contiguous(), torch.randn(WIDTH, RANK), 2.0) for name in "ab"}


def share(k=None, **settings):
    subspace = None if k is None else SubspaceSettings(k=k, public="none", **settings.pop("subspace", {}))
    mechanism = MECHANISM if k is None else replace(MECHANISM, num_coordinates=k)
    return noise_share(mechanism, TrainingSettings(subspace=subspace, **settings), modules())


@pytest.mark.parametrize("alignment_on", ["delta", "factors"])
@pytest.mark.parametrize("alignment", [0.0, 0.01])
def test_all_directions_are_the_full_space(alignment, alignment_on):
    settings = {"alignment": alignment, "alignment_on": alignment_on, "learning_rate": 0.02}
    assert share(k=2 * WIDTH * RANK, **settings) == pytest.approx(share(**settings), rel=0.05)


def test_few_directions_hold_little_noise():
    """An optimizer that is blind to scale walks as far in each direction, however many there are."""
    assert share(k=96) == pytest.approx(share() * 96 / (2 * WIDTH * RANK), rel=0.3)
    assert 0 < share(k=96, subspace={"refresh_every_steps": 10}) < 2 * share(k=96)
    assert noise_share(MECHANISM, TrainingSettings(), {"a": LowRankDelta(torch.ones(1, 2), torch.zeros(3, 1))}) is None
