"""What the reservations of a ledger cost together, and whether one more fits under a cap.

Every reservation counts in full: released, abandoned or interrupted. Their loss distributions are composed. A training
may depend on earlier releases; that its numbers (σ, q, steps) do not is assumed, as in every composition by PLD.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.accounting import epsilon_together
from dpmerge.common.privacy.mechanism import Mechanism, PrivacyUnit, mechanism_of

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cap:
    """What all trainings on one data set together may cost.

    Attributes:
        epsilon: Bound on the total ε, in (0, 100].
        delta: δ of the total.
        privacy_unit: Whom the cap protects; a training with another unit cannot be held against it.
    """

    epsilon: float
    delta: float
    privacy_unit: PrivacyUnit = "record"


def charged_mechanism(charge: Mapping[str, Any]) -> Mechanism:
    """Return the mechanism that a reservation charged.

    Raises:
        DpmergeError: DPM-504 if the charge does not hold its numbers.
    """
    try:
        return mechanism_of(charge)
    except (KeyError, DpmergeError) as error:
        fix = "compose it by hand from what the release states, and start a ledger anew only with that total as a cap"
        raise DpmergeError("DPM-504", f"a charge in the ledger cannot be accounted: {error}", fix) from error


def total_epsilon(charges: Sequence[Mapping[str, Any]], delta: float) -> float:
    """Return ε at δ of all charges together; infinite if one was without privacy.

    Raises:
        DpmergeError: DPM-504 if a charge cannot be read or the privacy units differ; DPM-501 if the total cannot be
            accounted (above ε = 100, or δ too small).
    """
    mechanisms = [charged_mechanism(charge) for charge in charges]
    units = sorted({mechanism.privacy_unit for mechanism in mechanisms})
    if len(units) > 1:
        fix = "compose the reservations of each unit alone; neither total covers the other's"
        raise DpmergeError("DPM-504", f"charges per {' and per '.join(units)} do not compose", fix)
    return epsilon_together(mechanisms, delta)


def charges(entries: Iterable[Entry]) -> list[Mapping[str, Any]]:
    """Return the charges of all reservations."""
    return [entry["charge"] for entry in entries if entry["kind"] == "reserve"]


def check_cap(entries: Iterable[Entry], dataset: str, charge: Mapping[str, Any], cap: Cap) -> None:
    """Refuse a charge that would bring the ledger's total above the cap.

    A ledger is of one data set. Every reservation in it counts, by whatever name the data set went then.

    Raises:
        DpmergeError: DPM-506 with what was requested, spent, remains and is missing; DPM-507 if its privacy unit is
            not the cap's.
    """
    unit = charged_mechanism(charge).privacy_unit
    if unit != cap.privacy_unit:
        problem = f"unit = {unit!r} where the cap of data set {dataset!r} protects each {cap.privacy_unit}"
        raise DpmergeError("DPM-507", problem, f'set privacy.unit = "{cap.privacy_unit}"')
    before = charges(entries)
    together = _epsilon([*before, charge], cap.delta)
    if together <= cap.epsilon:
        return
    requested, spent = _epsilon([charge], cap.delta), _epsilon(before, cap.delta)
    remaining, short_by = max(0.0, cap.epsilon - spent), together - cap.epsilon
    problem = (
        f"data set {dataset!r}: requested epsilon = {_up(requested)}, spent {_up(spent)}, together {_up(together)} "
        f"at delta = {cap.delta:g}, cap {cap.epsilon:g} (remaining {remaining:.4g}, short by {_up(short_by)})"
    )
    fix = "ask for a smaller epsilon, or have whoever owns the site's policy raise the cap"
    raise DpmergeError("DPM-506", problem, fix)


def _epsilon(some: Sequence[Mapping[str, Any]], delta: float) -> float:
    """Return their total, infinite where it is too large to be told."""
    try:
        return total_epsilon(some, delta)
    except DpmergeError as error:
        if error.code != "DPM-501":
            raise
        return math.inf


def _up(value: float) -> str:
    """Write a cost so that it never reads smaller than it is.

    >>> _up(0.12341), _up(math.inf)
    ('0.1235', 'above 100')
    """
    return f"{math.ceil(value * 1e4 - 1e-6) / 1e4:g}" if math.isfinite(value) else "above 100"
