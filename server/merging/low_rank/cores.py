"""Cores: low-rank changes of several parties in coordinates of bases that they share, τ_t = Q_B M_t Q_Aᵀ.

Q_B and Q_A are orthonormal bases of the stacked factors. Cores are exact, and at most (T·r)² numbers in float64, or the
full matrix's where T·r exceeds its sides. A party's M_t stays two thin factors. Directions whose singular value is
rounding error are left out: they are no part of any party's change, and their vectors are arbitrary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpmerge.server.merging.adapters.deltas import LowRankDelta
from dpmerge.server.merging.low_rank.algebra import thin_qr, truncate

RELATIVE_ZERO = 1e-12  # of the largest singular value; cores are float64


@dataclass(frozen=True, eq=False)
class Core:
    """The parties' weight changes in shared coordinates, τ_t = q_b M_t q_aᵀ.

    Attributes:
        q_b: Orthonormal columns [out, k].
        q_a: Orthonormal columns [in, l].
        lefts: Thin factors of the parties' coordinates, M_t = left_t right_tᵀ, each [k, r_t].
        rights: Each [l, r_t].
    """

    q_b: Tensor
    q_a: Tensor
    lefts: tuple[Tensor, ...]
    rights: tuple[Tensor, ...]

    def total(self) -> Tensor:
        """Return Σ M_t, [k, l]."""
        return torch.cat(self.lefts, 1) @ torch.cat(self.rights, 1).T

    def lift(self, core: Tensor, rank: int | None) -> tuple[LowRankDelta, float]:
        """Return q_b · core · q_aᵀ as factors, at a rank or the core's own, and the Frobenius norm of what is lost.

        Args:
            core: Coordinates [k, l].
            rank: Of the result, or None for the core's own.
        """
        u, s, v = support(core, least=1)
        item = LowRankDelta((v * s.sqrt()).T @ self.q_a.T, self.q_b @ (u * s.sqrt()))
        kept, lost = truncate(item, rank or item.rank)
        return LowRankDelta(kept.a.float(), kept.b.float()), lost


def core_of(factors: Sequence[LowRankDelta], weights: Sequence[float]) -> Core:
    """Return the exact core of weighted weight changes, in the bases that the stacked factors span.

    Args:
        factors: Every party's change of one module.
        weights: One number per party.

    References: arXiv 2509.17786, section 3. Deviations: the stacked factors go through QR before their SVD.
    """
    (q_b, r_b), (q_a, r_a) = stacked_bases(factors, weights)
    ranks = [item.rank for item in factors]
    return Core(q_b, q_a, tuple(torch.split(r_b, ranks, 1)), tuple(torch.split(r_a, ranks, 1)))


def stacked_bases(
    factors: Sequence[LowRankDelta], weights: Sequence[float]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (Q_B, coordinates of all w_t s_t b_t) and (Q_A, coordinates of all a_tᵀ), side by side, in float64.

    Args:
        factors: Every party's change of one module, [out, in].
        weights: One number per party.
    """
    ranks = [item.rank for item in factors]
    scaled = (item.b.double() * (item.scaling * weight) for item, weight in zip(factors, weights, strict=True))
    return _basis(side_by_side(scaled, ranks)), _basis(side_by_side((item.a.T for item in factors), ranks))


def support(matrix: Tensor, least: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, s, V (columns) of a matrix without the singular values that are rounding error, but `least` at least.

    Args:
        matrix: [m, n].
        least: How many to keep at least.

    >>> support(torch.diag(torch.tensor([3.0, 0.0], dtype=torch.float64)))[1].tolist()
    [3.0]
    """
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    count = max(least, int((s > RELATIVE_ZERO * s[:1]).sum()))
    return u[:, :count], s[:count], vh[:count].T


def thin_support(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `support` of left rightᵀ without making that product: by QR of its thin factors.

    Args:
        left: [m, r].
        right: [n, r].
    """
    (q_left, r_left), (q_right, r_right) = thin_qr(left), thin_qr(right)
    u, s, v = support(r_left @ r_right.T)
    return q_left @ u, s, q_right @ v


def _basis(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the orthonormal basis of columns' singular vectors, and the columns' coordinates in it."""
    if columns.shape[1] >= columns.shape[0]:  # they may span everything, so a QR would make them no smaller
        u, s, v = support(columns, least=1)
        return u, s[:, None] * v.T
    q, r = thin_qr(columns)
    del columns  # as large as q
    u, s, v = support(r, least=1)
    return q @ u, s[:, None] * v.T


def side_by_side(pieces: Iterable[Tensor], widths: Sequence[int]) -> Tensor:
    """Return columns in float64, written where they stay."""
    columns = torch.empty(0)
    for t, piece in enumerate(pieces):
        if t == 0:
            columns = piece.new_empty(len(piece), sum(widths), dtype=torch.float64)
        start = sum(widths[:t])
        columns[:, start : start + widths[t]] = piece
    return columns
