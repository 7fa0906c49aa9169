"""Methods that weigh weight changes by what public data say: RegMean by the inputs of a module, Fisher by sensitivity.

`statistics.public_statistics` makes what they need. Base weights cancel: with one base W₀ at every party, merging
W₀ + τ_t is W₀ plus the merged τ_t.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import LowRankDelta, Modules
from dpmerge.server.merging.low_rank.algebra import factorise, truncate
from dpmerge.server.merging.methods.linear import shares
from dpmerge.server.merging.methods.parameter import COEFFICIENT, RANK, Parameter, Range
from dpmerge.server.merging.methods.recipe import Combined, MergeMethod, Recipe, per_module, result_rank

GUARD = 1e-10  # of the mean diagonal: directions that no public input reaches are averaged, and others do not notice

OFF_DIAGONAL = Parameter(
    name="off_diagonal",
    kind=float,
    about="What regmean keeps of Gram matrices outside their diagonals.",
    example=0.9,
    range=Range(low=0.0, high=1.0),
)


def regmean(modules: Modules, recipe: Recipe) -> Combined:
    """Return the weight change whose outputs on all parties' inputs are nearest to the parties' own: least squares.

    Σ w_t τ_t Ĝ_t (Σ w_t Ĝ_t)⁻¹ with G_t the Gram matrix of module inputs at party t, and Ĝ_t = off_diagonal · G_t
    outside its diagonal. Thin products on the left and one Cholesky solve of [in, in]; the rank stays Σ r_t.

    References: arXiv 2212.09849, equation 2 and section 3.3. Deviations: party weights w_t, all equal by default.

    Raises:
        DpmergeError: DPM-103 without statistics, or for weights below 0.
    """
    weights = shares(recipe.weights)

    def rule(name: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        width = factors[0].shape[1]
        weighted_gram = torch.zeros(width, width, dtype=torch.float64)
        rows, plain = [], []
        for t, (item, weight) in enumerate(zip(factors, weights, strict=True)):
            gram = _damped(_statistic(recipe, t, name, (width, width), "gram").to(item.device), recipe[OFF_DIAGONAL])
            a = weight * item.scaling * item.a.double()
            rows.append(a @ gram)
            plain.append(a)
            weighted_gram += weight * gram
        guard = float((GUARD * weighted_gram.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny))
        weighted_gram.diagonal().add_(guard)
        solved = torch.cholesky_solve(
            (torch.cat(rows) + guard * torch.cat(plain)).T, torch.linalg.cholesky(weighted_gram)
        ).T
        a, b = recipe.factor * solved, torch.cat([item.b for item in factors], 1)
        merged, lost = truncate(LowRankDelta(a, b), result_rank(factors, recipe))
        return LowRankDelta(merged.a.float(), merged.b.float()), lost

    return per_module(modules, rule, recipe.factor)


REGMEAN = MergeMethod(
    name="regmean",
    summary="Nearest outputs to the parties' own on public inputs.",
    source="2212.09849",
    function=regmean,
    laws=frozenset({"identity", "idempotent", "factor-free"}),
    takes={COEFFICIENT: 1.0, OFF_DIAGONAL: 0.9, RANK: None},
    statistics="gram",
)


def fisher(modules: Modules, recipe: Recipe) -> Combined:
    """Return Σ w_t F_t ∘ τ_t / Σ w_t F_t, entry by entry, with F_t the diagonal of party t's Fisher information.

    Entries to which no party is sensitive are averaged.

    References: arXiv 2111.09832, equation 2. Deviations: none.

    Raises:
        DpmergeError: DPM-103 without statistics, or for weights below 0.
    """
    weights = shares(recipe.weights)

    def rule(name: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        shape = factors[0].shape
        total, divisor, plain = torch.zeros(3, *shape, dtype=torch.float64)
        for t, (item, weight) in enumerate(zip(factors, weights, strict=True)):
            delta, sensitivity = item.delta(), weight * _statistic(recipe, t, name, shape, "fisher").to(item.device)
            total += sensitivity * delta
            divisor += sensitivity
            plain += weight * delta
        merged = torch.where(divisor > 0, total / divisor, plain)
        return factorise((recipe.factor * merged).float(), result_rank(factors, recipe))

    return per_module(modules, rule, recipe.factor)


FISHER = MergeMethod(
    name="fisher",
    summary="Mean weighted entry by entry by sensitivity on public texts.",
    source="2111.09832",
    function=fisher,
    laws=frozenset({"identity", "idempotent", "factor-free"}),
    takes={COEFFICIENT: 1.0, RANK: None},
    statistics="fisher",
)


def statistics_hash(statistics: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return a SHA-256 over parties, modules, shapes and values, by which a merge says what it was made with."""
    digest = hashlib.sha256()
    for party in sorted(statistics):
        for name in sorted(statistics[party]):
            tensor = statistics[party][name]
            digest.update(f"{party}|{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            digest.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damped(gram: Tensor, off_diagonal: float) -> Tensor:
    """Return off_diagonal · G with G's own diagonal."""
    damped = gram * off_diagonal
    damped.diagonal().copy_(gram.diagonal())
    return damped


def _statistic(recipe: Recipe, t: int, name: str, shape: tuple[int, int], kind: str) -> Tensor:
    """Look up one party's statistic of one module, in float64."""
    party = recipe.parties[t]
    fix = "give statistics = public_statistics(...) of public texts for every party and merged module"
    found = recipe.statistics.get(party, {}).get(name)
    if found is None:
        raise DpmergeError("DPM-103", f"merge.statistics has nothing for {name} of {party}", fix)
    squares = found.diagonal() if kind == "gram" else found
    if tuple(found.shape) != shape or not bool(torch.isfinite(found).all()) or bool((squares < 0).any()):
        problem = f"merge.statistics of {party}: {name} {tuple(found.shape)} is not {shape}, negative or not finite"
        raise DpmergeError("DPM-103", problem, fix)
    return found.double()


METHODS = (REGMEAN, FISHER)
