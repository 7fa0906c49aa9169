"""The DP statement: what a release claims, in numbers that anyone can check and a sentence that anyone can read.

Its numbers come from the `Mechanism` that ran; `check_statement` rebuilds that mechanism from the statement alone and
recomputes ε. The list of fields follows NIST SP 800-226 (unit, neighbours, parameters, trust model, what is not
protected) and tier 3 of OpenDP's registry of deployments (enough to recompute the claim).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.accounting import Accounting, cross_check, epsilon_pld
from dpmerge.common.privacy.bounds import is_large
from dpmerge.common.privacy.mechanism import (
    COMPANY_MARGIN,
    FIELD_NAMES,
    OPTIONAL_FIELDS,
    Mechanism,
    mechanism_of,
    stated_values,
)
from dpmerge.common.statement.form import MAX_LOSS_CELLS, form_problem
from dpmerge.common.statement.subspace_part import subspace_problem, subspace_words
from dpmerge.common.untrusted.kinds import same

SCHEMA = 1
NORMALISATION = "expected_batch_size"
SAMPLING = "poisson"
TRUST_MODEL = (
    "The party adds the noise itself, before anything leaves it. The server and everyone who sees the release may be "
    "curious; the party's own machine, its code and its source of randomness are trusted."
)
NOT_PROTECTED = (
    "The base model, the task, its label names, the declared population and the training settings are public.",
    "A unit whose data is also at another party, or in another release of this one, is covered by the sum of both.",
    "A person with several records is covered for each record, not for all together, unless the unit is a user.",
    "What the data says about people in general, whether or not they are in it, is not hidden: it is what is learned.",
    "How long the party took is not hidden: it grows with the number of its usable records and with their lengths.",
)

READING = (
    "How to read ε and δ: one record (or user) more or less changes the probability of any outcome by at most a factor "
    "e^ε, plus δ. Not covered: the same one at another party or in another release (budgets add up), what the data "
    "says about people in general, and how long the party took."
)

_WITNESS_TOLERANCE = 1e-3  # relative; PRV is a witness to a percent
_TOLERANCE = 1e-4  # between two machines' FFTs; far below what a decision could rest on
_TEXTS = ("party", "task", "base_sha256", "tuning_disclosure")
_DERIVED = (
    "schema",
    "epsilon",
    "sampling_prob",
    "neighboring_relation",
    "normalisation",
    "sampling",
    "noise_seed",
    "company_margin",
)
_OTHERS = ("labels", "accountant", "trust_model", "not_protected", "sampler_delta", "cross_check", "training")
_KEYS = frozenset((*FIELD_NAMES, *_TEXTS, *_DERIVED, *_OTHERS))
_OPTIONAL = frozenset(("subspace", *OPTIONAL_FIELDS))  # absent where there is nothing to say


def build_statement(
    mechanism: Mechanism,
    accounting: Accounting,
    *,
    party: str,
    task: str,
    labels: Sequence[str],
    base_sha256: str,
    tuning_disclosure: str,
    training: Mapping[str, Any],
    noise_seed: Literal["operating system", "test"] = "operating system",
    subspace: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the statement of a training, ready for JSON; made before it, so that what cannot be stated is not trained.

    Args:
        mechanism: What ran.
        accounting: `cross_check(mechanism)`.
        party: Name of the party.
        task: Name of its task.
        labels: The task's label names, public.
        base_sha256: Hash of the shared base model.
        tuning_disclosure: On which data the settings were chosen; never empty.
        training: Public settings that the server needs: optimizer, learning_rate, alignment, rho, lora, …
        noise_seed: Where the noise was seeded; "test" voids the claim, and the sentence says so.
        subspace: `describe_subspace` of what was trained in; None if all coordinates were.

    Raises:
        DpmergeError: DPM-401 if the tuning disclosure is empty or the accounting is another mechanism's.
    """
    statement = {
        "schema": SCHEMA,
        "party": party,
        "task": task,
        "labels": list(labels),
        "base_sha256": base_sha256,
        **_claim(mechanism, accounting),
        "noise_seed": noise_seed,
        "tuning_disclosure": tuning_disclosure,
        "trust_model": TRUST_MODEL,
        "not_protected": list(NOT_PROTECTED),
        "training": dict(training),
        **({} if subspace is None else {"subspace": dict(subspace)}),
    }
    check_statement(statement)
    return statement


