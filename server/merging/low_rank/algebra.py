"""Exact arithmetic on low-rank factors: sums, inner products, truncation, and factors of a full matrix.

A sum of T weight changes of rank r lives in at most T·r dimensions on either side. QR of the stacked thin factors gives
orthonormal bases Q_B, Q_A, and with them a core of (T·r)² numbers in which norms, angles and singular values are those
of the full matrices. Where T·r exceeds the smaller side of the matrix, the matrix itself is the smaller form, and takes
the core's place. Cores are float64, full matrices fp32.

Parties are looked at one after the other, and written where the result will be: memory is the result's.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import scipy.linalg
import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import LowRankDelta
from dpmerge.server.merging.low_rank.krylov import is_worthwhile, leading_subspace

BLOCK = 256
"""Ranks, or columns of a full matrix, in one product: few passes over what they are added to, and little memory."""


def weighted_sum(factors: Sequence[LowRankDelta], weights: Sequence[float]) -> LowRankDelta:
    """Return Σ_t weights_t τ_t exactly, in the smallest form that needs no decomposition.

    Parties that share A add their B's under it; different A's are stacked. All parties on one frozen A thus keep their
    rank. Where a stack would have more ranks than the matrix has rows or columns, the matrix itself is added up, beside
    the identity: from then on no further party makes it larger.

    Args:
        factors: One low-rank change per party, of one shape [out, in].
        weights: One number per party.
    """
    out, width = factors[0].shape
    sharing: dict[bytes, list[int]] = {}
    for t, item in enumerate(factors):
        if item.rank:
            sharing.setdefault(item.a_sha256(), []).append(t)
    rank = sum(factors[group[0]].rank for group in sharing.values())
    pieces = ((factors[group[0]].a, _weighted_b(factors, weights, group)) for group in sharing.values())
    if rank <= min(out, width):
        return stack(pieces, out, width, rank)
    return beside_identity(_full_sum(pieces, out, width))


def stack(pieces: Iterable[tuple[Tensor, Tensor]], out: int, width: int, rank: int) -> LowRankDelta:
    """Return Σ b a over pieces (a, b), as the factors that they form side by side, b in fp32.

    Args:
        pieces: a [r, width] and b [out, r]; one at a time is looked at.
        out: Rows of every b.
        width: Columns of every a.
        rank: Sum of all r.
    """
    start, all_a, all_b = 0, torch.empty(rank, width), torch.empty(out, rank)
    for a, b in pieces:
        if start == 0:
            all_a, all_b = a.new_empty(rank, width), b.new_empty(out, rank, dtype=torch.float32)
        all_a[start : start + len(a)] = a
        all_b[:, start : start + len(a)] = b
        start += len(a)
    return LowRankDelta(all_a, all_b)


def scaled(b: Tensor, factor: float) -> Tensor:
    """Return factor · b, rounded once where it goes to fp32: in fp32 if the factor is one, otherwise in float64.

    Args:
        b: Left factor [out, r].
        factor: A number.

    >>> scaled(torch.ones(1), 0.5).dtype, scaled(torch.ones(1), 0.1).dtype
    (torch.float32, torch.float64)
    """
    exact = b.dtype == torch.float32 and torch.tensor(factor, dtype=torch.float32).item() == factor
    return b * factor if exact else b.double() * factor


def beside_identity(matrix: Tensor) -> LowRankDelta:
    """Return a full matrix as factors without a decomposition: its smaller side is the rank."""
    out, width = matrix.shape
    identity = torch.eye(min(out, width), dtype=matrix.dtype, device=matrix.device)
    return LowRankDelta(matrix, identity) if out <= width else LowRankDelta(identity, matrix)


def gram(factors: Sequence[LowRankDelta], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the inner products ⟨τ_t, τ_s⟩ as float64 [T, T].

    ⟨τ_t, τ_s⟩ = s_t s_s Σ (B_tᵀB_s) ∘ (A_tA_sᵀ): products of thin factors only, of a few parties at a time.

    Args:
        factors: One module's, of every party.
        dtype: Of these products. In fp32 they take a third of the time, are off by 1e-7 of ‖τ_t‖ ‖τ_s‖ or so, and
            neither overflow nor vanish if factors have norms of 1e-15 to 1e15. They are summed in float64 all the same.
    """
    device = factors[0].device
    result = torch.zeros(len(factors), len(factors), dtype=torch.float64, device=device)
    blocks = list(_blocks([item.rank for item in factors]))
    for i, rows in enumerate(blocks):
        a, b, owner = _side_by_side(factors[rows], dtype)
        for columns in blocks[: i + 1]:
            other_a, other_b, other = (a, b, owner) if columns == rows else _side_by_side(factors[columns], dtype)
            inner = owner.T @ ((b.T @ other_b).double() * (a @ other_a.T)) @ other
            result[rows, columns], result[columns, rows] = inner, inner.T
    scalings = torch.tensor([item.scaling for item in factors], dtype=torch.float64, device=device)
    return result * torch.outer(scalings, scalings)


