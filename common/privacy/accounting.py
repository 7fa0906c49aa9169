"""What a mechanism costs, and how much noise a target allows.

The claim is dp-accounting's pessimistic privacy-loss distribution (PLD), valid at any discretisation, composed by
`loss_distribution`, which charges δ for what rounding can do. Two independent accountants watch it: Opacus's PRV must
agree to within its own error, RDP must lie above. The Gaussian (CLT) approximation is never used: it understates ε.

>>> mechanism = calibrate(target_epsilon=3.0, target_delta=1e-5, population=1000, expected_batch_size=64, num_steps=156,
...                       l2_clip_norm=1.0)
>>> round(mechanism.noise_multiplier, 3), round(epsilon_pld(mechanism), 3)
(1.407, 3.0)

References:
    PLD: arXiv 1807.02130, connect-the-dots 2207.04380. PRV: arXiv 2106.02848. RDP: arXiv 1908.10530.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.large_delta import MIN_DELTA
from dpmerge.common.privacy.loss_distribution import Loss, compose
from dpmerge.common.privacy.mechanism import (
    SAMPLER_TV_PER_VALUE,
    AscentSampling,
    Mechanism,
    NoiseMode,
    PrivacyUnit,
    Sharpness,
)

MAX_EPSILON = 100.0
"""Beyond it e^ε is no promise, and loss distributions grow past any memory."""

_MAX_RDP = 10 * MAX_EPSILON
_Parts = tuple[tuple[float, float, int], ...]
"""Queries as (σ, q, count)."""

_INTERVAL = 1e-4
_MAX_LOSS_CELLS = 2**18
_PRV_RELATIVE_ERROR = 0.01
_RDP_ORDERS = (*range(2, 64), 128, 256, 512, 1024)  # integers: their closed form converges everywhere


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """One mechanism's cost by three accountants; all ε at the mechanism's δ.

    Attributes:
        epsilon: The claim (pessimistic PLD); infinite without privacy.
        epsilon_optimistic: Optimistic PLD; the truth lies between the two.
        epsilon_prv: Upper end of Opacus's PRV bracket.
        epsilon_rdp: Upper bound by Rényi divergence.
        sampler_delta: The part of δ that pays for the secure sampler's distance from an ideal Gaussian.
        accountant: Name and version of what computed `epsilon`.
    """

    epsilon: float
    epsilon_optimistic: float
    epsilon_prv: float
    epsilon_rdp: float
    sampler_delta: float
    accountant: str


def epsilon_pld(mechanism: Mechanism, *, pessimistic: bool = True) -> float:
    """Return ε of the whole training at its δ, as claimed (pessimistic) or as a bracket's lower end.

    Raises:
        DpmergeError: DPM-501 where the number could not be trusted: δ < 1e-12, ε > 100, or δ eaten up by the sampler.
    """
    return _epsilon((mechanism,), mechanism.target_delta, pessimistic=pessimistic)


def epsilon_together(mechanisms: Sequence[Mechanism], delta: float) -> float:
    """Return ε at δ of several trainings on the same records; later ones may depend on what earlier ones released.

    All loss distributions are composed, so this is less than the sum of the ε's; the secure samplers' errors add up.
    Only the trainings may depend on each other, not their numbers: σ, q and steps are taken as chosen beforehand.

    Args:
        mechanisms: All of one privacy unit; none at all cost nothing.
        delta: δ of the total; each mechanism's own plays no part.

    Raises:
        DpmergeError: As `cross_check`: the total has the same witnesses as a single training.
        ValueError: If the privacy units differ.

    >>> one = calibrate(target_epsilon=1.0, target_delta=1e-5, population=1000, expected_batch_size=64, num_steps=10,
    ...                 l2_clip_norm=1.0)
    >>> round(epsilon_together([one, one], 1e-5), 2)
    1.27
    """
    if len({mechanism.privacy_unit for mechanism in mechanisms}) > 1:
        raise ValueError("Expected mechanisms of one privacy_unit: what protects a record is no bound for a user.")
    if not mechanisms:
        return 0.0
    return _checked_together(tuple(mechanisms), delta)


@lru_cache(maxsize=64)
def _checked_together(mechanisms: tuple[Mechanism, ...], delta: float) -> float:
    epsilon = _epsilon(mechanisms, delta)
    if math.isfinite(epsilon):
        parts, left = _parts(mechanisms), _delta_left(mechanisms, delta, epsilon)
        _refuse_disagreement(epsilon, prv=_prv(parts, left, epsilon), rdp=_rdp(parts, left))
    return epsilon


def _epsilon(mechanisms: Sequence[Mechanism], delta: float, *, pessimistic: bool = True) -> float:
    """Return ε at δ of all together, not yet cross-checked; `pessimistic = False` gives a bracket's lower end."""
    if not all(mechanism.private for mechanism in mechanisms):
        return math.inf
    left = _delta_left(mechanisms, delta, 0.0)
    remedy = "add noise, train fewer steps, or state private = false"
    parts = _parts(mechanisms)
    rdp = _rdp(parts, left)  # a cheap look first: hopeless loss distributions outgrow memory
    _refuse_unless(rdp <= _MAX_RDP, f"RDP gives epsilon = {rdp:.3g}, far above {MAX_EPSILON:g}", remedy)
    epsilon = -1.0
    larger = _epsilon_at(parts, left, left, pessimistic, 1)
    while larger > epsilon:  # the sampler's charge grows with ε and ε with the charge: climb to the least fixed point
        epsilon = larger
        _refuse_unless(epsilon <= MAX_EPSILON, f"epsilon = {epsilon:g} is above {MAX_EPSILON:g}", remedy)
        again = _delta_left(mechanisms, delta, epsilon)
        larger = epsilon if again == left else _epsilon_at(parts, left, again, pessimistic, 1)
    return epsilon


