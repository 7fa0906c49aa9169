"""The leading singular subspace of a large matrix, in a few products with thin blocks.

A block Krylov iteration: from a random block, alternate products with M and Mᵀ, keep every block, and take the best
directions of all of them together. It needs no gap in the spectrum, where a power iteration would.

References: arXiv 1504.05477, algorithm 2. Deviations: products in fp32, orthogonality in float64; it stops when another
block would add less than `ENOUGH` of what is held, not after a number of rounds.
"""

import torch
from torch import Tensor

LARGE = 1024
"""Below this many rows, all eigenvectors take less than half a second."""
MAX_BLOCKS = 16
ENOUGH = 1e-5

_OVERSAMPLING = 8
_ROUNDING = 1e-6  # of a product in fp32: directions that are shorter than this share are its errors


def is_worthwhile(num_rows: int, rank: int) -> bool:
    """Tell whether blocks are so thin that all of them together are well below the number of rows.

    >>> is_worthwhile(4096, 32), is_worthwhile(4096, 512), is_worthwhile(384, 8)
    (True, False, False)
    """
    return num_rows > LARGE and MAX_BLOCKS * (rank + _OVERSAMPLING) <= num_rows


def leading_subspace(matrix: Tensor, rank: int) -> Tensor:
    """Return orthonormal columns that span nearly the best left singular subspace, largest first.

    Args:
        matrix: M [rows, columns], rows ≤ columns, finite.
        rank: Directions wanted, as `is_worthwhile` allows.

    Returns:
        Q [rows, rank], float64; where M has a lower rank, it ends in zeros. The best Q would hold a share of at most
        1e-4 of ‖M‖² more, on spectra that were tried, flat ones among them. The same M gives the same Q: the start is
        seeded.
    """
    matrix = matrix.float()
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(matrix.shape[1], rank + _OVERSAMPLING, generator=generator, device="cpu").to(matrix.device)
    basis, rows = matrix.new_empty(len(matrix), 0, dtype=torch.float64), matrix.new_empty(0, matrix.shape[1])
    vectors, held = basis.new_empty(0, 0), 0.0
    for _ in range(MAX_BLOCKS):
        block = _new_directions(matrix @ start, basis)
        if not block.shape[1]:
            break
        basis = torch.cat([basis, block], 1)
        rows = torch.cat([rows, block.float().T @ matrix])
        wide = rows.double()
        values, vectors = torch.linalg.eigh(wide @ wide.T)
        before, held = held, float(values[-rank:].sum())
        if held - before <= ENOUGH * held:
            break
        start = rows[-block.shape[1] :].T
        start = start / start.abs().max()  # the product is M's square otherwise, which could leave fp32's range
    leading = basis @ vectors[:, -rank:].flip(1)
    return torch.nn.functional.pad(leading, (0, rank - leading.shape[1]))


def _new_directions(product: Tensor, basis: Tensor) -> Tensor:
    """Return orthonormal columns for what a block adds to a basis, without what is rounding."""
    columns = product.double()
    size = torch.linalg.vector_norm(columns)
    for _ in range(2):
        columns = columns - basis @ (basis.T @ columns)
    left, values, _ = torch.linalg.svd(columns, full_matrices=False)
    kept: Tensor = left[:, values > _ROUNDING * size]
    return kept
