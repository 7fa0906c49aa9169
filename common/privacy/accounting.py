"""What a mechanism costs: the claim, and the witnesses without which it is not made.

The claim is dp-accounting's pessimistic privacy-loss distribution (PLD), valid at any discretisation, composed by
`loss.composition`, which charges δ for what rounding can do. Two independent accountants watch it: Opacus's PRV must
agree to within its own error, RDP must lie above. The Gaussian (CLT) approximation is never used: it understates ε.

>>> mechanism = Mechanism(noise_multiplier=1.407, target_delta=1e-5, population=1000, expected_batch_size=64,
...                       num_steps=156, l2_clip_norm=1.0, noise="fast")
>>> round(epsilon_pld(mechanism), 2)
3.0
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.accountants import (
    MAX_RDP,
    PRV_RELATIVE_ERROR,
    pld_epsilon,
    prv_epsilon,
    queries_of,
    rdp_epsilon,
)
from dpmerge.common.privacy.bounds import MAX_EPSILON, MIN_DELTA
from dpmerge.common.privacy.mechanism import SAMPLER_TV_PER_VALUE, Mechanism


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

    Args:
        mechanism: The training.
        pessimistic: False gives a lower end of the bracket in place of the claim.

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

    >>> one = Mechanism(noise_multiplier=1.2, target_delta=1e-5, population=1000, expected_batch_size=64, num_steps=10,
    ...                 l2_clip_norm=1.0, noise="fast")
    >>> round(epsilon_pld(one), 2), round(epsilon_together([one, one], 1e-5), 2)
    (1.33, 1.65)
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
        queries, left = queries_of(mechanisms), delta_left(mechanisms, delta, epsilon)
        _refuse_disagreement(epsilon, prv=prv_epsilon(queries, left, epsilon), rdp=rdp_epsilon(queries, left))
    return epsilon


def _epsilon(mechanisms: Sequence[Mechanism], delta: float, *, pessimistic: bool = True) -> float:
    """Return ε at δ of all together, not yet cross-checked; `pessimistic = False` gives a bracket's lower end."""
    if not all(mechanism.private for mechanism in mechanisms):
        return math.inf
    left = delta_left(mechanisms, delta, 0.0)
    remedy = "add noise, train fewer steps, or state private = false"
    queries = queries_of(mechanisms)
    rdp = rdp_epsilon(queries, left)  # a cheap look first: hopeless loss distributions outgrow memory
    refuse_unless(rdp <= MAX_RDP, f"RDP gives epsilon = {rdp:.3g}, far above {MAX_EPSILON:g}", remedy)
    epsilon = -1.0
    larger = pld_epsilon(queries, left, left, pessimistic, 1)
    while larger > epsilon:  # the sampler's charge grows with ε and ε with the charge: climb to the least fixed point
        epsilon = larger
        refuse_unless(epsilon <= MAX_EPSILON, f"epsilon = {epsilon:g} is above {MAX_EPSILON:g}", remedy)
        again = delta_left(mechanisms, delta, epsilon)
        larger = epsilon if again == left else pld_epsilon(queries, left, again, pessimistic, 1)
    return epsilon


def epsilon_rdp(mechanism: Mechanism) -> float:
    """Return ε by Rényi divergence at integer orders: an upper bound, never below the truth."""
    if not mechanism.private:
        return math.inf
    left = delta_left((mechanism,), mechanism.target_delta, epsilon_pld(mechanism))
    return rdp_epsilon(queries_of((mechanism,)), left)


def epsilon_prv(mechanism: Mechanism) -> float:
    """Return the upper end of Opacus's PRV bracket, which is 1 % of max(1, ε) above its estimate."""
    if not mechanism.private:
        return math.inf
    epsilon = epsilon_pld(mechanism)
    return prv_epsilon(queries_of((mechanism,)), delta_left((mechanism,), mechanism.target_delta, epsilon), epsilon)


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


def _sampler_delta(mechanisms: Sequence[Mechanism], epsilon: float) -> float:
    """Return the part of δ that the secure sampler costs at this ε.

    If all its output is within total variation η of the ideal, then for neighbours D, D' and any event S
    P[M(D) ∈ S] ≤ η + δ' + e^ε (P[M(D') ∈ S] + η). So it costs (1 + e^ε) η, and η ≤ (values drawn)·(bound of one).
    """
    num_values = sum(m.num_noise_values for m in mechanisms if m.private and m.noise == "secure")
    return (1 + math.exp(epsilon)) * num_values * SAMPLER_TV_PER_VALUE if num_values else 0.0


def delta_left(mechanisms: Sequence[Mechanism], delta: float, epsilon: float) -> float:
    """Return what remains of δ for the ideal mechanisms at this ε, after the samplers' share.

    Args:
        mechanisms: The trainings.
        delta: δ of all together.
        epsilon: ε at which the samplers are charged.
    """
    charge = _sampler_delta(mechanisms, epsilon)
    refuse_unless(delta >= MIN_DELTA, f"delta = {delta:g} is too small to account", f"choose at least {MIN_DELTA:g}")
    left = delta - charge
    remedy = "raise delta, lower epsilon, or train fewer coordinates"
    refuse_unless(left > MIN_DELTA / 2, f"delta = {delta:g} hardly exceeds the secure sampler's {charge:.1e}", remedy)
    return left


def refuse_unless(holds: bool, problem: str, fix: str) -> None:
    """Raise DPM-501 where a number cannot be vouched for.

    Args:
        holds: Whether it can.
        problem: What is wrong otherwise.
        fix: What to do about it.
    """
    if not holds:
        raise DpmergeError("DPM-501", problem, fix)


def _refuse_disagreement(epsilon: float, *, prv: float, rdp: float) -> None:
    if math.isinf(epsilon):
        return
    tolerance = PRV_RELATIVE_ERROR * max(1.0, epsilon)  # PRV's bracket is twice this wide and ends at its upper bound
    remedy = "this corner is outside what the accountants can vouch for: choose other settings, and report it"
    agrees = epsilon - tolerance / 10 <= prv <= epsilon + 2.1 * tolerance
    refuse_unless(agrees, f"PRV gives {prv:.6g}, PLD {epsilon:.6g}", remedy)
    refuse_unless(rdp >= epsilon - 1e-3, f"RDP gives {rdp:.6g}, below PLD's {epsilon:.6g}", remedy)
