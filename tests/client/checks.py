"""Generic checks of a mechanism's parts. None knows which defect it looks for: each states a property, and asserts it.

Parts are seeded, so that a statistical check always gives the same answer.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from scipy import stats

from dpmerge.client.audit import Parts, audit_mechanism
from dpmerge.client.noise import FastNoise, SecureNoise
from dpmerge.client.sampling import PoissonSampler
from dpmerge.common.accounting import calibrate
from dpmerge.common.mechanism import GRID_STEPS_PER_SIGMA, Mechanism

ALPHA = 1e-3
WIDE = 4096  # coordinates where noise is measured
MECHANISM = Mechanism(
    noise_multiplier=0.8,
    l2_clip_norm=0.5,
    population=64,
    expected_batch_size=16,
    num_steps=4,
    target_delta=1e-5,
    num_coordinates=WIDE,
)
FAST = replace(MECHANISM, noise="fast")


def seeded(**changes) -> Parts:
    """Return the real parts, or some of them exchanged, each with a key of its own derived from a counter."""
    keys = (hashlib.sha256(f"part {number}".encode()).digest() for number in count())

    def noise(mode):
        key = next(keys)
        return SecureNoise.from_state(key) if mode == "secure" else FastNoise(int.from_bytes(key[:6]))

    def sampler(q, num_units):
        return PoissonSampler.from_state(q, num_units, next(keys))

    return replace(Parts(noise=noise, sampler=sampler), **changes)


class Silence:
    """A noise source of the right mode that draws zeros: what comes out is the clipped sum."""

    def __init__(self, mode):
        self.mode = mode
        self.steps_per_sigma = GRID_STEPS_PER_SIGMA if mode == "secure" else 1

    def sample(self, num_values):
        return torch.zeros(num_values, dtype=torch.int64 if self.mode == "secure" else torch.float32)


def answers(parts, mechanism, physical_batches, *, num_steps=1, silent=False):
    """Return the privatised *sums* of `num_steps` steps over the same physical batches, [num_steps, P] float64."""
    num_coordinates = physical_batches[0].shape[1] if physical_batches else mechanism.num_coordinates
    noise = Silence(mechanism.noise) if silent else parts.noise(mechanism.noise)
    privatiser = parts.privatiser(mechanism, num_coordinates, noise, query="descent")
    sums = torch.empty(num_steps, num_coordinates, dtype=torch.float64)
    for step in range(num_steps):
        for batch in physical_batches:
            privatiser.accumulate(batch.clone())
        sums[step] = privatiser.finish().double() * mechanism.expected_batch_size
    return sums


def short_rows(num_rows, mechanism, num_coordinates=WIDE):
    rows = torch.randn(num_rows, num_coordinates, generator=torch.Generator().manual_seed(num_rows))
    return rows * (0.3 * mechanism.l2_clip_norm / rows.norm(dim=1, keepdim=True))


def ks_noise_scale(parts, mechanism=MECHANISM):
    """Noise is N(0, σ²C²) however the step was split: a million values tell σ from σ ± 2 % at α = 1e-3."""
    rows = short_rows(5, mechanism)
    residuals = answers(parts, mechanism, [rows[:3], rows[3:]], num_steps=250) - rows.double().sum(0)
    scale = mechanism.noise_multiplier * mechanism.l2_clip_norm
    assert stats.kstest(residuals.flatten() / scale, "norm", method="asymp").pvalue > ALPHA


def empty_step_is_noised(parts, mechanism=MECHANISM):
    """A step that sampled nobody looks like any other."""
    scale = mechanism.noise_multiplier * mechanism.l2_clip_norm
    sums = answers(parts, mechanism, [], num_steps=4)
    assert stats.kstest(sums.flatten() / scale, "norm", method="asymp").pvalue > ALPHA


def sensitivity_bound(parts, mechanism=MECHANISM):
    """One record more changes the sum by at most C, whatever its gradient's length and place."""
    bystanders, width = short_rows(4, mechanism, 64), 64
    without = answers(parts, mechanism, [bystanders], silent=True)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(60, width, generator=generator)
    rows[::2] *= torch.rand(30, width, generator=generator) < 0.05  # a few coordinates, in the same or different layers
    rows = torch.cat([rows * torch.logspace(-2, 2, 60)[:, None], 7 * torch.eye(width)])
    for row in rows:
        change = answers(parts, mechanism, [bystanders, row[None]], silent=True) - without
        assert change.norm() <= mechanism.l2_clip_norm * (1 + 1e-5)  # sums come back in fp32