def epsilon_rdp(mechanism: Mechanism) -> float:
    """Return ε by Rényi divergence at integer orders: an upper bound, never below the truth."""
    if not mechanism.private:
        return math.inf
    left = _delta_left((mechanism,), mechanism.target_delta, epsilon_pld(mechanism))
    return _rdp(_parts((mechanism,)), left)


def epsilon_prv(mechanism: Mechanism) -> float:
    """Return the upper end of Opacus's PRV bracket, which is 1 % of max(1, ε) above its estimate."""
    if not mechanism.private:
        return math.inf
    epsilon = epsilon_pld(mechanism)
    return _prv(_parts((mechanism,)), _delta_left((mechanism,), mechanism.target_delta, epsilon), epsilon)


@lru_cache(maxsize=256)
def _prv(parts: _Parts, delta: float, epsilon: float) -> float:
    from opacus.accountants import PRVAccountant  # seconds to import, and only a cross-check needs it

    accountant = PRVAccountant()
    accountant.history = list(parts)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # log(0) at q = 1 and the range of its internal RDP orders; the result is checked
        error = _PRV_RELATIVE_ERROR * max(1.0, epsilon)
        return float(accountant.get_epsilon(delta, eps_error=error))


def cross_check(mechanism: Mechanism) -> Accounting:
    """Return the claim together with its witnesses, or refuse it.

    Raises:
        DpmergeError: DPM-501 if PRV disagrees beyond its own error, or RDP lies below the claim.
    """
    epsilon = epsilon_pld(mechanism)
    accounting = Accounting(
        epsilon=epsilon,
        epsilon_optimistic=epsilon_pld(mechanism, pessimistic=False),
        epsilon_prv=epsilon_prv(mechanism),
        epsilon_rdp=epsilon_rdp(mechanism),
        sampler_delta=_sampler_delta((mechanism,), epsilon),
        accountant=f"dp-accounting {version('dp-accounting')} PLD",
    )
    _refuse_disagreement(epsilon, prv=accounting.epsilon_prv, rdp=accounting.epsilon_rdp)
    return accounting


