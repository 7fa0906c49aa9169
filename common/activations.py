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

ENCODE_BATCH = 64
"""Records per forward pass through the trunk."""


@dataclass(frozen=True)
class Batch:
    """Some records at the split: positions in the data set [n], hidden states [n, length, width], mask [n, length]."""

    records: Tensor
    hidden: Tensor
    mask: Tensor


class Activations:
    """Every record's hidden states at the split, grouped by padded length so that no batch mixes lengths.

    Guarantees: what is stored for a record depends on that record alone, since its padded length does.
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
                record is drawn: the same numbers, for data sets whose activations do not fit into memory.
            on_progress: Called with the number of records done so far.
        """
        self._split = split
        self._cached = cached
        by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for record, tokens in enumerate(tokenize(base, texts, max_length)):
            by_length[padded_length(len(tokens))].append((record, tokens))
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
                for chunk in torch.split(torch.arange(len(members)), ENCODE_BATCH):
                    parts.append(split.trunk(ids[chunk], mask[chunk]))
                    num_done += len(chunk)
                    on_progress(num_done)
                states = torch.cat(parts)
            self._states.append(states)
            self._masks.append(mask)

    def __len__(self) -> int:
        return len(self._place)

    def batches(self, records: Tensor, capacity: int) -> Iterator[Batch]:
        """Split records (positions, int64 [m]) into physical batches of at most `capacity`, of equal padded length.

        An empty choice gives no batch.
        """
        groups = self._place[records, 0]
        for group in torch.unique(groups).tolist():
            for members in torch.split(records[groups == group], capacity):
                rows = self._place[members, 1]
                states, mask = self._states[group][rows], self._masks[group][rows]
                yield Batch(members, states if self._cached else self._split.trunk(states, mask), mask)
