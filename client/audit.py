"""What the mechanism leaks, measured: a lower bound on ε from canaries sent through the real parts.

The accountant gives an upper bound on paper. This gives a lower bound from outputs alone: too little noise, no clipping
or a query that nobody charged lift it above the claim.

A canary is a record whose gradient points along its own coordinate, far longer than the clip norm, whenever it is
sampled: the worst record there is. A fair coin decides whether it is in the data; an observer who sees every noisy
gradient guesses the coin.

>>> mechanism = Mechanism(noise_multiplier=1.0, l2_clip_norm=1.0, population=8, expected_batch_size=4, num_steps=4,
...                       target_delta=0.01, num_coordinates=256, noise="fast")
>>> result = audit_mechanism(mechanism, num_trials=2048)
>>> result.num_trials, result.holds
(2048, True)
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta
from torch import Tensor

from dpmerge.client.noise import FastNoise, NoiseSource, SecureNoise
from dpmerge.client.privatiser import Privatiser
from dpmerge.client.sampling import PoissonSampler
from dpmerge.common.accounting import epsilon_pld
from dpmerge.common.mechanism import Mechanism, NoiseMode

NUM_CANARIES = 2048
"""A good number per run: the fixed cost of a step is small beside it, and its rows stay in cache."""

_PHYSICAL_BATCH = 64  # canaries per `accumulate`: a logical step takes several, as in training
_CANARY_NORM = 16.0  # times C: a canary is only as harmless as the clipping makes it
_NUM_THRESHOLDS = 512


def fresh_noise(mode: NoiseMode) -> NoiseSource:
    """Return a noise source keyed by the operating system."""
    return SecureNoise() if mode == "secure" else FastNoise()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts under audit; the defaults are what training uses.

    Attributes:
        privatiser: Takes a mechanism, P, a noise source and `query`.
        sampler: Takes q and the number of units.
        noise: Takes the noise mode.
    """

    privatiser: Callable[..., Privatiser] = Privatiser
    sampler: Callable[[float, int], PoissonSampler] = PoissonSampler
    noise: Callable[[NoiseMode], NoiseSource] = fresh_noise


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What an audit found.

    Attributes:
        epsilon_lower: ε̂: if the trials are independent, the true ε at `target_delta` is at least this, with
            `confidence`.
        epsilon_claimed: What the accountant says at the same δ.
        target_delta: The mechanism's δ.
        confidence: One minus the probability that a sound mechanism yields an ε̂ above its ε.
        num_trials: Canaries whose coins were guessed; half chose the test, half were held out for the bound.
        seconds: Time taken.
    """

    epsilon_lower: float
    epsilon_claimed: float
    target_delta: float
    confidence: float
    num_trials: int
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether the measurement is compatible with the claim."""
        return self.epsilon_lower <= self.epsilon_claimed