def total_norm(factors: Iterable[LowRankDelta]) -> float:
    """Return √Σ ‖τ‖² over the modules of one adapter: the Frobenius norm of its whole weight change.

    >>> total_norm([LowRankDelta(torch.eye(1), torch.eye(1), 3.0), LowRankDelta(torch.eye(1), torch.eye(1), 4.0)])
    5.0
    """
    return math.sqrt(sum(squared_norm(item) for item in factors))


def is_short(item: LowRankDelta) -> bool:
    """Tell whether ‖τ‖ takes little time: of few ranks, or a matrix beside the identity."""
    return item.rank <= 4 * BLOCK or _is_identity(item.a) or _is_identity(item.b)


def thin_qr(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q [n, k] with orthonormal columns and R [k, c], k = min(n, c), in float64."""
    q, r = torch.linalg.qr(columns.double())
    return q, r


def singular_values(item: LowRankDelta) -> Tensor:
    """Return the singular values of τ, largest first, in float64 [rank, or the smaller side of the matrix if less]."""
    _, r_b = thin_qr(item.b * item.scaling)
    _, r_a = thin_qr(item.a.T)
    values: Tensor = torch.linalg.svdvals(r_b @ r_a.T)
    return values


def truncate(item: LowRankDelta, rank: int) -> tuple[LowRankDelta, float]:
    """Return the best approximation of a weight change at a lower rank, and the Frobenius norm of what it loses.

    Args:
        item: Any factors; their own rank may be larger than either side of the matrix.
        rank: At least 1. At or above the stored rank the factors come back as they are.

    >>> kept, lost = truncate(LowRankDelta(torch.eye(2), torch.diag(torch.tensor([3.0, 4.0]))), 1)
    >>> round(lost, 6), kept.delta().round(decimals=6).tolist()
    (3.0, [[0.0, 0.0], [0.0, 4.0]])
    """
    if rank >= item.rank:
        return item, 0.0
    if item.rank >= min(item.shape):
        dtype = torch.promote_types(item.a.dtype, torch.float32)
        return factorise((item.b.to(dtype) * item.scaling) @ item.a.to(dtype), rank)
    q_b, r_b = thin_qr(item.b * item.scaling)
    q_a, r_a = thin_qr(item.a.T)
    core = r_b @ r_a.T
    if not torch.isfinite(core).all():
        raise overflow()
    u, s, vh = torch.linalg.svd(core, full_matrices=False)
    root = s[:rank].sqrt()  # shared evenly: neither factor is much larger than the other
    kept = LowRankDelta((root[:, None] * (vh[:rank] @ q_a.T)).float(), ((q_b @ u[:, :rank]) * root).float())
    return kept, float(torch.linalg.vector_norm(s[rank:]))


def factorise(delta: Tensor, rank: int) -> tuple[LowRankDelta, float]:
    """Return the best approximation of a full matrix at a rank, and the Frobenius norm of what it loses.

    A few directions of a large matrix come from a block Krylov iteration, in a twentieth of the time: best to about
    1e-4 of the norm squared. Otherwise eigenvectors of the smaller Gram matrix, in float64, give the singular subspace
    at the price of two matrix products; only directions below 1e-8 of the largest singular value could be told apart
    better by a full SVD. Either way the columns are orthonormal to rounding, so that projecting onto them is exact, and
    a loss below 1e-8 of the norm is noise. At full rank the matrix comes back as it is, beside the identity.

    Args:
        delta: [out, in]; a few of its columns at a time are held in float64.
        rank: At least 1; capped at min(out, in).
    """
    out, width = delta.shape
    if rank >= min(out, width):
        return beside_identity(delta.float()), 0.0
    matrix = delta if out <= width else delta.T
    energy = _sum_of_squares(matrix)
    if not math.isfinite(energy):
        raise overflow()
    find = leading_subspace if is_worthwhile(len(matrix), rank) else _singular_subspace
    basis = find(matrix, rank)
    other = matrix.new_empty(rank, matrix.shape[1], dtype=torch.float32)
    for strip, kept in zip(torch.split(matrix, BLOCK, 1), torch.split(other, BLOCK, 1), strict=True):
        coordinates = basis.T @ strip.double()
        energy -= float(coordinates.square().sum())
        kept.copy_(coordinates)
    lost = math.sqrt(max(energy, 0.0))
    if out <= width:
        return LowRankDelta(other, basis.float()), lost
    return LowRankDelta(basis.T.float().contiguous(), other.T.contiguous()), lost


def overflow() -> DpmergeError:
    """Return the refusal of a merged change that has numbers beyond fp32."""
    fix = "give a smaller coefficient, smaller weights or layer factors, or a larger density"
    return DpmergeError("DPM-103", "the merged change is too large for fp32", fix)


def _singular_subspace(matrix: Tensor, rank: int) -> Tensor:
    """Return the left singular vectors as columns, largest first, from the products of all rows, in float64."""
    products = torch.zeros(len(matrix), len(matrix), dtype=torch.float64, device=matrix.device)
    for strip in torch.split(matrix, BLOCK, 1):
        products.addmm_(strip.double(), strip.double().T)
    return _leading_eigenvectors(products, rank)


def _leading_eigenvectors(products: Tensor, count: int) -> Tensor:
    """Return the eigenvectors of the largest eigenvalues as columns, largest first; overwrites the matrix.

    LAPACK's `syevr` finds only those asked for, without the workspace of two more matrices that torch's `syevd` takes.
    """
    size = len(products)
    if products.device.type != "cpu":
        every: Tensor = torch.linalg.eigh(products).eigenvectors
        return every[:, -count:].flip(1)
    _, vectors = scipy.linalg.eigh(
        products.numpy().T, overwrite_a=True, check_finite=False, subset_by_index=(size - count, size - 1), driver="evr"
    )
    leading: Tensor = torch.from_numpy(vectors).flip(1)
    return leading


def _weighted_b(factors: Sequence[LowRankDelta], weights: Sequence[float], group: Sequence[int]) -> Tensor:
    first, *rest = ((factors[t], weights[t] * factors[t].scaling) for t in group)
    total = scaled(first[0].b, first[1]) if not rest else first[0].b.double() * first[1]
    for item, weight in rest:
        total += item.b.double() * weight
    return total


def _full_sum(pieces: Iterable[tuple[Tensor, Tensor]], out: int, width: int) -> Tensor:
    total = torch.zeros(out, width)
    held: list[tuple[Tensor, Tensor]] = []
    for piece in pieces:
        if sum(len(a) for a, _ in held) + len(piece[0]) > BLOCK:
            total = _add_product(total, held)
            held = []
        held.append(piece)
    return _add_product(total, held)


def _add_product(total: Tensor, pieces: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    a, b = torch.cat([a for a, _ in pieces]), torch.cat([b.float() for _, b in pieces], 1)
    return total.to(a.device).addmm_(b, a.float())


def squared_norm(item: LowRankDelta, dtype: torch.dtype = torch.float64) -> float:
    """Return ‖τ‖²; of the long stacks that many parties leave, in fp32 by whichever form takes fewer products.

    Args:
        item: Any factors.
        dtype: Of products of short ones; as in `gram`.
    """
    out, width = item.shape
    if item.rank <= BLOCK:
        a, b = item.a.to(dtype), item.b.to(dtype)
        total = float(((b.T @ b).double() * (a @ a.T)).sum())
    else:
        total = _squared_norm_of_stack(item.a.float(), item.b.float(), out, width)
    return max(total, 0.0) * item.scaling**2  # rounding can leave a 0 below 0


def _squared_norm_of_stack(a: Tensor, b: Tensor, out: int, width: int) -> float:
    if _is_identity(a) or _is_identity(b):
        return _sum_of_squares(b if _is_identity(a) else a)
    parts = list(zip(torch.split(a, BLOCK), torch.split(b, BLOCK, 1), strict=True))
    if len(a) * (out + width) > out * width:
        return _sum_of_squares(_full_sum(parts, out, width))
    total = 0.0
    for i, (left_a, left_b) in enumerate(parts):
        for j, (right_a, right_b) in enumerate(parts[: i + 1]):
            products = (left_b.T @ right_b) * (left_a @ right_a.T)
            total += float(products.sum(dtype=torch.float64)) * (1 if i == j else 2)
    return total


def _is_identity(matrix: Tensor) -> bool:
    square = matrix.shape[0] == matrix.shape[1]
    return square and bool((matrix.diagonal() == 1).all()) and int(matrix.count_nonzero()) == len(matrix)


def _sum_of_squares(matrix: Tensor) -> float:
    return sum(float(rows.double().square().sum()) for rows in torch.split(matrix, BLOCK))


def _blocks(ranks: Sequence[int]) -> Iterator[slice]:
    """Yield consecutive parties whose ranks sum to at most `BLOCK`, or one party with more."""
    start, held = 0, 0
    for t, rank in enumerate(ranks):
        if held and held + rank > BLOCK:
            yield slice(start, t)
            start, held = t, 0
        held += rank
    yield slice(start, len(ranks))


def _side_by_side(factors: Sequence[LowRankDelta], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return all a [Σ r, in], all b [out, Σ r] without their scalings, and which party every rank is of, [Σ r, T]."""
    a, b = torch.cat([item.a for item in factors]).to(dtype), torch.cat([item.b for item in factors], 1).to(dtype)
    ranks = torch.tensor([item.rank for item in factors])
    owner = torch.eye(len(factors), dtype=torch.float64).repeat_interleave(ranks, 0)
    return a, b, owner.to(a.device)
