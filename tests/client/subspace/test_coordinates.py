"""Training in k directions: what is clipped, where noise goes, how θ moves, and what a checkpoint brings back."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.subspace.basis import Basis, random_basis
from dpmerge.client.subspace.coordinates import Subspace, noise_scales
from dpmerge.common.config.federation import SubspaceSettings
from dpmerge.common.errors import DpmergeError

K = 3
SETTINGS = SubspaceSettings(k=K, public="none")


@pytest.fixture
def gradients():
    torch.manual_seed(0)
    with PerExampleGradients(nn.Linear(5, 2), max_examples=4) as opened:
        yield opened


def rows_of(gradients, n=4):
    x, y = torch.randn(n, 5, generator=torch.Generator().manual_seed(1)), torch.arange(n) % 2
    return gradients.compute(lambda: cross_entropy(gradients._module(x), y, reduction="none"))


def with_energies(number=0) -> Basis:
    basis = random_basis(12, K, str(number))
    return replace(basis, coordinates=torch.diag(torch.tensor([9.0, 4.0, 1.0], dtype=torch.float64)))


def test_rows_are_projected_and_scaled_however_they_are_split(gradients):
    space = Subspace(gradients, replace(SETTINGS, public="sms", allocation="public"), with_energies)
    assert len(set(space.scales.tolist())) == K
    rows = rows_of(gradients)
    expected = rows @ space.basis.rows.T / space.scales
    whole = list(space.rows(iter([rows[:3], rows[3:]])))
    assert [len(part) for part in whole] == [4]  # projected at once, as many as the capacity
    torch.testing.assert_close(whole[0], expected)
    split = list(space.rows(iter([rows[:3], rows[1:]])))
    assert [len(part) for part in split] == [4, 2]
    torch.testing.assert_close(torch.cat(split), expected[[0, 1, 2, 1, 2, 3]])
    assert not list(space.rows(iter([])))


def test_a_spoiled_row_spoils_no_other(gradients):
    space = Subspace(gradients, SETTINGS, with_energies)
    rows = rows_of(gradients)
    expected = torch.cat(list(space.rows(iter([rows]))))
    rows[1, 2], rows[3, 0] = float("inf"), float("nan")
    projected = torch.cat(list(space.rows(iter([rows]))))
    assert torch.equal(projected[[0, 2]], expected[[0, 2]])
    assert not projected[[1, 3]].isfinite().all(1).any()


def test_steps_keep_their_length_and_the_answer_its_unit(gradients):
    space = Subspace(gradients, replace(SETTINGS, public="sms", allocation="public"), with_energies)
    start = gradients.theta.clone()
    step = torch.tensor([0.3, -0.4, 0.1])
    torch.testing.assert_close(space.lift(step).norm(), step.norm())
    torch.testing.assert_close(space.project(space.lift(step)), step)
    rows = rows_of(gradients)
    clipped = torch.cat(list(space.rows(iter([rows]))))
    torch.testing.assert_close(space.gradient(clipped.mean(0)), space.project(rows.mean(0)))
    space.vector.add_(step)
    space.place(step)
    torch.testing.assert_close(gradients.theta, start + space.lift(step))


def test_a_refresh_takes_other_directions_and_moves_nothing(gradients):
    space = Subspace(gradients, replace(SETTINGS, refresh_every_steps=2), with_energies)
    first, vector = space.basis, space.vector
    space.vector.add_(1.0)
    space.place(space.vector)
    theta = gradients.theta.clone()
    assert [space.refresh(step, 0.1) for step in (0, 1, 2)] == [False, False, True]
    assert not torch.equal(space.basis.rows, first.rows)
    assert torch.equal(gradients.theta, theta)
    assert not space.vector.any()
    with pytest.raises(DpmergeError, match=r"DPM-503: the optimizer does not step the subspace"):
        space.check_storage([vector])
    space.check_storage([space.vector])
    space.place(space.vector)
    assert torch.equal(gradients.theta, theta)


def test_noise_goes_where_public_gradients_are_large_and_its_total_stays():
    energies = torch.tensor([16.0, 1.0, 0.0])
    scales = noise_scales(3, energies)
    torch.testing.assert_close(scales.square().sum(), torch.tensor(3.0, dtype=torch.float64))
    assert scales[0] / scales[1] == pytest.approx(2.0)
    assert scales[2] == pytest.approx(0.01 * scales[0])

    def clipping(d):  # E‖D⁻¹g‖², on the directions that have any
        return (energies[:2] / d[:2].square()).sum()

    rival = torch.tensor([1.5, 0.86], dtype=torch.float64)
    rival *= (scales[:2].square().sum() / rival.square().sum()).sqrt()
    assert clipping(scales) < clipping(rival)
    assert clipping(scales) < clipping(torch.ones(2))
    for nothing in (None, torch.zeros(3), torch.tensor([-1.0, -2.0, 0.0])):
        assert torch.equal(noise_scales(3, nothing), torch.ones(3, dtype=torch.float64))


def test_history_finds_the_direction_that_moved_in_the_next_basis(gradients):
    """Privatised gradients along one old direction, which is one of the new ones, then carry its noise too."""
    turned = random_basis(12, K, "0")
    bases = [turned, Basis(turned.rows[[2, 0, 1]], turned.coordinates)]
    space = Subspace(gradients, replace(SETTINGS, allocation="history", refresh_every_steps=4), bases.__getitem__)
    for sign in (1, -1, 1, 1):
        space.place(torch.tensor([0.01, 0.02, sign * 5.0]))
    assert space.refresh(4, noise_std=0.1)
    assert space.scales.argmax() == 0
    assert 5 < space.scales[0] / space.scales[1] < 10  # a fourth root of energies, the small one no less than its error


def test_a_history_of_noise_alone_spreads_noise_almost_evenly(gradients):
    """Directions that only chance, or none of the old ones, tells of must not take the clip norm from the others."""
    k = 6
    old, new = random_basis(12, k, "0"), random_basis(12, k, "1")
    bases = [old, Basis(torch.cat([old.rows[:3], new.rows[3:]]), old.coordinates)]
    settings = SubspaceSettings(k=k, public="none", allocation="history", refresh_every_steps=10)
    space = Subspace(gradients, settings, bases.__getitem__)
    noise = 0.3 * torch.randn(10, k, generator=torch.Generator().manual_seed(3))
    for answer in noise:
        space.place(answer)
    assert space.refresh(10, noise_std=0.3)
    assert space.scales.max() < 2 * space.scales.min()


def test_the_free_clip_norm_is_a_quantile_of_public_gradients(gradients):
    space = Subspace(gradients, replace(SETTINGS, public="sms", clip="public"), with_energies)
    assert space.clip_norm(0.5) == 4.0
    assert space.clip_norm(1.0) == 9.0
    scaled = Subspace(gradients, replace(SETTINGS, public="sms", allocation="public"), with_energies)
    assert scaled.clip_norm(0.5) == pytest.approx(4.0 / float(scaled.scales[1]), rel=1e-3)


def test_a_checkpoint_brings_a_refreshed_subspace_back(gradients):
    settings = replace(SETTINGS, refresh_every_steps=2, allocation="history")
    space = Subspace(gradients, settings, with_energies)
    start = gradients.theta.clone()
    for step in range(3):
        space.refresh(step, 0.1)
        space.vector.add_(torch.tensor([0.1, 0.2, 0.3]))
        space.place(torch.tensor([1.0, 2.0, 3.0]))
    state, theta, scales = space.state(), gradients.theta.clone(), space.scales
    gradients.theta.copy_(start)
    resumed = Subspace(gradients, settings, with_energies)
    resumed.restore(3, theta, state)
    assert torch.equal(gradients.theta, theta)
    assert torch.equal(resumed.vector, space.vector)
    assert torch.equal(resumed.scales, scales)
    assert resumed.basis.sha256 == space.basis.sha256
    resumed.place(resumed.vector)
    assert torch.equal(gradients.theta, theta)

    gradients.theta.copy_(start)
    other = Subspace(gradients, settings, lambda number: with_energies(number + 10))
    with pytest.raises(DpmergeError, match=r"DPM-302: the checkpoint was trained in another subspace"):
        other.restore(3, theta, state)