def audit_mechanism(
    mechanism: Mechanism,
    *,
    num_trials: int = 200_000,
    confidence: float = 0.999,
    max_seconds: float = math.inf,
    parts: Parts | None = None,
) -> AuditResult:
    """Bound the mechanism's ε from below by playing the membership game with Dirac canaries.

    One run of all T steps holds P = `mechanism.num_coordinates` canaries, one per coordinate, each present by its own
    fair coin. That gives P trials: no canary has a part in another's coordinate, rows are clipped one by one, Poisson
    coins and Gaussian noise are independent between coordinates. So each coordinate is the mechanism with one record
    of sensitivity C in or out, and given the coins the guesses are independent, as Clopper–Pearson needs. That holds
    of the mechanism *as described*, the hypothesis that an ε̂ above the claim rejects; correlated noise in a broken one
    can only add to the reasons.

    The statistic is the log-likelihood ratio of a coordinate's T answers, optimal by Neyman–Pearson. One half of the
    trials chooses threshold and direction (guess "present" above it, or "absent" below it); the other half gives

        ε̂ = log((TPR₋ − δ) / FPR₊)

    with Clopper–Pearson bounds that hold together with `confidence`.

    Args:
        mechanism: The whole mechanism, private, with `num_coordinates` ≥ 1. A δ near 0.01 is easiest to witness:
            the likeliest outcomes that violate ε at δ have a probability of a few δ.
        num_trials: At least this many, in whole runs of P.
        confidence: In (0, 1).
        max_seconds: No further pair of runs starts after this; the clock knows nothing of the outcomes.
        parts: Other parts than the real ones, for tests of the audit.

    Raises:
        ValueError: If the mechanism has no noise or no coordinates, or another value is out of range.

    References:
        Clopper–Pearson bounds on a distinguisher: arXiv 2006.07709, 2101.04535. Many canaries in one run: arXiv
        2305.08846.

    Deviations:
        2305.08846's bound allows for guesses that depend on one another; here, by construction, they do not.
    """
    if not mechanism.private or mechanism.num_coordinates < 1:
        raise ValueError("Expected a private mechanism with num_coordinates of at least 1.")
    if num_trials < 1 or not 0 < confidence < 1:
        raise ValueError(f"Expected num_trials={num_trials} of at least 1 and confidence={confidence} in (0, 1).")
    parts = Parts() if parts is None else parts
    started = time.monotonic()
    claimed = epsilon_pld(mechanism)
    chosen_on: list[_Trials] = []
    held_out: list[_Trials] = []
    while not held_out or 2 * len(held_out) * mechanism.num_coordinates < num_trials:
        if held_out and time.monotonic() - started > max_seconds:
            break
        chosen_on.append(_run(mechanism, parts))
        held_out.append(_run(mechanism, parts))
    level = (1 - confidence) / 2  # of each of the two rates
    test = _best_test(_joined(chosen_on), mechanism.target_delta, level)
    return AuditResult(
        epsilon_lower=float(_lower_bounds(_joined(held_out), test, mechanism.target_delta, level)[0]),
        epsilon_claimed=claimed,
        target_delta=mechanism.target_delta,
        confidence=confidence,
        num_trials=2 * len(held_out) * mechanism.num_coordinates,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class _Trials:
    """Sorted statistics of the canaries that were present, and of those that were not."""

    present: NDArray[np.float64]
    absent: NDArray[np.float64]


@dataclass(frozen=True)
class _Test:
    """Guess "present" where a statistic exceeds the threshold, or (`inverted`) "absent" where it does not."""

    thresholds: NDArray[np.float64]
    inverted: bool


def _joined(trials: list[_Trials]) -> _Trials:
    return _Trials(
        np.sort(np.concatenate([one.present for one in trials])),
        np.sort(np.concatenate([one.absent for one in trials])),
    )


def _run(mechanism: Mechanism, parts: Parts) -> _Trials:
    """Run all T steps once on the canaries whose coins say so; return every coordinate's log-likelihood ratio."""
    num_canaries = mechanism.num_coordinates
    coins = parts.sampler(0.5, num_canaries).sample()
    noise = parts.noise(mechanism.noise)
    sampler = parts.sampler(mechanism.sampling_prob, len(coins))
    queries = [(parts.privatiser(mechanism, num_canaries, noise, query="descent"), mechanism.noise_multiplier)]
    if mechanism.ascent_noise_multiplier is not None:
        ascent = parts.privatiser(mechanism, num_canaries, noise, query="ascent")
        queries.insert(0, (ascent, mechanism.ascent_noise_multiplier))
    ratios = torch.zeros(num_canaries, dtype=torch.float64)
    for _ in range(mechanism.num_steps):
        sample, evidence = coins[sampler.sample()], torch.zeros_like(ratios)
        for number, (privatiser, sigma) in enumerate(queries):
            if number and mechanism.ascent_sampling == "separate":
                ratios += _sampled_ratio(evidence, mechanism.sampling_prob)
                sample, evidence = coins[sampler.sample()], torch.zeros_like(ratios)
            evidence += (2 * _answer(privatiser, sample, mechanism) - 1) / (2 * sigma**2)
        ratios += _sampled_ratio(evidence, mechanism.sampling_prob)
    is_present = torch.zeros(num_canaries, dtype=torch.bool)
    is_present[coins] = True
    return _Trials(ratios[is_present].numpy(), ratios[~is_present].numpy())


def _answer(privatiser: Privatiser, sample: Tensor, mechanism: Mechanism) -> Tensor:
    """Return one query's noisy sum [P] in units of C, asked about the canaries in `sample` (coordinates, int64 [m])."""
    clip = mechanism.l2_clip_norm or math.inf  # private mechanisms have one
    for batch in torch.split(sample, _PHYSICAL_BATCH) if len(sample) else ():
        rows = torch.zeros(len(batch), mechanism.num_coordinates)
        rows[torch.arange(len(batch)), batch] = _CANARY_NORM * clip
        privatiser.accumulate(rows)
    return privatiser.finish().double() * (mechanism.expected_batch_size / clip)


def _sampled_ratio(evidence: Tensor, q: float) -> Tensor:
    """Return log((1 − q) + q·exp(evidence)): the ratio when the record was sampled with probability q only."""
    left_out = torch.log1p(torch.tensor(-q, dtype=torch.float64))  # −∞ at q = 1
    return torch.logaddexp(left_out, math.log(q) + evidence)


def _best_test(trials: _Trials, delta: float, level: float) -> _Test:
    """Return the single threshold and direction with the largest bound on these trials."""
    everything = np.concatenate([trials.present, trials.absent])
    grid = np.unique(np.quantile(everything, np.linspace(0, 1, _NUM_THRESHOLDS)))
    best, largest = _Test(grid[:1], False), -math.inf
    for inverted in (False, True):
        bounds = _lower_bounds(trials, _Test(grid, inverted), delta, level)
        place = int(np.argmax(bounds))
        if bounds[place] > largest:
            best, largest = _Test(grid[place : place + 1], inverted), float(bounds[place])
    return best


def _lower_bounds(trials: _Trials, test: _Test, delta: float, level: float) -> NDArray[np.float64]:
    """Return ε̂ ≥ 0 for each of the test's thresholds; each rate's bound fails with probability `level`."""
    hits, alarms = (
        len(values) - np.searchsorted(values, test.thresholds, side="right")
        for values in (trials.present, trials.absent)
    )
    num_hits, num_alarms = len(trials.present), len(trials.absent)
    if test.inverted:
        hits, num_hits, alarms, num_alarms = num_alarms - alarms, num_alarms, num_hits - hits, num_hits
    rate = beta.ppf(level, np.maximum(hits, 1), num_hits - hits + 1) * (hits > 0)
    false_rate = np.where(alarms < num_alarms, beta.ppf(1 - level, alarms + 1, np.maximum(num_alarms - alarms, 1)), 1.0)
    bounds: NDArray[np.float64] = np.log(np.maximum(rate - delta, false_rate) / false_rate)
    return bounds
