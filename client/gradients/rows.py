"""Gathers every example's gradient while a backward pass produces it, parameter by parameter.

The result has one row per example, over all P trainable coordinates: norms are then one reduction, the clipped sum one
matrix-vector product. It is laid out at the end of the pass and not before. The pieces come into being while the pass
frees its activations, so the peak of a step's memory hardly rises; a [n, P] buffer that waited through the forward pass
would add all of itself to it. Either way each number is copied once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one trainable parameter lies in the flat vector θ.

    Attributes:
        name: The parameter's dotted name in the module.
        shape: Its shape.
        start: Its first coordinate in θ.
        stop: One past its last.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class GradientRows:
    """Per-example gradients in the making; contributions to one slot add up.

    Args:
        width: P, the number of trainable coordinates.
        dtype: fp32, or fp64 for tests against oracles; contributions in bf16 are widened before they are multiplied.
        device: Where the parameters live.

    >>> rows = GradientRows(2, torch.float32, torch.device("cpu"))
    >>> weight = Slot("weight", (1, 2), 0, 2)
    >>> rows.open(2)
    >>> rows.add_product(weight, torch.tensor([[1.0], [10.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> rows.close([weight])
    tensor([[ 1.,  2.],
            [30., 40.]])
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width, self._dtype, self._device = width, dtype, device
        self._num_examples = 0
        self._pieces: dict[Slot, Tensor] = {}

    def open(self, num_examples: int) -> None:
        """Make ready for a pass over `num_examples` examples; what an earlier pass left is dropped."""
        self._num_examples = num_examples
        self._pieces.clear()

    def add_product(self, slot: Slot, left: Tensor, right: Tensor) -> None:
        """Add left[n]ᵀ·right[n], summed over the positions in between, to the slot of every row n.

        Args:
            slot: A parameter of shape [a, b].
            left: [n, …, a].
            right: [n, …, b].

        Raises:
            DpmergeError: DPM-502 if the first dimension is not the examples'.
        """
        self._check_examples(slot, left)
        left, right = (t.to(self._dtype).reshape(t.shape[0], -1, t.shape[-1]) for t in (left, right))
        if left.shape[2] > right.shape[2]:
            # The narrow factor first: the same product transposed, three times faster on a CPU's BLAS.
            self.add(slot, torch.bmm(right.mT, left).mT)
        else:
            self.add(slot, torch.bmm(left.mT, right))

    def add_sum(self, slot: Slot, values: Tensor) -> None:
        """Add values [n, …, a], summed over the positions in between, to the slot (shape [a]) of every row n.

        Raises:
            DpmergeError: DPM-502 if the first dimension is not the examples'.
        """
        self._check_examples(slot, values)
        self.add(slot, values.to(self._dtype).reshape(values.shape[0], -1, values.shape[-1]).sum(1))

    def add(self, slot: Slot, values: Tensor) -> None:
        """Add values [n, *slot.shape], which must not be used elsewhere, to the slot of every row.

        Raises:
            DpmergeError: DPM-502 if the first dimension is not the examples'.
        """
        self._check_examples(slot, values)
        if slot in self._pieces:
            self._pieces[slot].add_(values)
        else:
            self._pieces[slot] = values

    def close(self, layout: Iterable[Slot]) -> Tensor:
        """Return the rows [n, P], zero in the slots that nothing was added to, and let go of the pieces one by one."""
        rows = torch.empty(self._num_examples, self._width, dtype=self._dtype, device=self._device)
        for slot in layout:
            target = rows[:, slot.start : slot.stop].view(-1, *slot.shape)
            piece = self._pieces.pop(slot, None)
            if piece is None:
                target.zero_()
            else:
                target.copy_(piece)
        return rows

    def _check_examples(self, slot: Slot, values: Tensor) -> None:
        fewest_dims = 2 if slot.shape else 1
        if values.dim() < fewest_dims or values.shape[0] != self._num_examples:
            raise DpmergeError(
                "DPM-502",
                f"{slot.name} sees a tensor whose first dimension is not the batch's examples, so that its gradient "
                "cannot be told apart by example",
                "freeze it, or give its module an input per example (for positions, position_ids of the batch's shape)",
            )
