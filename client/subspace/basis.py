"""An orthonormal basis of few directions in the trained space: principal ones of public gradients, or random ones.

Nothing of size P x P is ever formed. With n gradients of P coordinates the right singular vectors come from the n x n
Gram matrix, in float64, block of columns by block of columns.

>>> svd = StreamingSvd(num_coordinates=3, k=2)
>>> svd.add(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 2.0]]))
>>> svd.add(torch.tensor([[3.0, 0.0, 0.0]]))
>>> basis = svd.finish()
>>> basis.rows + 0.0
tensor([[1., 0., 0.],
        [0., 0., 1.]])
>>> [round(energy, 4) for energy in basis.energies.tolist()]
[6.0, 1.3333]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError

DEFAULT_MEMORY_BUDGET_BYTES = 2**30
RANK_TOLERANCE = 1e-6
"""Singular values below this share of the largest are rounding of fp32 gradients."""
_BLOCK = 8192  # columns that are widened to float64 at once


@dataclass(frozen=True, eq=False)
class Basis:
    """k orthonormal directions in θ's space, and how the public gradients lie along them.

    Attributes:
        rows: Q [k, P] fp32, Q Qᵀ = 1 to 1e-6; each row's largest entry is positive.
        coordinates: Q g_j of every public gradient [n, k] float64; without rows for a random basis.
    """

    rows: Tensor
    coordinates: Tensor

    def first(self, k: int) -> Basis:
        """Return the first k directions, which are the principal ones of fewer."""
        return Basis(self.rows[:k].clone(), self.coordinates[:, :k].clone())

    @property
    def energies(self) -> Tensor:
        """Mean square of the public gradients along each direction [k] float64, descending; nan for a random basis."""
        return self.coordinates.square().mean(0)

    @property
    def sha256(self) -> str:
        """Hash of the directions' bytes."""
        return hashlib.sha256(self.rows.contiguous().cpu().numpy().data).hexdigest()


class StreamingSvd:
    """Top right singular vectors of a matrix [n, P] that arrives in chunks of rows.

    Args:
        num_coordinates: P.
        k: Directions wanted.
        memory_budget_bytes: Upper limit on the rows that are kept; at least twice k of them are.

    Guarantees:
        Exact, to the rounding of float64, while all rows fit into the budget. Beyond it the rows seen so far are
        replaced by their own top directions, as many as fill half of the budget, before more are taken in.

    References:
        Sequential Karhunen-Loève transform, Levy & Lindenbaum 2000, for what exceeds the budget.

    Deviations:
        None.
    """

    def __init__(self, num_coordinates: int, k: int, memory_budget_bytes: int = DEFAULT_MEMORY_BUDGET_BYTES) -> None:
        if k < 1:
            raise ValueError(f"Expected k={k} to be at least 1.")
        self._k = k
        self._max_rows = max(2 * k, memory_budget_bytes // (4 * num_coordinates))
        self._rows = torch.empty(0, num_coordinates)
        self._chunks: list[Tensor] = []
        self._mix = torch.empty(0, 0, dtype=torch.float64)  # what was seen [n, P] is mix @ what is kept

    def add(self, rows: Tensor) -> None:
        """Take in the next rows [m, P] fp32, which must not be changed afterwards.

        Raises:
            DpmergeError: DPM-505 if one is not finite.
        """
        if not rows.isfinite().all():
            raise DpmergeError(
                "DPM-505",
                "a public gradient is not finite, so no directions can be taken from it",
                "look for damaged texts in the public data, or choose others",
            )
        if len(self._mix.T) + len(rows) > self._max_rows:
            self._compress()
        self._chunks.append(rows)
        one_more = torch.eye(len(rows), dtype=torch.float64)
        self._mix = torch.block_diag(self._mix, one_more)  # type: ignore[no-untyped-call]  # torch left it untyped

    def finish(self) -> Basis:
        """Return the basis.

        Raises:
            DpmergeError: DPM-505 if the rows seen span fewer than k directions.
        """
        rows = self._gather()
        left, singular = _left_singular(rows)
        rank = int((singular > RANK_TOLERANCE * singular[:1]).sum()) if len(singular) else 0
        if rank < self._k:
            raise DpmergeError(
                "DPM-505",
                f"subspace.k = {self._k} directions are asked of {len(self._mix)} public gradients that span {rank}",
                f"choose a k of at most {rank}, or give more public texts" if rank else "give other public texts",
            )
        left, singular = left[:, : self._k], singular[: self._k]
        raw = _combine(left / singular, rows)
        directions = cholesky_qr(raw)
        signs = (raw * directions).sum(1).sign().double().cpu()
        return Basis(directions, self._mix @ (left * singular * signs))

    def _gather(self) -> Tensor:
        if self._chunks:
            self._rows = torch.cat([self._rows.to(self._chunks[0].device), *self._chunks])
            self._chunks.clear()
        return self._rows

    def _compress(self) -> None:
        rows = self._gather()
        left = _left_singular(rows)[0][:, : max(self._k, self._max_rows // 2)]
        self._rows = _combine(left, rows)
        self._mix = self._mix @ left


def random_basis(num_coordinates: int, k: int, seed: str) -> Basis:
    """Return k random orthonormal directions from a public seed: the same wherever the same torch runs.

    Raises:
        DpmergeError: DPM-505 if k exceeds the number of coordinates.

    >>> random_basis(5, 2, "7").rows.shape
    torch.Size([2, 5])
    """
    if k > num_coordinates:
        raise DpmergeError(
            "DPM-505",
            f"subspace.k = {k} exceeds the {num_coordinates} trainable coordinates",
            f"choose a k below {num_coordinates}, or train without a subspace",
        )
    generator = torch.Generator().manual_seed(public_seed(seed))
    rows = cholesky_qr(torch.randn(k, num_coordinates, generator=generator))
    return Basis(rows, torch.empty(0, k, dtype=torch.float64))


def public_seed(text: str) -> int:
    """Return a generator's seed that a text names; for public randomness only."""
    return int.from_bytes(hashlib.sha256(f"dpmerge subspace|{text}".encode()).digest()[:8], "little") >> 1


def cholesky_qr(rows: Tensor) -> Tensor:
    """Orthonormalise nearly orthogonal rows [k, P] in their order (Cholesky QR, float64), largest entries positive."""
    factor = torch.linalg.cholesky(_gram(rows))
    result = torch.empty_like(rows)
    for block in _blocks(rows):
        result[:, block] = torch.linalg.solve_triangular(factor, rows[:, block].double(), upper=False).float()
    largest = result.gather(1, result.abs().argmax(1, keepdim=True))
    return result * largest.sign()


def _left_singular(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return left singular vectors [n, n] and singular values [n], descending, both float64 on the CPU."""
    values, vectors = torch.linalg.eigh(_gram(rows).cpu())
    return vectors.flip(1), values.flip(0).clamp_min(0.0).sqrt()


def _gram(rows: Tensor) -> Tensor:
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for block in _blocks(rows):
        part = rows[:, block].double()
        gram.addmm_(part, part.T)
    return gram


def _combine(weights: Tensor, rows: Tensor) -> Tensor:
    """Return weightsᵀ @ rows in fp32, computed in float64: weights [n, m], rows [n, P] → [m, P]."""
    weights = weights.to(rows.device)
    result = torch.empty(weights.shape[1], rows.shape[1], device=rows.device)
    for block in _blocks(rows):
        result[:, block] = (weights.T @ rows[:, block].double()).float()
    return result


def _blocks(rows: Tensor) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, rows.shape[1], _BLOCK))
