"""Whether this machine's matrix products give a row the same bits whatever other rows there are.

A record's gradient must not depend on the records that share its batch. The only operations in which it could, to the
last bits, are matrix products over all tokens of a batch: they choose their routine by the number of rows. Batches have
few sizes (`activations.py`), and all of them are tried here, with the model's own widths, when a training begins.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from dpmerge.common.encoder.activations import LEAST_TOKENS, LEAST_TOKENS_OF_THREADS, MOST_TOKENS, TILE_TOKENS

FEWEST_OUTPUTS = 4
"""Products with fewer columns take other routines, in which a row's last bits depend on its place."""


def widths_of(module: nn.Module) -> frozenset[tuple[int, int]]:
    """Return (width_out, width_in) of the module's linear layers, LoRA's included.

    LoRA's narrowest products are widened (`client/gradients/fused_linear.py`), and stand here as they are computed.
    """
    weights = (m.weight for m in module.modules() if isinstance(m, nn.Linear))
    return frozenset((max(FEWEST_OUTPUTS, w.shape[0]), max(FEWEST_OUTPUTS, w.shape[1])) for w in weights)


@lru_cache(maxsize=8)
def rows_are_alike(widths: frozenset[tuple[int, int]], num_threads: int) -> bool:
    """Try every size of a batch: x Wᵀ and, as the backward pass has it, g W.

    Args:
        widths: From `widths_of`.
        num_threads: Torch's; a result holds for these only.

    Returns:
        Whether every row had the same bits in all sizes, at its own place and at another one.
    """
    least = LEAST_TOKENS if num_threads == 1 else LEAST_TOKENS_OF_THREADS
    generator = torch.Generator().manual_seed(0)
    for width_out, width_in in sorted(widths):
        weight = torch.randn(width_out, width_in, generator=generator)
        for matrix in (weight.t(), weight):
            rows = torch.randn(MOST_TOKENS, len(matrix), generator=generator)
            whole = rows @ matrix
            for size in range(least, MOST_TOKENS + 1, TILE_TOKENS):
                turned = rows[:size].roll(7, 0) @ matrix
                if not (
                    torch.equal(rows[:size] @ matrix, whole[:size]) and torch.equal(turned.roll(-7, 0), whole[:size])
                ):
                    return False
    return True