def _claim(mechanism: Mechanism, accounting: Accounting) -> dict[str, Any]:
    """Return ε, what it follows from, and its witnesses; without privacy they are null, as JSON has no infinity."""
    witnesses = ("epsilon_prv", "epsilon_rdp", "epsilon_optimistic")
    return {
        "epsilon": accounting.epsilon if mechanism.private else None,
        **stated_values(mechanism),
        "sampling_prob": mechanism.sampling_prob,
        "neighboring_relation": mechanism.neighboring_relation,
        "normalisation": NORMALISATION,
        "sampling": SAMPLING,
        "company_margin": COMPANY_MARGIN,
        "accountant": accounting.accountant,
        "cross_check": {key: getattr(accounting, key) if mechanism.private else None for key in witnesses},
        "sampler_delta": accounting.sampler_delta,
    }


def with_clip_norm(statement: Mapping[str, Any], mechanism: Mechanism) -> dict[str, Any]:
    """Return the statement of a finished training: the clip norm may have been asked for after the charge was made."""
    return {**statement, "l2_clip_norm": mechanism.l2_clip_norm}


def is_charge_of(charge: Mapping[str, Any], statement: Mapping[str, Any]) -> bool:
    """Tell whether a ledger's charge is what a release states: all of it, but a clip norm that a query named later."""
    if statement.get("num_clip_queries") and "l2_clip_norm" in statement:
        charge = {**charge, "l2_clip_norm": statement["l2_clip_norm"]}
    return same(charge, dict(statement))


def mechanism_from_statement(statement: Mapping[str, Any]) -> Mechanism:
    """Rebuild the mechanism that a statement claims.

    Raises:
        DpmergeError: DPM-401 naming the key that is missing, unknown or out of range.
    """
    missing, unknown = sorted(_KEYS - statement.keys()), sorted(statement.keys() - _KEYS - _OPTIONAL)
    _refuse_unless(not missing, f"the statement lacks {', '.join(missing)}")
    _refuse_unless(not unknown, f"the statement has unknown keys: {', '.join(map(repr, unknown))}")
    if problem := form_problem(statement):
        raise _refusal(problem)
    try:
        return mechanism_of(statement)
    except DpmergeError as error:
        raise _refusal(f"the statement's {error.problem}") from error


def check_statement(statement: Mapping[str, Any]) -> Mechanism:
    """Return the statement's mechanism if the statement is complete and its ε follows from its own numbers.

    Recomputes ε by the pessimistic PLD from σ, q, T and δ. That a party really added the noise, nobody can check.

    Raises:
        DpmergeError: DPM-401 naming what is inconsistent.
    """
    mechanism = mechanism_from_statement(statement)
    fixed = {
        "schema": SCHEMA,
        "sampling_prob": mechanism.sampling_prob,
        "neighboring_relation": mechanism.neighboring_relation,
        "normalisation": NORMALISATION,
        "sampling": SAMPLING,
        "company_margin": COMPANY_MARGIN,
    }
    for key, value in fixed.items():
        found = statement[key]
        _refuse_unless(same(found, value), f"{key} = {found!r} should be {value!r}")
    for key in _TEXTS:
        _refuse_unless(bool(statement[key].strip()), f"{key} is not a text that says something")
    for key, words in (("trust_model", TRUST_MODEL), ("not_protected", list(NOT_PROTECTED))):
        _refuse_unless(same(statement[key], words), f"{key} is not in the words that every statement uses")
    if problem := subspace_problem(statement):
        raise _refusal(problem)
    _check_accountants(statement, mechanism)
    _check_epsilon(statement["epsilon"], mechanism)
    return mechanism


