"""How many directions to train, how short to clip and how far to step: a rule on public numbers alone.

    coordinates of public gradients [n, k], σ, B, T ─▶ per k: C, signal, noise, what is kept ─▶ the k that keeps most

Along direction i the mean gradient of the private task is not known. It is taken to be of the size m_i² = κ ẽ_i, where
ẽ_i is the mean square of clipped public gradients and κ the share of a gradient that a task's examples have in common.
T steps add up to a displacement whose signal is T² κ ẽ_i and whose noise is T ν, ν = (σC/B)². A direction is worth
training if it holds more signal than noise, T κ ẽ_i ≥ ν; the first k of them keep

    kept(k) = Σ_{i ≤ k} (κ ẽ_i - ν/T) / Σ_i κ ẽ_i

of the displacement that all directions would have without noise, in squared length. docs/sizing.md derives it.

>>> import numpy as np
>>> gradients = np.random.default_rng(0).standard_normal((400, 3)) * (1.0, 0.5, 0.001)
>>> chosen = size(gradients, sigma=1.5, expected_batch_size=128, num_steps=40, candidates=(1, 2, 3))
>>> chosen.k, [round(point.kept, 4) for point in chosen.curve]
(2, [0.2528, 0.9993, 0.9989])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpmerge.common.privacy.mechanism import Mechanism

COHERENCE = 0.01
"""κ: between 0.002 and 0.07 beyond the first 32 directions of three public tasks outside the demo (docs/sizing.md)."""

NOISE_WALK = 0.38
"""How far noise alone may carry one coordinate in T steps; tuned on the same three tasks."""

PROPOSED_CLIP_QUANTILE = 0.1
"""The rule's C, as a quantile of public norms. What a step's noise costs falls with C until every gradient is clipped,
and private gradients are shorter than public ones, whose labels are made up and surprise the model more often."""

CANDIDATES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""The k that "auto" chooses from."""

EXAMPLES_PER_DIRECTION = 2
"""Public texts that a direction needs: with fewer, the last directions fit the sample and look too strong."""


@dataclass(frozen=True)
class Point:
    """What is predicted for one k.

    Attributes:
        k: Trained directions.
        l2_clip_norm: C.
        noise_std: σC/B, per coordinate and step.
        signal_to_noise: Of one step: length of the mean gradient over the length of the noise.
        kept: Share of the noise-free displacement's squared length that is kept, at most 1; below 0 noise prevails.
    """

    k: int
    l2_clip_norm: float
    noise_std: float
    signal_to_noise: float
    kept: float


@dataclass(frozen=True)
class Size:
    """What the rule chooses, and the predictions that it chose from, by rising k."""

    chosen: Point
    curve: tuple[Point, ...]

    @property
    def k(self) -> int:
        """Directions to train."""
        return self.chosen.k


def candidates(num_texts: int) -> tuple[int, ...]:
    """Return the k that so many public texts can tell apart.

    >>> candidates(100)
    (8, 16, 32)
    """
    return tuple(k for k in CANDIDATES if EXAMPLES_PER_DIRECTION * k <= num_texts)


def size_for(mechanism: Mechanism, coordinates: NDArray[np.float64]) -> Size:
    """Choose k for a mechanism: what a party trains with k = "auto", and what `dpmerge plan` prints.

    Nothing in it is private: σ, B and T follow from what is declared, and the gradients are of public texts.

    Args:
        mechanism: Its σ, B and T; without privacy σ is 0, and most directions are best.
        coordinates: As in `size`, along as many directions as the largest candidate for so many texts, or more.
    """
    return size(
        coordinates,
        sigma=mechanism.noise_multiplier,
        expected_batch_size=mechanism.expected_batch_size,
        num_steps=mechanism.num_steps,
        candidates=candidates(len(coordinates)),
    )


