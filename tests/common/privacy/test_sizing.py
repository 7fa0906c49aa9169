"""The sizing rule: what it predicts is what noisy steps keep, and it answers to noise, scale and bad input."""

import numpy as np
import pytest

from dpmerge.common.privacy.sizing import candidates, learning_rate, predict, size

NUMBERS = {"expected_batch_size": 128, "num_steps": 40}


@pytest.fixture(scope="module")
def gradients():
    """Gradients whose energy falls with the direction, as those of texts do."""
    rng = np.random.default_rng(0)
    scales = 3.0 / np.arange(1, 65)
    return rng.standard_normal((400, 64)) * scales


@pytest.mark.parametrize("k", [4, 16, 64])
def test_noisy_steps_keep_what_is_predicted(gradients, k):
    """The oracle: T noisy gradients of the assumed signal are added up, and compared with the noise-free sum."""
    sigma, coherence, clip, steps, batch = 1.5, 0.01, 0.7, 40, 128
    point = predict(gradients, k, sigma, batch, steps, coherence, l2_clip_norm=clip)
    lengths = [min(1.0, clip / np.linalg.norm(row[:k])) for row in gradients]
    clipped = np.array([row * length for row, length in zip(gradients, lengths, strict=True)])
    signal = np.sqrt(coherence * np.mean(clipped**2, axis=0))
    rng = np.random.default_rng(1)
    noise = sigma * clip / batch * rng.standard_normal((2000, steps, k))
    reached = np.zeros((2000, 64))
    reached[:, :k] = (signal[:k] + noise).sum(1)
    missed = np.square(reached - steps * signal).sum(1).mean()
    assert point.kept == pytest.approx(1 - missed / np.square(steps * signal).sum(), abs=2e-3)
    one_step = np.sqrt(np.square(signal[:k]).sum() / np.square(noise).sum(2).mean())
    assert point.signal_to_noise == pytest.approx(one_step, rel=1e-2)


def test_noise_makes_the_choice_smaller(gradients):
    choices = [
        size(gradients, sigma=sigma, candidates=(4, 8, 16, 32, 64), **NUMBERS).k for sigma in (0.0, 1.0, 4.0, 30.0)
    ]
    assert choices[0] == 64
    assert choices == sorted(choices, reverse=True)
    assert choices[-1] < 16


def test_directions_are_taken_until_noise_outweighs_signal(gradients):
    chosen = size(gradients, sigma=3.0, candidates=range(1, 65), **NUMBERS)
    lengths = np.minimum(1, chosen.chosen.l2_clip_norm / np.linalg.norm(gradients[:, : chosen.k], axis=1))
    signal = 0.01 * np.square(gradients * lengths[:, None]).mean(0)
    worth = signal >= chosen.chosen.noise_std**2 / 40
    assert 8 < chosen.k < 60
    assert abs(worth.sum() - chosen.k) <= 4  # C moves a little with k
    assert chosen.k == max(chosen.curve, key=lambda point: point.kept).k


def test_the_unit_of_gradients_does_not_matter(gradients):
    one, other = (size(scale * gradients, sigma=2.0, candidates=(8, 16, 32), **NUMBERS) for scale in (1.0, 100.0))
    assert other.k == one.k
    for a, b in zip(one.curve, other.curve, strict=True):
        assert b.l2_clip_norm == pytest.approx(100 * a.l2_clip_norm, rel=1e-3)
        assert (b.kept, b.signal_to_noise) == pytest.approx((a.kept, a.signal_to_noise), rel=1e-3)


def test_gradients_that_vanish_hold_no_signal():
    point = predict(np.zeros((10, 4)), 2, 1.0, 128, 40)
    assert point.kept == 0
    assert size(np.zeros((10, 4)), sigma=1.0, candidates=(1, 2), **NUMBERS).k == 1


@pytest.mark.parametrize("choices", [(), (8, 65), (0, 8)])
def test_impossible_choices_are_refused(gradients, choices):
    with pytest.raises(ValueError, match="Expected candidates="):
        size(gradients, sigma=1.0, candidates=choices, **NUMBERS)


def test_nine_gradients_in_ten_are_clipped(gradients):
    chosen = size(gradients, sigma=1.0, candidates=(8, 16), **NUMBERS).chosen
    norms = np.linalg.norm(gradients[:, : chosen.k], axis=1)
    assert (norms > chosen.l2_clip_norm).mean() == pytest.approx(0.9, abs=0.01)


def test_a_direction_needs_two_texts():
    assert max(candidates(1000)) == 384
    assert candidates(15) == ()


def test_the_learning_rate_lets_noise_walk_equally_far():
    rng = np.random.default_rng(0)
    for optimizer, steps in (("sgd", 40), ("sgd", 160)):
        rate = learning_rate(optimizer, num_steps=steps, noise_std=0.01)
        walked = (rate * 0.01 * rng.standard_normal((4000, steps))).sum(1).std()
        assert walked == pytest.approx(0.38, rel=0.1)
    assert learning_rate("adam", num_steps=160, noise_std=0.01) == 0.03
    assert learning_rate("momentum", num_steps=40, noise_std=0.1) == 0.1 * learning_rate(
        "sgd", num_steps=40, noise_std=0.1
    )
    assert learning_rate("dp-adam", num_steps=40, noise_std=0.01) is None
    assert learning_rate("sgd", num_steps=40, noise_std=0.0) is None
