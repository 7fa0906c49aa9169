"""What training leaks, measured: a lower bound on ε from canaries sent through the training loop itself.

The accountant gives an upper bound on paper. This gives a lower bound from outputs alone: too little noise, no
clipping, raw gradients in a step or a query that nobody charged lift it above the claim.

A canary is a record whose gradient points along its own coordinate, far longer than the clip norm, whenever it is
sampled: the worst record there is. A fair coin decides whether it is in the data; an observer who sees every iterate
of `train`, and is told the answers of its ascent queries, guesses the coin.

>>> mechanism = Mechanism(noise_multiplier=1.0, l2_clip_norm=1.0, population=8, expected_batch_size=4, num_steps=4,
...                       target_delta=0.01, num_coordinates=256, noise="fast")
>>> result = audit_mechanism(mechanism, num_trials=2048)
>>> result.num_trials, result.holds
(2048, True)
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta
from torch import Tensor, nn

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.privacy.noise import FastNoise, SecureNoise
from dpmerge.client.privacy.sampling import PoissonSampler
from dpmerge.client.privacy.units import Users
from dpmerge.client.subspace.coordinates import FullSpace
from dpmerge.client.training.train import Classifier, PrivateData, TrainingState, train
from dpmerge.common.config.federation import TrainingSettings
from dpmerge.common.encoder.activations import Activations, Batch
from dpmerge.common.privacy.accounting import epsilon_pld
from dpmerge.common.privacy.mechanism import Mechanism

NUM_CANARIES = 2048
"""A good number per run: the fixed cost of a step is small beside it, and its rows stay in cache."""

_PHYSICAL_BATCH = 64  # canaries per physical batch: a logical step takes several, as in training
_CANARY_NORM = 16.0  # times C: a canary is only as harmless as the clipping makes it
_STILL = 2.0**-20  # how far a step moves a canary's score, in standard deviations of noise: its gradient stays put
_NUM_THRESHOLDS = 512


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
) -> AuditResult:
    """Bound ε from below by playing the membership game with Dirac canaries against `client.train.train`.

    One training of all T steps holds P = `mechanism.num_coordinates` canaries, one per coordinate, each present by its
    own fair coin. That gives P trials: no canary has a part in another's coordinate, rows are clipped one by one,
    Poisson coins and Gaussian noise are independent between coordinates. So each coordinate is the mechanism with one
    record of sensitivity C in or out, and given the coins the guesses are independent, as Clopper–Pearson needs. That
    holds of the mechanism *as described*, the hypothesis that an ε̂ above the claim rejects; correlated noise in a
    broken one can only add to the reasons.

    Steps are so short that no canary's gradient changes, and perturbations as short: an adaptive observer learns no
    more of a Gaussian mechanism, whose accounting is the same for all gradients of length C.

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

    Raises:
        ValueError: If the mechanism has no noise or no coordinates, if it has a clip query, whose answer no canary
            shows in, or another value is out of range.

    References:
        Clopper–Pearson bounds on a distinguisher: arXiv 2006.07709, 2101.04535. Many canaries in one run: arXiv
        2305.08846.

    Deviations:
        2305.08846's bound allows for guesses that depend on one another; here, by construction, they do not.
    """
    _check_game(mechanism, num_trials, confidence)
    started = time.monotonic()
    claimed = epsilon_pld(mechanism)
    chosen_on: list[_Trials] = []
    held_out: list[_Trials] = []
    while not held_out or 2 * len(held_out) * mechanism.num_coordinates < num_trials:
        if held_out and time.monotonic() - started > max_seconds:
            break
        chosen_on.append(_run(mechanism))
        held_out.append(_run(mechanism))
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


def _check_game(mechanism: Mechanism, num_trials: int, confidence: float) -> None:
    if not mechanism.private or mechanism.num_coordinates < 1:
        raise ValueError("Expected a private mechanism with num_coordinates of at least 1.")
    if mechanism.num_clip_queries:
        raise ValueError("Expected num_clip_queries=0: this audit does not look at the answer of a clip query.")
    if num_trials < 1 or not 0 < confidence < 1:
        raise ValueError(f"Expected num_trials={num_trials} of at least 1 and confidence={confidence} in (0, 1).")


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


def _run(mechanism: Mechanism) -> _Trials:
    """Train once on the canaries whose coins say so; return every coordinate's log-likelihood ratio."""
    coins = PoissonSampler(0.5, mechanism.num_coordinates).sample()
    descents, ascents = _answers(mechanism, coins)
    ratios = torch.zeros(mechanism.num_coordinates, dtype=torch.float64)
    for step, descent in enumerate(descents):
        evidence = (2 * descent - 1) / (2 * mechanism.noise_multiplier**2)
        if mechanism.ascent_noise_multiplier is not None:
            told = (2 * ascents[step] - 1) / (2 * mechanism.ascent_noise_multiplier**2)
            if mechanism.ascent_sampling == "separate":
                ratios += _sampled_ratio(told, mechanism.sampling_prob)
            else:
                evidence += told
        ratios += _sampled_ratio(evidence, mechanism.sampling_prob)
    is_present = torch.zeros(mechanism.num_coordinates, dtype=torch.bool)
    is_present[coins] = True
    return _Trials(ratios[is_present].numpy(), ratios[~is_present].numpy())