def normaliser_is_public(parts, mechanism=MECHANISM):
    """The sum is divided by B, however many records were sampled."""
    row = short_rows(1, mechanism, 64)
    for num_sampled in (1, mechanism.expected_batch_size, 5 * mechanism.expected_batch_size):
        total = answers(parts, mechanism, [row] * num_sampled, silent=True)[0]
        torch.testing.assert_close(total, num_sampled * row[0].double(), rtol=1e-3, atol=num_sampled * 1e-6)


def sampling_is_poisson(parts, q=0.25, num_records=24, num_samples=6000):
    """Every record has its own fresh coin: sizes are binomial; records, pairs and successive steps independent."""
    sampler = parts.sampler(q, num_records)
    chosen = np.zeros((num_samples, num_records))
    for row in chosen:
        row[sampler.sample().numpy()] = 1
    sizes = np.bincount(chosen.sum(1).astype(int), minlength=num_records + 1)
    expected = num_samples * stats.binom.pmf(np.arange(num_records + 1), num_records, q)
    common = expected >= 5
    sizes, expected = (np.append(values[common], values[~common].sum()) for values in (sizes, expected))
    scores = (chosen - q) / np.sqrt(q * (1 - q))
    within = scores.T @ scores / np.sqrt(num_samples)
    across = scores[1:].T @ scores[:-1] / np.sqrt(num_samples - 1)
    tests = {
        "sizes": ((sizes - expected) ** 2 / expected, len(sizes) - 1),
        "records": (scores.sum(0) ** 2 / num_samples, num_records),
        "pairs": (within[np.triu_indices(num_records, 1)] ** 2, num_records * (num_records - 1) / 2),
        "steps": (across**2, num_records**2),
    }
    for name, (squares, freedom) in tests.items():
        assert stats.chi2.sf(squares.sum(), freedom) > ALPHA / len(tests), name


def streams_are_independent(parts, mode="secure", num_values=20_000):
    """No two things that are drawn know of each other: coordinates, steps, runs, and the sampler's coins."""
    noise, sampler = parts.noise(mode), parts.sampler(0.5, num_values)
    first, second, other_run = noise.sample(num_values), noise.sample(num_values), parts.noise(mode).sample(num_values)
    is_sampled = torch.zeros(num_values)
    is_sampled[sampler.sample()] = 1
    pairs = {
        "coordinates": (first[1:], first[:-1]),
        "steps": (first, second),
        "runs": (first, other_run),
        "sampling": (is_sampled, first),
        "sampling and size": (is_sampled, first.abs()),
    }
    for name, (one, two) in pairs.items():
        correlation = torch.corrcoef(torch.stack([one.double(), two.double()]))[0, 1]
        assert abs(correlation) * num_values**0.5 < 4.5, name


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


def audit(parts):
    """An observer of the outputs learns no more than ε."""
    assert audit_mechanism(calibrated(), num_trials=24_000, parts=parts).holds


PART_CHECKS: dict[str, Callable[..., None]] = {
    check.__name__: check
    for check in (
        ks_noise_scale,
        empty_step_is_noised,
        sensitivity_bound,
        normaliser_is_public,
        sampling_is_poisson,
        streams_are_independent,
        audit,
    )
}
