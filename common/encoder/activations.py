"""Records encoded once, up to the first layer that anybody trains.

For a party these activations are its private records in another form (they can be inverted): they live in memory
only, and end with the process. The server uses the same code on public test data.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpmerge.common.encoder.base_model import Base
from dpmerge.common.encoder.split_encoder import SplitEncoder, pad, padded_length, tokenize

TILE_TOKENS = 48
"""A batch has a multiple of so many tokens, or one record. Matrix products then consist of whole tiles of SSE, AVX2 and
AVX-512, and on every processor tried a row's bits depend neither on its place nor on how many rows there are.
"""

LEAST_TOKENS, LEAST_TOKENS_OF_THREADS, MOST_TOKENS = 96, 240, 768
"""Of a batch with several records: smaller products take other routines, more so where threads share them. The upper
bound keeps the sizes few enough to try them all when a training begins (`row_bits.py`).
"""

ENCODE_BATCH = TILE_TOKENS
"""Rows per forward pass through the trunk, whatever the length and however many records there are."""


@dataclass(frozen=True)
class Batch:
    """Some records at the split, filled up to an allowed shape.

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


@dataclass(frozen=True)
class Shapes:
    """How many rows the batches of one padded length may have, in the whole of a training.

    Attributes:
        unit: The fewest records that have a multiple of `TILE_TOKENS` tokens together.
        least: Fewest rows of a batch; a multiple of the unit, or 1.
        most: Most rows; a multiple of the unit, or 1, and then no record has company.
    """

    unit: int
    least: int
    most: int

    def rows_for(self, num_records: int) -> int:
        """Return how many rows a batch of 1 to `most` records has: the next allowed number."""
        return max(self.least, -(-num_records // self.unit) * self.unit)


def shapes_of(length: int, capacity: int, *, is_fixed: bool = False) -> Shapes:
    """Return the shapes of batches of one padded length.

    Args:
        length: Padded length.
        capacity: Most rows that a batch may have.
        is_fixed: Allow one shape only, where a row's bits depend on how many rows there are.

    >>> shapes_of(12, 128).most, shapes_of(32, 128), shapes_of(32, 128, is_fixed=True).least, shapes_of(32, 2).most
    (64, Shapes(unit=3, least=3, most=24), 24, 1)
    """
    unit = TILE_TOKENS // math.gcd(TILE_TOKENS, length)
    wanted = LEAST_TOKENS if torch.get_num_threads() == 1 else LEAST_TOKENS_OF_THREADS
    least = unit * -(-wanted // (unit * length))
    most = min(capacity, MOST_TOKENS // length) // unit * unit
    if most < least:
        return Shapes(1, 1, 1)
    return Shapes(unit, most if is_fixed else least, most)


class Activations:
    """Every record's hidden states at the split, grouped by padded length so that no batch mixes lengths.

    Guarantees: a record's padded length depends on that record alone, and its batches have shapes in which, as far as
    was measured, a row's bits depend neither on its place nor on how many rows there are (docs/noise.md). What is
    computed for a record is then the same to the last bit in any company.
    """

    def __init__(
        self,
        base: Base,
        split: SplitEncoder,
        texts: Sequence[str],
        *,
        max_length: int,
        cached: bool = True,
        is_fixed: bool = False,
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
            is_fixed: Give all batches of one length one shape, for machines on which rows depend on their number.
            on_progress: Called with the number of records done so far.
        """
        self._split = split
        self._cached, self._is_fixed = cached, is_fixed
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
        """Split records (positions, int64 [m]) into physical batches of equal padded length, in shapes of that length.

        An empty choice gives no batch.

        Args:
            records: Which, in the order in which records of one length come.
            capacity: Most rows that a batch may have, the same in the whole of a training.
        """
        groups = self._place[records, 0]
        for group in torch.unique(groups).tolist():
            shapes = shapes_of(self._masks[group].shape[1], capacity, is_fixed=self._is_fixed)
            for members in torch.split(
                records[groups == group], max(shapes.most, ENCODE_BATCH) // shapes.most * shapes.most
            ):
                rows = self._place[members, 1]
                states, masks = self._states[group][rows], self._masks[group][rows]
                if not self._cached:
                    states = torch.cat(list(self._encoded(states, masks)))
                pieces = (torch.split(values, shapes.most) for values in (members, states, masks))
                for some, hidden, mask in zip(*pieces, strict=True):
                    num_rows = shapes.rows_for(len(some))
                    yield Batch(some, fill(hidden, num_rows), fill(mask, num_rows))