def _answers(mechanism: Mechanism, coins: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Train on the canaries in `coins` (coordinates, int64 [m]); return each step's noisy sums [P], in units of C.

    Those of the descents are what moved θ, told from its iterates; those of the ascents are what the loop hands to its
    coordinates, since only their direction has a part in θ.
    """
    clip = mechanism.l2_clip_norm or math.inf  # private mechanisms have one
    score = 2 * _CANARY_NORM * clip  # of a canary at a weight of one: the logistic loss's gradient is half as long at 0
    learning_rate = _STILL / (score * clip * max(1.0, mechanism.noise_multiplier))
    settings = TrainingSettings(
        expected_batch_size=mechanism.expected_batch_size,
        num_steps=mechanism.num_steps,
        optimizer="sgd",
        learning_rate=learning_rate,
        sharpness=mechanism.sharpness,
        ascent_sampling=mechanism.ascent_sampling,
        rho=2.0**-10 / score,
    )
    model, iterates = _CanaryModel(mechanism.num_coordinates), list[Tensor]()
    users = Users(range(len(coins))) if mechanism.privacy_unit == "user" else None
    data = PrivateData(_Canaries(coins, mechanism.num_coordinates, score), torch.zeros_like(coins), users)

    def after_step(_step: int, capture: Callable[[], TrainingState]) -> None:
        iterates.append(capture().theta.double())

    with PerExampleGradients(model, max_examples=_PHYSICAL_BATCH) as gradients:
        space = _ToldSpace(gradients)
        sampler = PoissonSampler(mechanism.sampling_prob, data.num_units)
        noise = SecureNoise() if mechanism.noise == "secure" else FastNoise()
        train(
            *(model, data, gradients, (), mechanism, settings, sampler, noise), coordinates=space, after_step=after_step
        )
    to_sum = mechanism.expected_batch_size / clip
    descents = [(before - after) * (to_sum / learning_rate) for before, after in pairwise(iterates)]
    return descents, [answer.double() * to_sum for answer in space.answers[::2]]


class _CanaryModel(Classifier):
    """The score of class 1 is a weight for each canary, that of class 0 is 0; all canaries are of class 0."""

    def __init__(self, num_canaries: int) -> None:
        nn.Module.__init__(self)  # no encoder: canaries are at the split already
        self.head = nn.Linear(num_canaries, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Canaries [n, P] and mask [n, 1] → class scores [n, 2]."""
        score = self.head(hidden)
        return torch.cat([torch.zeros_like(score), score], dim=1)


class _Canaries(Activations):
    """Canaries as records at the split: one coordinate each."""

    def __init__(self, coordinates: Tensor, width: int, score: float) -> None:
        self._coordinates, self._width, self._score = coordinates, width, score

    def __len__(self) -> int:
        return len(self._coordinates)

    def batches(self, records: Tensor, capacity: int) -> Iterator[Batch]:
        """Split canaries (positions, int64 [m]) into physical batches of at most `capacity`."""
        for members in torch.split(records, capacity) if len(records) else ():
            hidden = torch.zeros(len(members), self._width)
            hidden[torch.arange(len(members)), self._coordinates[members]] = self._score
            yield Batch(members, hidden, torch.ones(len(members), 1))


class _ToldSpace(FullSpace):
    """All of θ; keeps each answer of the mechanism that the loop makes a gradient of: ascent and descent in turn."""

    def __init__(self, gradients: PerExampleGradients) -> None:
        super().__init__(gradients)
        self.answers: list[Tensor] = []

    def gradient(self, answer: Tensor) -> Tensor:
        """Return the gradient of `vector` that the mechanism's answer stands for."""
        self.answers.append(answer.clone())
        return super().gradient(answer)


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
