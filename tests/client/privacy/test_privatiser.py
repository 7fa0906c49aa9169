import doctest
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from dpmerge.client.privacy import privatiser as module
from dpmerge.client.privacy.noise import FastNoise, SecureNoise
from dpmerge.client.privacy.privatiser import Privatiser
from dpmerge.common.privacy.mechanism import COMPANY_MARGIN, Mechanism

GRID = 2**20
any_float = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
rows = st.lists(st.lists(any_float, min_size=5, max_size=5), min_size=1, max_size=6).map(torch.tensor)


class Silence:
    """Noise of a given mode that is always zero, and counts how often it was asked."""

    def __init__(self, mode):
        self.mode, self.steps_per_sigma, self.asked = mode, GRID if mode == "secure" else 1, 0

    def sample(self, num_values):
        self.asked += 1
        return torch.zeros(num_values, dtype=torch.int64 if self.mode == "secure" else torch.float32)


def make(mode="secure", noise=None, *, sigma=1.0, clip=1.0, num_coordinates=5, batch_size=1, **changes):
    mechanism = Mechanism(
        noise_multiplier=sigma,
        l2_clip_norm=clip,
        population=1000,
        expected_batch_size=batch_size,
        num_steps=3,
        target_delta=1e-5,
        num_coordinates=num_coordinates,
        noise=mode,
        **{key: value for key, value in changes.items() if key != "query"},
    )
    query = {"query": changes["query"]} if "query" in changes else {}
    return Privatiser(mechanism, num_coordinates, noise or Silence(mode), **query)


def privatised(privatiser, grads):
    privatiser.accumulate(grads.clone())
    return privatiser.finish()


def test_docstring_examples():
    assert doctest.testmod(module).failed == 0


@given(rows, st.sampled_from([1.0, 1e-6, 3.7, 1e6]))
@settings(deadline=None)
def test_no_row_exceeds_the_clip_norm(grads, clip):
    for row in grads:
        out = privatised(make("fast", clip=clip), row[None])
        assert math.sqrt(math.fsum(float(v) ** 2 for v in out)) <= clip


@given(rows, st.sampled_from([1.0, 0.0625, 16.0]))
@settings(deadline=None)
def test_no_integer_row_exceeds_the_clip_norm_exactly(grads, sigma):
    for row in grads:
        out = privatised(
            make(sigma=sigma), row[None]
        )  # powers of two: the output is the integers, times a power of two
        squares = sum(Fraction(float(value)) ** 2 for value in out)
        assert squares <= 1


@given(rows, st.data())
@settings(deadline=None)
def test_the_split_into_physical_batches_changes_no_bit(grads, data):
    cut = data.draw(st.integers(0, len(grads)))
    whole, split = make(), make()
    split.accumulate(grads[:cut].clone())
    split.accumulate(grads[cut:].clone())
    assert torch.equal(privatised(whole, grads), split.finish())


@pytest.mark.parametrize("mode", ["fast", "secure"])
def test_clipped_sum_equals_the_oracle(mode):
    grads = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 64)[:, None]
    exact = grads.double()
    norms = exact.norm(dim=1, keepdim=True)
    oracle = (exact * ((1 - COMPANY_MARGIN) / norms).clamp(max=1)).sum(0) / 8
    out = privatised(make(mode, num_coordinates=1000, batch_size=8), grads)
    truncation = 64 / GRID / 8 if mode == "secure" else 0
    assert (out - oracle).abs().max() <= truncation + 1e-5 * oracle.abs().max()


