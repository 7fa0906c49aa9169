"""Methods that look at singular directions: KnOTS, TSV, Iso-C, Iso-CTS, and least squares on row spaces.

All of them work on cores, the parties' coordinates in bases that they share; see `low_rank/cores.py`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpmerge.server.merging.adapters.deltas import LowRankDelta, Modules
from dpmerge.server.merging.low_rank.algebra import thin_qr, truncate
from dpmerge.server.merging.low_rank.cores import RELATIVE_ZERO, Core, core_of, side_by_side, support, thin_support
from dpmerge.server.merging.methods.parameter import COEFFICIENT, DENSITY, RANK, SEMANTICS, Parameter, Range
from dpmerge.server.merging.methods.recipe import Combined, MergeMethod, Recipe, per_module
from dpmerge.server.merging.methods.sparse import trimmed_mean

RIDGE = Parameter(
    name="ridge",
    kind=float,
    about="Relative ridge of the least squares of wudi.",
    example=1e-6,
    range=Range(low=0.0),
)
COMMON_SHARE = Parameter(
    name="common_share",
    kind=float,
    about="Share of iso-cts's directions from the sum.",
    example=0.8,
    range=Range(low=0.0, high=1.0, open_low=True),
)


def iso_c(modules: Modules, recipe: Recipe) -> Combined:
    """Flatten the spectrum of the weighted sum: all its singular values become their mean.

    References: arXiv 2502.04959, section 4.1. Deviations: the mean is over the sum's support, T·r directions of LoRA,
    and not over all min(out, in), most of which no party has.
    """

    def rule(core: Core) -> Tensor:
        u, s, v = support(core.total())
        return _mean(s) * u @ v.T

    return _in_core(modules, recipe, rule, recipe.weights)


ISO_C = MergeMethod(
    name="iso-c",
    summary="Flatten the spectrum of the sum.",
    source="2502.04959",
    function=iso_c,
    laws=frozenset({"rotation-free", "factor-free"}),
    takes={COEFFICIENT: 1.0, RANK: None},
)


def iso_cts(modules: Modules, recipe: Recipe) -> Combined:
    """Flatten the sum's leading directions together with each party's leading directions outside them.

    `common_share` of the sum's directions are kept; the rest of its rank is divided evenly among the parties'
    residuals. The directions are made orthonormal, and all singular values become their mean.

    References: arXiv 2502.04959, section 4.2. Deviations: as `iso_c`.
    """

    def rule(core: Core) -> Tensor:
        u, s, v = support(core.total())
        common = max(1, round(recipe[COMMON_SHARE] * len(s)))
        own = (len(s) - common) // len(core.lefts)
        lefts, values, rights = [u[:, :common]], [s[:common]], [v[:, :common]]
        for part_left, part_right in zip(core.lefts, core.rights, strict=True) if own else ():
            outside = part_left - lefts[0] @ (lefts[0].T @ part_left)
            left, value, right = thin_support(outside, part_right)
            lefts.append(left[:, :own])
            values.append(value[:own])
            rights.append(right[:, :own])
        return _mean(torch.cat(values)) * polar_factor(torch.cat(lefts, 1)) @ polar_factor(torch.cat(rights, 1)).T

    return _in_core(modules, recipe, rule, recipe.weights)


ISO_CTS = MergeMethod(
    name="iso-cts",
    summary="Flatten the sum's leading directions and each adapter's own beside them.",
    source="2502.04959",
    function=iso_cts,
    laws=frozenset({"rotation-free", "factor-free"}),
    takes={COEFFICIENT: 1.0, COMMON_SHARE: 0.8, RANK: None},
    limit=({"common_share": 1.0}, "iso-c"),
)


def tsv(modules: Modules, recipe: Recipe) -> Combined:
    """Concatenate the parties' leading singular vectors, whiten them, and keep the singular values: TSV-Merge.

    Each party keeps min(out, in)/T directions, which is all of them for LoRA until T·r exceeds the width.

    References: arXiv 2412.00081, algorithm 1. Deviations: directions that coincide are whitened on their span, so that
    identical adapters give that adapter as long as all directions are kept.
    """

    def rule(core: Core) -> Tensor:
        share = max(1, min(len(core.q_b), len(core.q_a)) // len(core.lefts))
        lefts, values, rights = zip(*map(thin_support, core.lefts, core.rights), strict=True)
        left = polar_factor(torch.cat([u[:, :share] for u in lefts], 1))
        right = polar_factor(torch.cat([v[:, :share] for v in rights], 1))
        return (left * torch.cat([s[:share] for s in values])) @ right.T

    return _in_core(modules, recipe, rule, recipe.weights)


TSV = MergeMethod(
    name="tsv",
    summary="Whiten the concatenated singular vectors, keep the singular values.",
    source="2412.00081",
    function=tsv,
    laws=frozenset({"identity", "factor-free"}),
    takes={COEFFICIENT: 1.0, RANK: None},
)


def knots_ties(modules: Modules, recipe: Recipe) -> Combined:
    """Align the parties by one SVD, [τ_1 … τ_T] = U S [V_1ᵀ … V_Tᵀ], and apply TIES to the V_t.

    References: arXiv 2410.19735, section 4. Deviations: each party's V_t is trimmed by itself.
    """

    def rule(_: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        left, values, rights = joint_svd(factors)
        right = trimmed_mean(rights, recipe).double()
        item = LowRankDelta(values[:, None] * right * recipe.factor, left)
        kept, lost = truncate(item, recipe.rank or item.rank)
        return LowRankDelta(kept.a.float(), kept.b.float()), lost

    return per_module(modules, rule, recipe.factor)


KNOTS_TIES = MergeMethod(
    name="knots-ties",
    summary="Align by one SVD of all adapters, then TIES on the right factors.",
    source="2410.19735",
    function=knots_ties,
    laws=frozenset({"identity", "idempotent", "factor-free"}),
    takes={COEFFICIENT: 1.0, DENSITY: 0.2, SEMANTICS: "paper", RANK: None},
)


def joint_svd(factors: Sequence[LowRankDelta]) -> tuple[Tensor, Tensor, tuple[LowRankDelta, ...]]:
    """Return U [out, k], S [k] and every party's V_tᵀ [k, in] as thin factors, with τ_t = U S V_tᵀ, in float64.

    The SVD of [τ_1 … τ_T] without that matrix: QR of the stacked b's and of each a leaves a core of [Σ r, Σ r].
    """
    bases = [thin_qr(item.a.T) for item in factors]
    ranks = [item.rank for item in factors]
    q_b, r_b = thin_qr(side_by_side((item.b.double() * item.scaling for item in factors), ranks))
    lefts = torch.split(r_b, ranks, 1)
    joint = torch.cat([left @ r_a.T for left, (_, r_a) in zip(lefts, bases, strict=True)], 1)
    u, s, v = support(joint, least=1)
    parts = torch.split(v, [len(r_a) for _, r_a in bases])
    return q_b @ u, s, tuple(LowRankDelta(q_a.T, part.T) for (q_a, _), part in zip(bases, parts, strict=True))


def wudi(modules: Modules, recipe: Recipe) -> Combined:
    """Return the weight change that interferes least with any party's inputs, in closed form.

    Minimises Σ_t ‖(τ − τ_t) τ_tᵀ‖² / ‖τ_t‖² over τ: the rows of τ_t stand for the party's inputs. The solution is
    (Σ τ_t G_t)(Σ G_t + ridge · I)⁺ with G_t = τ_tᵀτ_t / ‖τ_t‖².

    References: arXiv 2503.08099, section 3. Deviations: the published code takes 300 Adam steps from the sum; this is
    the minimum itself. `ridge` is relative to the largest eigenvalue of Σ G_t.
    """

    def rule(core: Core) -> Tensor:
        # G_t = right_t K_t right_tᵀ and M_t G_t = left_t (right_tᵀ right_t) K_t right_tᵀ, with K_t of rank r_t
        inner = [left.T @ left for left in core.lefts]
        outer = [right.T @ right for right in core.rights]
        smallest = torch.finfo(torch.float64).tiny
        middle = [x / (x * y).sum().clamp(min=smallest) for x, y in zip(inner, outer, strict=True)]
        rights = torch.cat(core.rights, 1).T
        grams = torch.cat([right @ k for right, k in zip(core.rights, middle, strict=True)], 1) @ rights
        pulls = torch.cat([x @ y @ k for x, y, k in zip(core.lefts, outer, middle, strict=True)], 1) @ rights
        values, vectors = torch.linalg.eigh(grams)
        floor = RELATIVE_ZERO * values[-1].clamp(min=0)
        inverse = torch.where(values > floor, 1 / (values + recipe[RIDGE] * values[-1]), 0.0)
        solution: Tensor = pulls @ vectors
        return torch.mm(solution * inverse, vectors.T)

    return _in_core(modules, recipe, rule, recipe.weights)


WUDI = MergeMethod(
    name="wudi",
    summary="Least interference with every adapter's row space, in closed form.",
    source="2503.08099",
    function=wudi,
    laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
    takes={COEFFICIENT: 1.0, RIDGE: 0.0, RANK: None},
)


def polar_factor(columns: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal columns on the span of the given ones: U Vᵀ of their SVD.

    >>> polar_factor(torch.tensor([[2.0], [0.0]])).tolist()
    [[1.0], [0.0]]
    """
    u, _, v = support(columns)
    return u @ v.T


def _in_core(modules: Modules, recipe: Recipe, rule: Callable[[Core], Tensor], weights: Sequence[float]) -> Combined:
    def lifted(_: str, factors: tuple[LowRankDelta, ...]) -> tuple[LowRankDelta, float]:
        core = core_of(factors, weights)
        return core.lift(recipe.factor * rule(core), recipe.rank)

    return per_module(modules, lifted, recipe.factor)


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(1, len(values))


METHODS = (KNOTS_TIES, TSV, ISO_C, ISO_CTS, WUDI)