def size(
    coordinates: NDArray[np.float64],
    *,
    sigma: float,
    expected_batch_size: int,
    num_steps: int,
    candidates: Sequence[int],
    coherence: float = COHERENCE,
) -> Size:
    """Choose k, of equals the least.

    Args:
        coordinates: Public gradients along the directions, the strongest direction first, [n, k_max].
        sigma: Noise multiplier σ ≥ 0 of the descent query.
        expected_batch_size: B.
        num_steps: T.
        candidates: The k to choose from, each at most k_max.
        coherence: κ in (0, 1].

    Raises:
        ValueError: If there is no candidate, or one exceeds k_max.
    """
    if not candidates or min(candidates) < 1 or max(candidates) > coordinates.shape[1]:
        raise ValueError(f"Expected candidates={tuple(candidates)} to be some of 1 … {coordinates.shape[1]}.")
    curve = tuple(predict(coordinates, k, sigma, expected_batch_size, num_steps, coherence) for k in sorted(candidates))
    return Size(max(curve, key=lambda point: point.kept), curve)


def predict(
    coordinates: NDArray[np.float64],
    k: int,
    sigma: float,
    expected_batch_size: int,
    num_steps: int,
    coherence: float = COHERENCE,
    l2_clip_norm: float | None = None,
) -> Point:
    """Predict signal and noise in the first k directions.

    Args:
        coordinates: As in `size`, like the others.
        k: Directions, at most k_max.
        sigma: σ.
        expected_batch_size: B.
        num_steps: T.
        coherence: κ.
        l2_clip_norm: C; None is the rule's.
    """
    norms = np.linalg.norm(coordinates[:, :k], axis=1)
    clip_norm = public_clip_norm(coordinates, k) if l2_clip_norm is None else l2_clip_norm
    lengths = np.minimum(1.0, clip_norm / np.where(norms > 0, norms, 1.0))
    signal = coherence * np.square(coordinates * lengths[:, None]).mean(0)
    noise_std = sigma * clip_norm / expected_batch_size
    noise = k * noise_std**2
    captured, energy = float(signal[:k].sum()), float(signal.sum())
    return Point(
        k=k,
        l2_clip_norm=clip_norm,
        noise_std=noise_std,
        signal_to_noise=math.sqrt(captured / noise) if noise > 0 else math.inf,
        kept=(captured - noise / num_steps) / energy if energy > 0 else 0.0,
    )


def public_clip_norm(coordinates: NDArray[np.float64], k: int, quantile: float = PROPOSED_CLIP_QUANTILE) -> float:
    """Return a quantile of the public gradients' norms in the first k directions, to four digits: by default C.

    Args:
        coordinates: Of the public gradients, by direction [n, directions].
        k: Directions that are trained.
        quantile: Share of the gradients that are not longer.

    >>> public_clip_norm(np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 0.5]]), 1, 0.5)
    1.0
    """
    norms = np.linalg.norm(coordinates[:, :k], axis=1)
    return float(f"{float(np.quantile(norms, quantile)):.4g}")


def signal_to_noise_bound(num_coordinates: int, sigma: float, expected_batch_size: int) -> float:
    """Return the largest signal-to-noise ratio of a step: all gradients as long as C, and in one direction.

    B·C of signal against σ·C·√P of noise; infinite without noise.

    Args:
        num_coordinates: Length of the noised vector.
        sigma: σ, noise multiplier.
        expected_batch_size: B.

    >>> round(signal_to_noise_bound(55_296, 1.5, 128), 3), round(signal_to_noise_bound(256, 1.5, 128), 3)
    (0.363, 5.333)
    """
    return expected_batch_size / (sigma * math.sqrt(num_coordinates)) if sigma > 0 else math.inf


def learning_rate(optimizer: str, *, num_steps: int, noise_std: float) -> float | None:
    """Return the step size at which noise alone carries a coordinate `NOISE_WALK` far in T steps; None if not known.

    Adam's steps are about as long as the learning rate where noise prevails, so noise walks lr·√T far; plain and
    momentum SGD scale the noise, and momentum 0.9 adds its steps up tenfold.

    Args:
        optimizer: A name of `training.optimizer`.
        num_steps: T.
        noise_std: σC/B.

    >>> learning_rate("adam", num_steps=40, noise_std=0.01)
    0.06
    """
    walk = NOISE_WALK / math.sqrt(num_steps)
    steps = {"adam": 1.0, "adamw": 1.0, "sgd": noise_std, "momentum": 10 * noise_std}
    if not steps.get(optimizer):
        return None
    return float(f"{walk / steps[optimizer]:.2g}")