def test_truncation_is_toward_zero():
    out = privatised(make(num_coordinates=2), torch.tensor([[1.9 / GRID, -1.9 / GRID]]))
    assert (out * GRID).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("mode", ["fast", "secure"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_counts_as_zero(mode, bad):
    good = torch.tensor([[0.1, 0.2, 0.3, 0.0, 0.0]])
    poisoned = torch.cat([torch.tensor([[bad, 0.2, 3.0, 0.0, 1.0]]), good])
    assert torch.equal(privatised(make(mode), poisoned), privatised(make(mode), good))


@pytest.mark.parametrize("mode", ["fast", "secure"])
def test_huge_finite_rows_are_clipped_not_lost(mode):
    out = privatised(make(mode), torch.full((1, 5), 1e20))
    torch.testing.assert_close(out, torch.full((5,), 5**-0.5 * (1 - COMPANY_MARGIN)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", ["fast", "secure"])
def test_noise_is_asked_for_once_per_step_however_many_batches(mode):
    silence = Silence(mode)
    privatiser = make(mode, silence)
    for num_batches in (0, 1, 3):
        for _ in range(num_batches):
            privatiser.accumulate(torch.ones(2, 5))
        privatiser.accumulate(torch.ones(0, 5))
        privatiser.finish()
    assert silence.asked == 3


@pytest.mark.parametrize(
    ("mode", "noise"), [("fast", FastNoise(seed=2)), ("secure", SecureNoise.from_state(bytes(32)))]
)
def test_noise_has_the_accounted_scale_on_empty_and_full_batches(mode, noise):
    sigma, clip, batch_size, size = 0.7, 3.0, 4, 500_000
    privatiser = make(mode, noise, sigma=sigma, clip=clip, batch_size=batch_size, num_coordinates=size)
    privatiser.finish()
    empty = privatiser.finish()
    for _ in range(4):
        privatiser.accumulate(torch.zeros(3, size))
    full = privatiser.finish()
    for values in (empty, full):
        scaled = values.double().numpy() * batch_size / clip / sigma
        assert stats.kstest(scaled, special.ndtr, method="asymp").pvalue > 1e-3
        assert stats.kstest(scaled / 0.98, special.ndtr, method="asymp").pvalue < 1e-3
        assert stats.kstest(scaled / 1.02, special.ndtr, method="asymp").pvalue < 1e-3
    assert abs(float((empty * full).mean() / empty.var())) < 4 / math.sqrt(size)


def test_each_step_starts_from_zero():
    privatiser = make()
    privatised(privatiser, torch.ones(2, 5))
    assert torch.equal(privatiser.finish(), torch.zeros(5))


def test_the_ascent_query_takes_its_own_noise():
    sam = {"sharpness": "sam", "ascent_noise_multiplier": 8.0}
    noise = FastNoise(seed=0)
    descent = make("fast", noise, num_coordinates=4000, **sam).finish()
    ascent = make("fast", noise, num_coordinates=4000, query="ascent", **sam).finish()
    assert float(ascent.std() / descent.std()) == pytest.approx(8, rel=0.1)


def test_without_privacy_neither_noise_nor_clipping():
    open_training = {"sigma": 0.0, "clip": None, "private": False}
    grads = torch.tensor([[3.0, 4.0], [math.nan, 1.0]])
    privatiser = make("fast", FastNoise(), num_coordinates=2, batch_size=2, **open_training)
    assert privatised(privatiser, grads).tolist() == [1.5, 2.0]
    clipped = make("secure", num_coordinates=2, **{**open_training, "clip": 1.0})
    torch.testing.assert_close(
        privatised(clipped, grads), torch.tensor([0.6, 0.8]) * (1 - COMPANY_MARGIN), rtol=1e-5, atol=1e-6
    )


def test_what_was_not_accounted_is_refused():
    with pytest.raises(ValueError, match="mode 'secure'"):
        make("secure", FastNoise())
    with pytest.raises(ValueError, match="not None"):
        Privatiser(Mechanism(**_settings()), 5, None)
    with pytest.raises(ValueError, match="at most 4"):
        Privatiser(Mechanism(**{**_settings(), "noise": "secure", "num_coordinates": 4}), 5, SecureNoise())
    with pytest.raises(ValueError, match="'sam'"):
        make(query="ascent")


@pytest.mark.parametrize("grads", [torch.ones(5), torch.ones(2, 4), torch.ones(2, 5).double()])
def test_gradients_of_another_shape_are_refused(grads):
    with pytest.raises(ValueError, match="Expected fp32 grads"):
        make().accumulate(grads)


def _settings():
    return {
        "noise_multiplier": 1.0,
        "l2_clip_norm": 1.0,
        "population": 10,
        "expected_batch_size": 1,
        "num_steps": 1,
        "target_delta": 1e-5,
        "noise": "fast",
    }
