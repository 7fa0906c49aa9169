"""The one buffer into which a backward pass writes every example's gradient.

Row n of the buffer is example n's gradient over all P trainable coordinates. Norms are then one reduction, the
clipped sum one matrix-vector product, and nobody keeps a list of tensors per parameter.
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
    """A reusable [n, P] buffer; contributions to a slot add up until the next `open`.

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
        self._width = width
        self._buffer = torch.empty(0, width, dtype=dtype, device=device)
        self._rows = self._buffer
        self._written: set[Slot] = set()

    def open(self, num_examples: int) -> None:
        """Make ready for `num_examples` rows; what the buffer held before is void."""
        if num_examples > self._buffer.shape[0]:
            self._rows = self._buffer = self._buffer.new_empty(
                0, self._width
            )  # the old memory goes before the new comes
            self._buffer = self._buffer.new_empty(num_examples, self._width)
        self._rows = self._buffer[:num_examples]
        self._written.clear()

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
        left, right = (t.to(self._rows.dtype).reshape(t.shape[0], -1, t.shape[-1]) for t in (left, right))
        if left.shape[2] > right.shape[2]:
            # The narrow factor first: the same product transposed, three times faster on a CPU's BLAS, and one copy
            # either way.
            self.add(slot, torch.bmm(right.mT, left).mT)
        else:
            self.add(slot, torch.bmm(left.mT, right))

    def add_sum(self, slot: Slot, values: Tensor) -> None:
        """Add values [n, …, a], summed over the positions in between, to the slot (shape [a]) of every row n.

        Raises:
            DpmergeError: DPM-502 if the first dimension is not the examples'.
        """
        self._check_examples(slot, values)
        self.add(slot, values.to(self._rows.dtype).reshape(values.shape[0], -1, values.shape[-1]).sum(1))

    def add(self, slot: Slot, values: Tensor) -> None:
        """Add values [n, *slot.shape] to the slot of every row.

        Raises:
            DpmergeError: DPM-502 if the first dimension is not the examples'.
        """
        self._check_examples(slot, values)
        target = self._rows[:, slot.start : slot.stop].view(-1, *slot.shape)
        if slot in self._written:
            target.add_(values)
        else:
            target.copy_(values)
            self._written.add(slot)

    def close(self, layout: Iterable[Slot]) -> Tensor:
        """Zero the slots that nothing was added to, and return the rows [n, P], valid until the next `open`."""
        for slot in layout:
            if slot not in self._written:
                self._rows[:, slot.start : slot.stop].zero_()
        return self._rows

    def _check_examples(self, slot: Slot, values: Tensor) -> None:
        if values.dim() < 2 or values.shape[0] != self._rows.shape[0]:
            raise DpmergeError(
                "DPM-502",
                f"{slot.name} sees a tensor of shape {list(values.shape)} where the batch has {self._rows.shape[0]} "
                "examples, so its gradient cannot be told apart by example",
                "freeze it, or give its module an input per example (for positions, position_ids of the batch's shape)",
            )