def calibrate(
    *,
    target_epsilon: float,
    target_delta: float,
    population: int,
    expected_batch_size: int,
    num_steps: int,
    l2_clip_norm: float,
    sharpness: Sharpness = "none",
    noise: NoiseMode = "fast",
    ascent_sampling: AscentSampling = "paired",
    ascent_share: float = 0.5,
    num_coordinates: int = 0,
    privacy_unit: PrivacyUnit = "record",
    num_clip_queries: int = 0,
) -> Mechanism:
    """Return the mechanism with the least noise that keeps ε at or under the target.

    Args:
        target_epsilon: ε in (0, 100]. Never exceeded; less than 0.01 % of σ is given away.
        target_delta: δ in [1e-12, 1).
        population: Declared number of units.
        expected_batch_size: B.
        num_steps: T.
        l2_clip_norm: C.
        sharpness: "sam" spends on an ascent query too.
        noise: With "secure", the error of `num_coordinates` values a query is charged to δ first.
        ascent_sampling: "paired" or "separate" Poisson samples ("sam" only).
        ascent_share: Share of the precision σ⁻² that the ascent query gets, in (0, 1) ("sam" only).
        num_coordinates: P, length of the trainable vector.
        privacy_unit: "record" or "user".
        num_clip_queries: 1 to spend as much as a step on a clip norm first.

    Raises:
        DpmergeError: DPM-501 if no noise reaches the target; DPM-103 if a value is out of range.
    """
    if not 0 < target_epsilon <= MAX_EPSILON:
        raise DpmergeError("DPM-103", f"epsilon = {target_epsilon!r} is refused", "it must lie in (0, 100]")
    if not 0 < ascent_share < 1:
        raise DpmergeError("DPM-103", f"ascent_share = {ascent_share!r} is refused", "it must lie inside (0, 1)")
    is_sam = sharpness == "sam"
    unit_noise = Mechanism(
        noise_multiplier=(1 - ascent_share) ** -0.5 if is_sam else 1.0,
        ascent_noise_multiplier=ascent_share**-0.5 if is_sam else None,
        l2_clip_norm=l2_clip_norm,
        population=population,
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        target_delta=target_delta,
        num_coordinates=num_coordinates,
        sharpness=sharpness,
        ascent_sampling=ascent_sampling,
        noise=noise,
        privacy_unit=privacy_unit,
        num_clip_queries=num_clip_queries,
    )
    return _calibrated(unit_noise, float(target_epsilon))


@lru_cache(maxsize=256)
def _calibrated(unit_noise: Mechanism, target: float) -> Mechanism:
    """Scale every noise of `unit_noise` by the least common factor that meets the target.

    A coarse PLD (cells ten times as wide, still pessimistic) finds the root cheaply; the claimed PLD, a little tighter,
    confirms it or takes the last steps. ε falls at least as fast as 1/σ: a relative slack in ε bounds that in σ.
    """
    delta = _delta_left((unit_noise,), unit_noise.target_delta, target)
    parts = _parts((unit_noise,))
    sampled = -math.expm1(math.fsum(n * math.log1p(-min(q, 1 - 2**-53)) for _, q, n in parts))  # at all, in any step
    remedy = "lower delta: it covers every sample"
    _refuse_unless(sampled > delta, f"epsilon = {target:g} is met without any noise", remedy)
    free = replace(unit_noise, noise="fast")  # the search may pass through σ that secure noise would refuse

    def epsilon_at(scale: float, coarseness: int) -> float:
        parts = _parts((_scaled(free, scale),))
        rdp = _rdp(parts, delta) if _is_wide(parts) else 0.0  # which takes as long as a coarse composition
        return rdp if rdp > _MAX_RDP else _epsilon_at(parts, delta, delta, True, coarseness)

    scale = _least_scale(lambda s: epsilon_at(s, 10), target, start=1.0, step=math.log(2))
    if not (1 - 2e-5) * target <= epsilon_at(scale, 1) <= target:
        scale = _least_scale(lambda s: epsilon_at(s, 1), target, start=scale, step=0.02)
    found = _scaled(unit_noise, scale)
    epsilon = epsilon_pld(found)  # refuses now what the statement would refuse after the training
    _refuse_unless(epsilon <= target, f"calibration found epsilon = {epsilon:g} above {target:g}", "report this defect")
    return found


def _scaled(mechanism: Mechanism, scale: float) -> Mechanism:
    sigma, ascent = mechanism.noise_multiplier, mechanism.ascent_noise_multiplier
    return replace(
        mechanism,
        noise_multiplier=scale * sigma,
        ascent_noise_multiplier=None if ascent is None else scale * ascent,
    )


def _least_scale(epsilon_at: Callable[[float], float], target: float, *, start: float, step: float) -> float:
    """Return a scale within 3e-5 (relative) above the least that keeps ε ≤ target; `step` widens the log bracket."""

    def excess(log_scale: float) -> float:
        return epsilon_at(math.exp(log_scale)) - target

    low = high = math.log(start)
    while excess(high) > 0:
        low, high = high, high + step
        _refuse_unless(high < 30, f"no noise reaches epsilon = {target:g}", "raise epsilon or delta, or train less")
    while excess(low) <= 0:
        low, high = low - step, low
        _refuse_unless(low > -7, f"epsilon = {target:g} is met with hardly any noise", "lower epsilon or delta")
    root = float(brentq(excess, low, high, xtol=1e-5))
    while excess(root) > 0:  # brentq may stop on the wrong side of the root, by at most its tolerance
        root += 1e-5
    return math.exp(root)


