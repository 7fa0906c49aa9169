"""How much noise a target ε allows: the least that keeps the claim at or under it.

>>> mechanism = calibrate(target_epsilon=3.0, target_delta=1e-5, population=1000, expected_batch_size=64, num_steps=156,
...                       l2_clip_norm=1.0)
>>> round(mechanism.noise_multiplier, 3), round(epsilon_pld(mechanism), 3)
(1.407, 3.0)
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Required, TypedDict, Unpack

from scipy.optimize import brentq

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.accountants import MAX_RDP, may_be_hopeless, pld_epsilon, queries_of, rdp_epsilon
from dpmerge.common.privacy.accounting import delta_left, epsilon_pld, refuse_unless
from dpmerge.common.privacy.bounds import MAX_EPSILON
from dpmerge.common.privacy.mechanism import AscentSampling, Mechanism, NoiseMode, PrivacyUnit, Sharpness


class Settings(TypedDict, total=False):
    """What `Mechanism` takes beside the noise, under the same names."""

    target_delta: Required[float]
    population: Required[int]
    expected_batch_size: Required[int]
    num_steps: Required[int]
    l2_clip_norm: Required[float]
    num_coordinates: int
    sharpness: Sharpness
    ascent_sampling: AscentSampling
    privacy_unit: PrivacyUnit
    num_clip_queries: int


def calibrate(
    *, target_epsilon: float, noise: NoiseMode = "fast", ascent_share: float = 0.5, **settings: Unpack[Settings]
) -> Mechanism:
    """Return the mechanism with the least noise that keeps ε at or under the target.

    Args:
        target_epsilon: ε in (0, 100]. Never exceeded; less than 0.01 % of σ is given away.
        noise: With "secure", the error of `num_coordinates` values a query is charged to δ first.
        ascent_share: Share of the precision σ⁻² that the ascent query gets, in (0, 1) (sharpness "sam" only).
        settings: All else of a `Mechanism`, which says what each is.

    Raises:
        DpmergeError: DPM-501 if no noise reaches the target; DPM-103 if a value is out of range.
    """
    if not 0 < target_epsilon <= MAX_EPSILON:
        fix = f"it must lie in (0, {MAX_EPSILON:g}]"
        raise DpmergeError("DPM-103", f"epsilon = {target_epsilon!r} is refused", fix)
    if not 0 < ascent_share < 1:
        raise DpmergeError("DPM-103", f"ascent_share = {ascent_share!r} is refused", "it must lie inside (0, 1)")
    is_sam = settings.get("sharpness") == "sam"
    unit_noise = Mechanism(
        noise_multiplier=(1 - ascent_share) ** -0.5 if is_sam else 1.0,
        ascent_noise_multiplier=ascent_share**-0.5 if is_sam else None,
        noise=noise,
        **settings,
    )
    return _calibrated(unit_noise, float(target_epsilon))


@lru_cache(maxsize=256)
def _calibrated(unit_noise: Mechanism, target: float) -> Mechanism:
    """Scale every noise of `unit_noise` by the least common factor that meets the target.

    A coarse PLD (cells ten times as wide, still pessimistic) finds the root cheaply; the claimed PLD, a little tighter,
    confirms it or takes the last steps. ε falls at least as fast as 1/σ: a relative slack in ε bounds that in σ.
    """
    delta = delta_left((unit_noise,), unit_noise.target_delta, target)
    queries = queries_of((unit_noise,))
    sampled = -math.expm1(math.fsum(n * math.log1p(-min(q, 1 - 2**-53)) for _, q, n in queries))  # at all, in any step
    remedy = "lower delta: it covers every sample"
    refuse_unless(sampled > delta, f"epsilon = {target:g} is met without any noise", remedy)
    free = replace(unit_noise, noise="fast")  # the search may pass through σ that secure noise would refuse

    def epsilon_at(scale: float, coarseness: int) -> float:
        queries = queries_of((_scaled(free, scale),))
        rdp = (
            rdp_epsilon(queries, delta) if may_be_hopeless(queries) else 0.0
        )  # which takes as long as a coarse composition
        return rdp if rdp > MAX_RDP else pld_epsilon(queries, delta, delta, True, coarseness)

    scale = _least_scale(lambda s: epsilon_at(s, 10), target, start=1.0, step=math.log(2))
    if not (1 - 2e-5) * target <= epsilon_at(scale, 1) <= target:
        scale = _least_scale(lambda s: epsilon_at(s, 1), target, start=scale, step=0.02)
    found = _scaled(unit_noise, scale)
    epsilon = epsilon_pld(found)  # refuses now what the statement would refuse after the training
    refuse_unless(epsilon <= target, f"calibration found epsilon = {epsilon:g} above {target:g}", "report this defect")
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
        refuse_unless(high < 30, f"no noise reaches epsilon = {target:g}", "raise epsilon or delta, or train less")
    while excess(low) <= 0:
        low, high = low - step, low
        refuse_unless(low > -7, f"epsilon = {target:g} is met with hardly any noise", "lower epsilon or delta")
    root = float(brentq(excess, low, high, xtol=1e-5))
    while excess(root) > 0:  # brentq may stop on the wrong side of the root, by at most its tolerance
        root += 1e-5
    return math.exp(root)
