"""Exact arithmetic on stacked low-rank factors: sums, inner products, core space, truncation.

A sum of T weight changes of rank r lives in at most T·r dimensions on either side. QR of the stacked thin factors gives
orthonormal bases Q_B, Q_A, and with them a core of (T·r)² numbers in which norms, angles and singular values are those
of the full matrices. Cores are float64; nothing of size [out, in] is ever built here.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dpmerge.server.merging.deltas import Factors


def weighted_sum(factors: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Return Σ_t weights_t τ_t exactly, at the lowest rank that needs no decomposition.

    Parties that share A add their B's under it; different A's are stacked. All parties on one frozen A thus keep their
    rank.
    """
    groups: dict[bytes, tuple[Tensor, Tensor]] = {}
    for item, weight in zip(factors, weights, strict=True):
        if not item.rank:
            continue
        key = hashlib.sha256(item.a.contiguous().cpu().numpy().data).digest()
        a, b = groups.get(key, (item.a, torch.zeros(item.b.shape, dtype=torch.float64)))
        groups[key] = a, b + item.b.double() * (weight * item.scaling)
    return Factors(torch.cat([a for a, _ in groups.values()]), torch.cat([b.float() for _, b in groups.values()], 1))


def gram(factors: Sequence[Factors]) -> Tensor:
    """Return the inner products ⟨τ_t, τ_s⟩ as float64 [T, T].

    ⟨τ_t, τ_s⟩ = s_t s_s Σ (B_tᵀB_s) ∘ (A_tA_sᵀ): products of thin factors only.
    """
    a = torch.cat([item.a for item in factors]).double()
    b = torch.cat([item.b * item.scaling for item in factors], 1).double()
    ranks = torch.tensor([item.rank for item in factors])
    owner = torch.repeat_interleave(torch.arange(len(factors)), ranks)
    products = (b.T @ b) * (a @ a.T)
    rows = torch.zeros(len(factors), len(owner), dtype=torch.float64).index_add_(0, owner, products)
    return torch.zeros(len(factors), len(factors), dtype=torch.float64).index_add_(1, owner, rows)


def total_norm(factors: Iterable[Factors]) -> float:
    """Return √Σ ‖τ‖² over the modules of one adapter: the Frobenius norm of its whole weight change.

    >>> total_norm([Factors(torch.eye(1), torch.eye(1), 3.0), Factors(torch.eye(1), torch.eye(1), 4.0)])
    5.0
    """
    return math.sqrt(sum(max(float(gram([item])), 0.0) for item in factors))  # rounding can leave a 0 below 0


def thin_qr(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q [n, k] with orthonormal columns and R [k, c], k = min(n, c), in float64."""
    q, r = torch.linalg.qr(columns.double())
    return q, r


def truncate(item: Factors, rank: int) -> tuple[Factors, float]:
    """Return the best approximation of a weight change at a lower rank, and the Frobenius norm of what it loses.

    Args:
        item: Any factors; their own rank may be larger than either side of the matrix.
        rank: At least 1. At or above the stored rank the factors come back as they are.

    >>> kept, lost = truncate(Factors(torch.eye(2), torch.diag(torch.tensor([3.0, 4.0]))), 1)
    >>> round(lost, 6), kept.delta().round(decimals=6).tolist()
    (3.0, [[0.0, 0.0], [0.0, 4.0]])
    """
    if rank >= item.rank:
        return item, 0.0
    q_b, r_b = thin_qr(item.b * item.scaling)
    q_a, r_a = thin_qr(item.a.T)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    root = s[:rank].sqrt()  # shared evenly: neither factor is much larger than the other
    kept = Factors((root[:, None] * (vh[:rank] @ q_a.T)).float(), ((q_b @ u[:, :rank]) * root).float())
    return kept, float(torch.linalg.vector_norm(s[rank:]))


def factorise(delta: Tensor, rank: int) -> tuple[Factors, float]:
    """Return the best approximation of a full matrix at a rank, and the Frobenius norm of what it loses.

    Eigenvectors of the smaller Gram matrix, in float64, give the singular subspace at the price of two matrix products.
    They are orthonormal to rounding whatever the spectrum, so projecting onto them is exact; only directions below 1e-8
    of the largest singular value could be told apart better by a full SVD.

    Args:
        delta: [out, in] fp32.
        rank: At least 1; capped at min(out, in).
    """
    wide = delta.shape[0] <= delta.shape[1]
    matrix = delta.double() if wide else delta.double().T
    _, vectors = torch.linalg.eigh(matrix @ matrix.T)
    basis = vectors[:, -rank:].flip(1)
    other = basis.T @ matrix
    lost = float(torch.linalg.vector_norm(matrix - basis @ other))
    if wide:
        return Factors(other.float(), basis.float()), lost
    return Factors(basis.T.float().contiguous(), other.T.float().contiguous()), lost
