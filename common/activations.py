"""Records encoded once, up to the first layer that anybody trains.

For a party these activations are its private records in another form (they can be inverted): they live in memory
only, and end with the process. The server uses the same code on public test data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpmerge.common.model import Base
from dpmerge.common.split_encoder import SplitEncoder, pad, padded_length, tokenize

ROWS_UNIT = 12
"""Every batch has a multiple of so many rows, or one. Then matrix products have whole tiles on every processor tried,
and a row's bits do not depend on its place: 12 · 4 = 48 tokens are a multiple of the tiles of SSE, AVX2 and AVX-512.
"""

ENCODE_BATCH = 4 * ROWS_UNIT
"""Rows per forward pass through the trunk, whatever the length and however many records there are."""


@dataclass(frozen=True)
class Batch:
    """Some records at the split, in a shape that depends on their padded length alone.

    Attributes:
        records: Positions in the data set, int64 [m].
        hidden: Hidden states [n, length, width], n ≥ m: the rows after the m-th repeat the first, to fill the shape.
        mask: [n, length].
    """

    records: Tensor
    hidden: Tensor
    mask: Tensor

    @property
    def filled(self) -> Tensor:
        """Return the positions in the data set of all n rows, those that fill the shape included."""
        return fill(self.records, len(self.hidden))


def fill(rows: Tensor, num_rows: int) -> Tensor:
    """Repeat the first of m rows [m, …], m from 1, until there are `num_rows`.

    A repeated record is harmless where zeros might not be: no norm of 0, and a mask of the same kind.

    >>> fill(torch.tensor([3, 5]), 4).tolist()
    [3, 5, 3, 3]
    """
    missing = num_rows - len(rows)
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else rows


def num_rows(length: int, capacity: int) -> int:
    """Return how many rows each batch of one padded length has, in the whole of a training.

    Short records come in larger batches: about as many as an expected number of records has at that length. A
    capacity below `ROWS_UNIT` gives batches of one, in which no record has company.

    Args:
        length: Padded length.
        capacity: Most rows that a batch may have.

    >>> [num_rows(length, 128) for length in (12, 16, 20, 32)], num_rows(32, 4096), num_rows(32, 11)
    ([36, 24, 24, 12], 384, 1)
    """
    if capacity < ROWS_UNIT:
        return 1
    units = max(1, round(capacity / (4 * length)))
    return min(ROWS_UNIT * units, capacity - capacity % ROWS_UNIT)


class Activations:
    """Every record's hidden states at the split, grouped by padded length so that no batch mixes lengths.

    Guarantees: a record's batches have one shape, which depends on that record alone, since its padded length does.
    What is computed for it is then the same to the last bit in any company, as far as the machine's
    matrix products give rows of one shape equal bits at every place; docs/noise.md says where that was measured.
    """

    def __init__(
        self,
        base: Base,
        split: SplitEncoder,
        texts: Sequence[str],
        *,
        max_length: int,
        cached: bool = True,
        on_progress: Callable[[int], None] = lambda _num_done: None,
    ) -> None:
        """Encode the texts.

        Args:
            base: Gives tokenizer and padding token.
            split: The encoder's halves.
            texts: N texts.
            max_length: Tokens kept per text, special tokens included.
            cached: Keep the trunk's output (default). False keeps token ids and runs the trunk again whenever a
                record is drawn, in batches of the same shape, for data sets whose activations do not fit into memory.
            on_progress: Called with the number of records done so far.
        """
        self._split = split
        self._cached = cached
        by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for record, tokens in enumerate(tokenize(base, texts, max_length)):
            by_length[padded_length(len(tokens), max_length)].append((record, tokens))
        self._place = torch.zeros((len(texts), 2), dtype=torch.long)  # record → (group, row)
        self._states: list[Tensor] = []
        self._masks: list[Tensor] = []
        num_done = 0
        for length, members in sorted(by_length.items()):
            ids, mask = pad([row for _, row in members], int(base.tokenizer.pad_token_id), length)
            self._place[[record for record, _ in members]] = torch.tensor(
                [(len(self._states), row) for row in range(len(members))]
            )
            states = ids
            if cached:
                parts = []
                for part in self._encoded(ids, mask):
                    parts.append(part)
                    num_done += len(part)
                    on_progress(num_done)
                states = torch.cat(parts)
            self._states.append(states)
            self._masks.append(mask)

    def _encoded(self, ids: Tensor, mask: Tensor) -> Iterator[Tensor]:
        """Yield the trunk's output [·, length, width] of token ids and mask [m, length], batch by batch."""
        for some_ids, some_mask in zip(torch.split(ids, ENCODE_BATCH), torch.split(mask, ENCODE_BATCH), strict=True):
            hidden = self._split.trunk(fill(some_ids, ENCODE_BATCH), fill(some_mask, ENCODE_BATCH))
            yield hidden[: len(some_ids)]

    def __len__(self) -> int:
        return len(self._place)

    def batches(self, records: Tensor, capacity: int) -> Iterator[Batch]:
        """Split records (positions, int64 [m]) into physical batches of equal padded length, in the length's one shape.

        An empty choice gives no batch.

        Args:
            records: Which, in the order in which records of one length come.
            capacity: Most rows that a batch may have, the same in the whole of a training.
        """
        groups = self._place[records, 0]
        for group in torch.unique(groups).tolist():
            shape = num_rows(self._masks[group].shape[1], capacity)
            for members in torch.split(records[groups == group], max(shape, ENCODE_BATCH) // shape * shape):
                rows = self._place[members, 1]
                states, masks = self._states[group][rows], self._masks[group][rows]
                if not self._cached:
                    states = torch.cat(list(self._encoded(states, masks)))
                pieces = (torch.split(values, shape) for values in (members, states, masks))
                for some, hidden, mask in zip(*pieces, strict=True):
                    yield Batch(some, fill(hidden, shape), fill(mask, shape))
