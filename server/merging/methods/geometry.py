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

from dpmerge.server.merging.adapters.deltas import Modules
from dpmerge.server.merging.low_rank.algebra import gram
from dpmerge.server.merging.methods.linear import shares, weighted
from dpmerge.server.merging.methods.parameter import COEFFICIENT, RANK
from dpmerge.server.merging.methods.recipe import Combined, MergeMethod, Recipe
from dpmerge.server.merging.noise.noise import Noise

# Both constants were chosen by measurement, see docs/results.md.
CAUTION = 0.3  # least pull of the factors towards the average
NOISE_COST = 0.55  # of a noise as long as another party's whole change, which its task has learned to bear
SMALLEST_SIGNAL = 1e-3  # of ‖τ_t‖²: what a party is credited with at least, so that nobody is divided by zero


def geometry(modules: Modules, recipe: Recipe) -> Combined:
    """Return Σ f_t τ_t whose factors let every party's change act along its own direction as fully as the others allow.

    The gain of party t is ⟨Σ f_s s_s, s_t⟩ / ‖s_t‖²: 1 is its own model, 0 the base model. An average gives related
    tasks much and unrelated ones 1/T; a sum gives related tasks too much. See `solve_coefficients`.

    A stated coefficient is the mean of the factors in place of the rule's own; their proportions stay.
    """
    factors = solve_coefficients(overlaps(modules).cpu(), recipe.noise, shares(recipe.weights))
    mean = sum(factors) / len(factors)
    if recipe.coefficient is not None:
        proportions = [factor / mean for factor in factors] if mean > 0 else [1.0] * len(factors)
        factors, mean = [recipe.coefficient * each for each in proportions], recipe.coefficient
    return replace(weighted(modules, factors, recipe.rank, 1.0), coefficient=mean, coefficients=tuple(factors))


GEOMETRY = MergeMethod(
    name="geometry",
    summary="A sum in which every party's change acts as fully as the others, and the noise, allow.",
    source="-",
    function=geometry,
    laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
    takes={COEFFICIENT: None, RANK: None},
    whole_model=True,
    noise=True,
)


def solve_coefficients(inner: Tensor, noise: Sequence[Noise], weights: Sequence[float]) -> list[float]:
    """Return one factor per party: f = argmin Σ_t w_t (gain_t(f) - 1)² + Σ_t w_t c_t (f_t - w_t)².

    The second term pulls towards the weighted average f = w. Its strength c_t is `CAUTION`; plus the squared relative
    error with which the party's signal energy is known; plus `NOISE_COST` times what its noise, ‖n_t‖², is beside the
    other parties' changes, Σ_{s≠t} w_s / ‖τ_s‖² / w_t, since their tasks would carry it. Identical adapters give the
    average, unrelated ones without noise (1 + CAUTION · w) / (1 + CAUTION) each, one adapter itself. A party of weight
    0 takes no part.

    Args:
        inner: ⟨τ_t, τ_s⟩, float64 [T, T].
        noise: The parties' noise.
        weights: At least 0, summing to 1.

    >>> no_noise = [Noise(0.0, 1, "stated")] * 2
    >>> [[round(f, 3) for f in solve_coefficients(g, no_noise, [0.5, 0.5])] for g in (torch.eye(2), torch.ones(2, 2))]
    [[0.885, 0.885], [0.5, 0.5]]
    """
    weight = torch.tensor(weights, dtype=torch.float64)
    part = weight > 0
    signal, energy = split(inner, noise)
    error = torch.tensor([each.relative_error for each in noise], dtype=torch.float64)[part]
    share, signal, energy = weight[part], signal[part][:, part], energy[part]
    own, change = signal.diagonal(), inner.double().diagonal()[part]
    per_signal, per_change = _inverse(own), _inverse(change)

    gains = share.sqrt()[:, None] * signal * per_signal[:, None]
    others = (share * per_change).sum() - share * per_change
    caution = CAUTION + (energy * error * per_signal).square() + NOISE_COST * energy * others / share
    pull = share * caution
    wanted = gains.T @ (share.sqrt() * (own > 0)) + pull * share
    result = torch.zeros(len(weight), dtype=torch.float64)
    result[part] = torch.linalg.solve(gains.T @ gains + torch.diag(pull), wanted)
    return result.tolist()


def split(inner: Tensor, noise: Sequence[Noise]) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix of the signals [T, T] and the energy of each party's noise [T].

    Products of different parties are shrunk by what chance explains of them, x → x · max(0, 1 - v/x²), where
    independent noise alone has the variance v = ‖n_t‖² ‖n_s‖² / P. No two signals are more alike than equal. Of parties
    that trained in subspaces k takes the place of P, as if they had the same one: an upper bound, since the variance is
    ‖n_t‖² ‖n_s‖² ‖Q_t Q_sᵀ‖² / (k_t k_s), and the server does not hold Q.

    Args:
        inner: ⟨τ_t, τ_s⟩, [T, T].
        noise: The parties' noise, T of them.

    >>> signal, energy = split(torch.full((2, 2), 4.0), [Noise(0.75, 10**9, "stated")] * 2)
    >>> signal.tolist(), energy.tolist()
    ([[1.0, 1.0], [1.0, 1.0]], [3.0, 3.0])
    """
    inner = inner.double()
    squared_norms = inner.diagonal().clamp(min=0)
    share = torch.tensor([each.share for each in noise], dtype=torch.float64)
    energy, own = squared_norms * share, squared_norms * (1 - share).clamp(min=SMALLEST_SIGNAL)
    count = torch.tensor([float(max(1, each.num_coordinates)) for each in noise], dtype=torch.float64)
    chance = torch.outer(energy, energy) / torch.minimum(count[:, None], count)
    kept = (1 - chance / inner.square().clamp(min=torch.finfo(torch.float64).tiny)).clamp(min=0)
    bound = torch.outer(own.sqrt(), own.sqrt())
    signal = torch.minimum(torch.maximum(inner * kept, -bound), bound)
    return signal.diagonal_scatter(own), energy


def _inverse(values: Tensor) -> Tensor:
    """Return 1/x, and 0 for x = 0: a party that did not move has no part in anything."""
    return torch.where(values > 0, 1 / torch.where(values > 0, values, 1.0), 0.0)


def wiener_weights(signal: Tensor, energy: Tensor) -> Tensor:
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


METHODS = (GEOMETRY,)
