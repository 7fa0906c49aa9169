"""The geometry of a merge: how far the parties moved, how much their ways overlap, and how much of it is noise.

Inner products ⟨τ_t, τ_s⟩ over all modules hold both signal and noise, τ_t = s_t + n_t. Noise of different parties is
independent, so that ⟨τ_t, τ_s⟩ is already ⟨s_t, s_s⟩ up to chance, and the energy of a party's own noise is known from
its statement: ⟨s_t, s_t⟩ = ‖τ_t‖² - ‖n_t‖². At ε = 1 adapters are .97 noise and look orthogonal; the Gram matrix of
their signals shows which tasks are related all the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpmerge.server.merging.deltas import Modules
from dpmerge.server.merging.linear import shares, weighted
from dpmerge.server.merging.lowrank import gram
from dpmerge.server.merging.noise import Noise
from dpmerge.server.merging.recipe import Combined, Recipe

CAUTION = 0.3  # least pull of the factors towards the average; measured, see docs/results.md
SMALLEST_SIGNAL = 1e-3  # of ‖τ_t‖²: what a party is credited with at least, so that nobody is divided by zero


def geometry(modules: Modules, recipe: Recipe) -> Combined:
    """Return Σ f_t τ_t whose factors let every party's change act along its own direction as fully as the others allow.

    The gain of party t is ⟨Σ f_s s_s, s_t⟩ / ‖s_t‖²: 1 is its own model, 0 the base model. An average gives related
    tasks much and unrelated ones 1/T; a sum gives related tasks too much. See `expression`.

    A stated coefficient is the mean of the factors in place of the rule's own; their proportions stay.
    """
    factors = expression(overlaps(modules).cpu(), recipe.noise, shares(recipe.weights))
    mean = sum(factors) / len(factors)
    if recipe.coefficient is not None:
        proportions = [factor / mean for factor in factors] if mean > 0 else [1.0] * len(factors)
        factors, mean = [recipe.coefficient * each for each in proportions], recipe.coefficient
    return replace(weighted(modules, factors, recipe.rank, 1.0), coefficient=mean, factors=tuple(factors))


def expression(inner: Tensor, noise: Sequence[Noise], weights: Sequence[float]) -> list[float]:
    """Return one factor per party: f = argmin Σ_t w_t (gain_t(f) - 1)² + Σ_t w_t c_t (f_t - w_t)².

    c_t is the caution towards the weighted average f = w: `CAUTION`, plus the squared relative error with which the
    party's signal energy is known, and raised for all until the merged noise, Σ f_t² ‖n_t‖², is no more than one
    party's, Σ w_t ‖n_t‖². Identical adapters give the average, orthogonal ones without noise (1 + CAUTION·w)/(1 +
    CAUTION) each, one adapter itself. A party of weight 0 takes no part.

    Args:
        inner: ⟨τ_t, τ_s⟩, float64 [T, T].
        noise: The parties' noise.
        weights: At least 0, summing to 1.

    >>> no_noise = [Noise(0.0, 1, "stated")] * 2
    >>> [[round(f, 3) for f in expression(g, no_noise, [0.5, 0.5])] for g in (torch.eye(2), torch.ones(2, 2))]
    [[0.885, 0.885], [0.5, 0.5]]
    """
    share = torch.tensor(weights, dtype=torch.float64)
    taking_part = share > 0
    share = share[taking_part]
    signal, energy = split(inner, noise)
    signal, energy = signal[taking_part][:, taking_part], energy[taking_part]
    own = signal.diagonal()
    moved = own > 0
    gains = torch.where(moved[:, None], signal / torch.where(moved, own, 1.0)[:, None], 0.0)
    error = torch.tensor([each.relative_error for each in noise], dtype=torch.float64)[taking_part]
    doubt = (energy * error / torch.where(moved, own, 1.0)).square()

    def factors(caution: float) -> Tensor:
        pull = share * (caution + doubt)
        wanted = (gains * share[:, None]).T @ moved.double() + pull * share
        solution: Tensor = torch.linalg.solve((gains * share[:, None]).T @ gains + torch.diag(pull), wanted)
        return solution

    def is_quiet(caution: float) -> bool:
        return float(factors(caution).square() @ energy) <= (1 + 1e-6) * float(share @ energy)  # rounding is no noise

    low, high = CAUTION, CAUTION
    while not is_quiet(high):  # ends: the average itself is quiet, with room to spare
        low, high = high, 2 * high
    while high > 1.001 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_quiet(middle) else (middle, high)
    result = torch.zeros(len(taking_part), dtype=torch.float64)
    result[taking_part] = factors(high)
    return result.tolist()


def split(inner: Tensor, noise: Sequence[Noise]) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix of the signals [T, T] and the energy of each party's noise [T].

    No two signals are taken to be more alike than equal: where chance says so, their inner product is cut.

    >>> signal, energy = split(torch.full((2, 2), 4.0), [Noise(0.75, 9, "stated")] * 2)
    >>> signal.tolist(), energy.tolist()
    ([[1.0, 1.0], [1.0, 1.0]], [3.0, 3.0])
    """
    whole = inner.double().diagonal().clamp(min=0)
    share = torch.tensor([each.share for each in noise], dtype=torch.float64)
    own = whole * (1 - share).clamp(min=SMALLEST_SIGNAL)
    lengths = own.sqrt()
    bound = lengths[:, None] * lengths
    signal = torch.minimum(torch.maximum(inner.double(), -bound), bound)
    return signal.diagonal_scatter(own), whole * share


def borrowed(signal: Tensor, energy: Tensor) -> Tensor:
    """Return the matrix W [T, T] of the best linear prediction ŝ_t = Σ_s W_ts τ_s of every signal from all changes.

    W = S (S + N)⁻¹, each row then scaled so that ŝ_t holds s_t once, ⟨ŝ_t, s_t⟩ = ‖s_t‖²: plain prediction would shrink
    a noisy party almost to the base model, and noise off the signal's directions does little harm. Without noise, or of
    unrelated parties, W is the identity; related parties borrow from each other.

    Args:
        signal: S, [T, T].
        energy: The diagonal of N, [T].
    """
    mixed = signal @ torch.linalg.pinv(signal + torch.diag(energy), hermitian=True)
    gain = (mixed * signal).sum(1)
    scale = torch.where(gain > 0, signal.diagonal() / torch.where(gain > 0, gain, 1.0), 0.0)
    scaled: Tensor = mixed * scale[:, None]
    return scaled


def overlaps(modules: Modules) -> Tensor:
    """Return ⟨τ_t, τ_s⟩ summed over all modules, float64 [T, T]."""
    return torch.stack([gram(factors) for factors in modules.values()]).sum(0)


def cosines(inner: Tensor) -> Tensor:
    """Turn inner products into cosines; a party that did not move has 0 with all others and 1 with itself.

    >>> cosines(torch.tensor([[4.0, 0.0], [0.0, 0.0]])).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    lengths = inner.diagonal().clamp(min=0).sqrt()
    unit = torch.where(lengths > 0, 1 / lengths, 0.0)
    result = (inner * unit[:, None] * unit).clamp(-1, 1)
    return result.fill_diagonal_(1.0)