def _parts(mechanisms: Sequence[Mechanism]) -> _Parts:
    """Return the different (σ, q) in the order in which they first appear, each with the number of its queries."""
    counts: dict[tuple[float, float], int] = {}
    for mechanism in mechanisms:
        for sigma, count in mechanism.queries:
            query = (sigma, mechanism.sampling_prob)
            counts[query] = counts.get(query, 0) + count
    return tuple((sigma, q, count) for (sigma, q), count in counts.items())


@lru_cache(maxsize=1024)
def _epsilon_at(parts: _Parts, delta: float, asked: float, pessimistic: bool, coarseness: int) -> float:
    """Return ε at `asked` of the distribution composed for `delta`.

    Remembered by its numbers, whoever has them: of two hundred parties many have the same, whatever else differs, and
    every one is checked several times.
    """
    return _composed(parts, delta, pessimistic, coarseness).epsilon(asked)


@lru_cache(maxsize=2)  # both ends of one bracket: each is some ten million bytes
def _composed(parts: _Parts, delta: float, pessimistic: bool, coarseness: int) -> Loss:
    """Return the loss distribution of all queries, cells `coarseness` times as wide as the claim's."""
    return compose(parts, interval=coarseness * _interval(parts), delta=delta, pessimistic=pessimistic)


def _interval(parts: _Parts) -> float:
    """Return a loss cell's width: 1e-4; less where one query's loss, about q/σ, is as small; more where it is huge."""
    smallest_loss = min(q / sigma for sigma, q, _ in parts)
    smallest_sigma = min(sigma for sigma, _, _ in parts)
    largest_loss = 0.5 / smallest_sigma**2 + 10 / smallest_sigma
    return max(min(_INTERVAL, smallest_loss / 40), largest_loss / _MAX_LOSS_CELLS)


def _is_wide(parts: _Parts) -> bool:
    """Whether the Rényi divergence of order 2, a sum of logarithms, leaves it open that ε is hopelessly large."""
    squares = (n * math.log1p(q * q * math.expm1(min(sigma**-2, 700.0))) for sigma, q, n in parts)
    return math.fsum(squares) > _MAX_RDP / 2


@lru_cache(maxsize=1024)
def _rdp(parts: _Parts, delta: float) -> float:
    accountant = RdpAccountant(orders=_RDP_ORDERS)
    for sigma, q, count in parts:
        accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), count)
    return float(accountant.get_epsilon(delta))


def _sampler_delta(mechanisms: Sequence[Mechanism], epsilon: float) -> float:
    """Return the part of δ that the secure sampler costs at this ε.

    If all its output is within total variation η of the ideal, then for neighbours D, D' and any event S
    P[M(D) ∈ S] ≤ η + δ' + e^ε (P[M(D') ∈ S] + η). So it costs (1 + e^ε) η, and η ≤ (values drawn)·(bound of one).
    """
    num_values = sum(m.num_noise_values for m in mechanisms if m.private and m.noise == "secure")
    return (1 + math.exp(epsilon)) * num_values * SAMPLER_TV_PER_VALUE if num_values else 0.0


def _delta_left(mechanisms: Sequence[Mechanism], delta: float, epsilon: float) -> float:
    """Return what remains of δ for the ideal mechanisms at this ε, after the samplers' share."""
    charge = _sampler_delta(mechanisms, epsilon)
    _refuse_unless(delta >= MIN_DELTA, f"delta = {delta:g} is too small to account", f"choose at least {MIN_DELTA:g}")
    left = delta - charge
    remedy = "raise delta, lower epsilon, or train fewer coordinates"
    _refuse_unless(left > MIN_DELTA / 2, f"delta = {delta:g} hardly exceeds the secure sampler's {charge:.1e}", remedy)
    return left


def _refuse_unless(holds: bool, problem: str, fix: str) -> None:
    if not holds:
        raise DpmergeError("DPM-501", problem, fix)


def _refuse_disagreement(epsilon: float, *, prv: float, rdp: float) -> None:
    if math.isinf(epsilon):
        return
    tolerance = _PRV_RELATIVE_ERROR * max(1.0, epsilon)  # PRV's bracket is twice this wide and ends at its upper bound
    remedy = "this corner is outside what the accountants can vouch for: choose other settings, and report it"
    agrees = epsilon - tolerance / 10 <= prv <= epsilon + 2.1 * tolerance
    _refuse_unless(agrees, f"PRV gives {prv:.6g}, PLD {epsilon:.6g}", remedy)
    _refuse_unless(rdp >= epsilon - 1e-3, f"RDP gives {rdp:.6g}, below PLD's {epsilon:.6g}", remedy)
