"""Answers of merged models on public test records: the top layers alone, with merged weights set in place.

Opening every merge with PEFT costs more than the answers do. Here the base model is loaded once, every record is
encoded once up to the first adapted layer, and a merge is the weights W + multiplier · τ of the layers above.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmerge.common.data.records import Records
from dpmerge.common.data.tasks import TASKS, load_task
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import adapted_layers, load_base
from dpmerge.common.encoder.heads import label_text_head, logits
from dpmerge.common.encoder.split_encoder import SplitEncoder, pool
from dpmerge.common.release.format import Head
from dpmerge.server.merging.adapters.deltas import LowRankDelta

BATCH = 64  # of 16 to 128, the fastest on a small CPU
PARTS = ("validation", "test")

Answers = NDArray[np.bool_]
"""Per record, whether the answer is right."""


@dataclass(frozen=True)
class Part:
    """Public records of one task, encoded, with the task's frozen head."""

    data: Activations
    labels: Tensor
    head: Head
    sha256: str


class Examiner:
    """Examines changes of one base model on halves of the tasks' test records."""

    def __init__(
        self, base: str, layers: str, tasks: Sequence[str], *, max_length: int, num_validation: int, num_test: int
    ) -> None:
        """Encode the records of `tasks`.

        Args:
            base: Alias of the base model.
            layers: The layers that any adapter changes, as in `lora.layers`.
            tasks: Names of public tasks.
            max_length: Tokens kept per text.
            num_validation: At most so many records of the first half of a task's test records.
            num_test: At most so many of the second half.
        """
        loaded = load_base(base)
        self.base_sha256 = loaded.sha256
        self._encoder = loaded.encoder
        self._split = SplitEncoder(loaded.encoder, loaded.layers, adapted_layers(loaded, layers)[0])
        self._parts: dict[tuple[str, str], Part] = {}
        for task in tasks:
            head = label_text_head(loaded, TASKS[task].labels)
            for part, records in halves(load_task(task).test, num_validation, num_test).items():
                data = Activations(loaded, self._split, records.texts, max_length=max_length)
                words = f"{records.texts}{records.labels}{TASKS[task].labels}{max_length}{loaded.sha256}"
                sha256 = hashlib.sha256(words.encode()).hexdigest()
                self._parts[task, part] = Part(data, torch.tensor(records.labels), head, sha256)

    def sha256(self, task: str, part: str) -> str:
        """Return the hash of all that an answer depends on beside the merged weights."""
        return self._parts[task, part].sha256

    def num_records(self, task: str, part: str) -> int:
        """Return the number of records of a part."""
        return len(self._parts[task, part].labels)

    @torch.no_grad()
    def answers(self, task: str, part: str, modules: Mapping[str, LowRankDelta], multiplier: float = 1.0) -> Answers:
        """Tell which records the base model with `multiplier` · τ added answers rightly.

        Args:
            task: One of the tasks.
            part: "validation" or "test".
            modules: τ per module of the encoder; none for the base model itself.
            multiplier: Factor on τ.
        """
        chosen = self._parts[task, part]
        right = torch.zeros(len(chosen.labels), dtype=torch.bool)
        with changed(self._encoder, modules, multiplier):
            for batch in chosen.data.batches(torch.arange(len(right)), BATCH):
                features = pool(self._split.top(batch.hidden, batch.mask), batch.mask)[: len(batch.records)]
                right[batch.records] = logits(features, chosen.head).argmax(-1) == chosen.labels[batch.records]
        return right.numpy()


def halves(records: Records, num_validation: int, num_test: int) -> dict[str, Records]:
    """Split test records into a first half to choose by and a second half to report on, the first so many of each.

    >>> parts = halves(Records(("a", "b", "c", "d", "e"), (0, 1, 0, 1, 1)), 1, 9)
    >>> parts["validation"].texts, parts["test"].texts
    (('a',), ('c', 'd', 'e'))
    """
    middle = len(records) // 2
    places = zip(PARTS, (slice(0, min(middle, num_validation)), slice(middle, middle + num_test)), strict=True)
    return {part: Records(records.texts[place], records.labels[place]) for part, place in places}


@contextmanager
def changed(encoder: nn.Module, modules: Mapping[str, LowRankDelta], multiplier: float) -> Iterator[None]:
    """Exchange weights W for W + multiplier · τ, and put the very same tensors back at the end."""
    linears = {name: encoder.get_submodule(name) for name in modules}
    kept = {name: linear.weight.data for name, linear in linears.items()}
    try:
        for name, linear in linears.items():
            linear.weight.data = kept[name] + multiplier * modules[name].delta()
        yield
    finally:
        for name, linear in linears.items():
            linear.weight.data = kept[name]
