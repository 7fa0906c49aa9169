"""From records to units of privacy: where a unit is a user, one row per user, whatever the number of its records.

>>> users = Users([0, 1, 0, 0])
>>> gradients = torch.tensor([[1.0], [5.0], [2.0], [6.0]])
>>> [rows.tolist() for rows in users.rows(torch.tensor([0, 1]), 2, lambda records: [(records, gradients[records])])]
[[[3.0], [5.0]]]
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

RecordRows = Callable[[Tensor], Iterable[tuple[Tensor, Tensor]]]
"""Maps records (positions, int64 [m]) to physical batches of them: positions [n] and per-example gradients [n, P]."""


class Users:
    """Whose records a party's records are; how many a user has is private and never leaves.

    Guarantees:
        A user's row is a function of θ and of that user's records alone, so that a clipped sum of rows changes by at
        most the clip norm when a user comes or goes. Its records are added up before anything is clipped, in the order
        of the data, whatever physical batches they fall into. A record whose gradient is not finite spoils its own
        user's row only, which the privatiser then leaves out.

    Args:
        user_of_record: For each of the N records its user, numbered from 0 without gaps.
    """

    def __init__(self, user_of_record: Sequence[int]) -> None:
        self._user_of_record = torch.tensor(user_of_record, dtype=torch.long)
        self._num_records = torch.bincount(self._user_of_record)

    def __len__(self) -> int:
        return len(self._num_records)

    def rows(self, sample: Tensor, capacity: int, record_rows: RecordRows) -> Iterator[Tensor]:
        """Yield the mean gradients of the sampled users, [n, P] with n ≤ `capacity` at a time.

        Args:
            sample: Users, ascending and distinct, int64 [m]; m may be 0.
            capacity: Users whose rows are held at once, beside the rows of one physical batch of records.
            record_rows: Gives the per-example gradients of records.
        """
        for users in torch.split(sample, capacity):
            records = torch.isin(self._user_of_record, users).nonzero().squeeze(1)
            sums: Tensor | None = None
            for positions, rows in record_rows(records):
                if sums is None:
                    sums = rows.new_zeros(len(users), rows.shape[1])
                # index_add, not a product with a 0/1 matrix: 0·inf would carry one user's overflow to all others
                sums.index_add_(0, torch.searchsorted(users, self._user_of_record[positions]), rows)
                del rows  # before the next batch's are computed
            if sums is not None:
                yield sums.div_(self._num_records[users].unsqueeze(1))