def sentence(statement: Mapping[str, Any]) -> str:
    """Return the plain claim that is printed after each run and in every report; `READING` says what it means."""
    party, task, unit = statement["party"], statement["task"], statement["privacy_unit"]
    if not statement["private"]:
        return f"{party} ({task}) was trained WITHOUT privacy: the release may reveal any of its records."
    epsilon, delta = math.ceil(statement["epsilon"] * 1000) / 1000, statement["target_delta"]
    claim = (
        f"{party} ({task}): ε = {epsilon:g}, δ = {delta:g} for any one {unit} added or removed, declared population "
        f"{statement['population']}; Poisson q = {statement['sampling_prob']:.4g}, {statement['num_steps']} steps, "
        f"σ = {statement['noise_multiplier']:.4g}, {statement['noise']} noise{subspace_words(statement)}; "
        f"{statement['accountant']}."
    )
    if is_large(delta, statement["population"]):
        claim = f"{claim} δ IS NOT BELOW 1 / POPULATION: publishing a random record in the clear would meet it."
    if statement["noise_seed"] == "test":
        return f"{claim} THE NOISE CAME FROM A TEST SEED: anyone who knows it can remove the noise."
    return claim


def _check_accountants(statement: Mapping[str, Any], mechanism: Mechanism) -> None:
    fits = all((value is not None) == mechanism.private for value in statement["cross_check"].values())
    _refuse_unless(fits, "cross_check does not hold numbers, or null without privacy")
    _refuse_unless(statement["sampler_delta"] < mechanism.target_delta, "sampler_delta is not a part of target_delta")


def _check_epsilon(claimed: object, mechanism: Mechanism) -> None:
    if not mechanism.private:
        _refuse_unless(claimed is None, f"epsilon = {claimed!r} is claimed without privacy")
        return
    if not isinstance(claimed, float):
        raise _refusal("epsilon is not claimed")
    check_cost(mechanism)
    try:
        computed = epsilon_pld(mechanism)
    except DpmergeError as error:
        raise _refusal(f"the statement cannot be accounted: {error.problem}") from error
    agrees = abs(claimed - computed) <= _TOLERANCE
    _refuse_unless(agrees, f"epsilon = {claimed!r} is claimed, but its own numbers give {computed:.6g}")


def check_witnesses(statement: Mapping[str, Any], mechanism: Mechanism) -> None:
    """Hold what a checked statement says of other accountants, and of the sampler's part of δ, to their own figures.

    Raises:
        DpmergeError: DPM-401.
    """
    if not mechanism.private:
        return
    try:
        found = cross_check(mechanism)
    except DpmergeError as error:
        raise _refusal(f"the statement cannot be accounted: {error.problem}") from error
    for key, told in statement["cross_check"].items():
        value = getattr(found, key)
        agrees = abs(told - value) <= _WITNESS_TOLERANCE * max(1.0, value)
        _refuse_unless(agrees, f"cross_check.{key} = {told!r} is claimed, but its own numbers give {value:.6g}")
    agrees = math.isclose(statement["sampler_delta"], found.sampler_delta, rel_tol=_WITNESS_TOLERANCE)
    _refuse_unless(agrees, f"sampler_delta = {statement['sampler_delta']!r} should be {found.sampler_delta:.6g}")


def check_cost(mechanism: Mechanism) -> None:
    """Refuse a stranger's mechanism whose loss distribution would take long to compose; costs nothing itself.

    The number of cells is estimated as accounting lays them out: 16 standard deviations and the mean of T losses of
    about q/σ each, over a cell's width, which is 1e-4 or a fortieth of such a loss.

    Raises:
        DpmergeError: DPM-401.
    """
    cells = 0.0
    for sigma, count in mechanism.queries:
        loss = mechanism.sampling_prob / sigma
        reach = 16 * loss * math.sqrt(count) + count * loss**2
        cells = max(cells, reach / min(1e-4, loss / 40))
    problem = f"the statement's mechanism takes about {cells:.2g} cells to account, and {MAX_LOSS_CELLS} are allowed"
    _refuse_unless(cells <= MAX_LOSS_CELLS, problem)


def _refuse_unless(holds: bool, problem: str) -> None:
    if not holds:
        raise _refusal(problem)


def _refusal(problem: str) -> DpmergeError:
    return DpmergeError("DPM-401", problem, "ask the party for the statement that its own training wrote")
