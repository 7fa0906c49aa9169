"""Accuracies on public test data: base model, each party's own model, and the merged model.

Adapters are opened with PEFT from the folders that were released, so what is measured is what anybody else would load.
The encoder is split below them for speed only where the split agrees with the model as PEFT runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor

from dpmerge.common.config.federation import FileSource, TaskSource
from dpmerge.common.data.records import Records, read_records
from dpmerge.common.data.tasks import load_task
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import Base
from dpmerge.common.encoder.heads import logits
from dpmerge.common.encoder.split_check import PUBLIC_TEXTS, checked_split, public_batches
from dpmerge.common.encoder.split_encoder import SplitEncoder, pool
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import Head

EVALUATION_BATCH = 64
NUM_SAMPLED_TEXTS = 1
"""Test records per task on which the split is held against the whole model, beside public sentences."""
MAX_SAMPLED_TASKS = 8

_log = logging.getLogger("flwr")  # Flower's log is the server's


@dataclass(frozen=True)
class Accuracy:
    """A share of correct answers in [0, 1] with the binomial standard error of that share over `num_test` records."""

    value: float
    standard_error: float
    num_test: int

    @classmethod
    def of(cls, num_correct: int, num_test: int) -> Accuracy:
        """Return the accuracy of `num_correct` right answers.

        Args:
            num_correct: Records that were classified rightly.
            num_test: All records, at least 1.

        >>> Accuracy.of(75, 100).standard_error
        0.0433...
        """
        value = num_correct / num_test
        return cls(value, (value * (1 - value) / num_test) ** 0.5, num_test)


@dataclass(frozen=True)
class PublicTask:
    """A party's task as the server may see it.

    Attributes:
        records: Public test records.
        head: The released head, which answers for every adapter.
        base_head: The label-text head, which answers for the base model: a trained head is part of the training.
    """

    records: Records
    head: Head
    base_head: Head


@dataclass(frozen=True)
class TaskScores:
    """One task: the accuracy of the base model, of every party's adapter, and of the merged model."""

    base: Accuracy
    by_adapter: Mapping[str, Accuracy]
    merged: Accuracy


def public_test_records(source: TaskSource | FileSource) -> Records | None:
    """Return the public test records, or None: own data without a public test file is never split for testing.

    Accuracy on a private split would be a query on private data. A party reads no test file: in a deployment the path
    is one at the server, and what it names is the server's own.

    Raises:
        DpmergeError: DPM-203 if the file cannot be read or has no usable record.
    """
    if isinstance(source, TaskSource):
        return load_task(source.task).test
    if source.test is None:
        return None
    records = read_records(source.test, text=source.text, label=source.label, labels=source.labels)
    if not len(records):
        fix = "check text, label and labels, or leave test out"
        raise DpmergeError("DPM-203", f"the public test file {source.test} has no usable record", fix)
    return records


def evaluate(
    base: Base,
    first_layer: int,
    tasks: Mapping[str, PublicTask],
    adapters: Mapping[str, Path],
    merged: Path,
    *,
    max_length: int,
    on_task: Callable[[int], None] = lambda _num_done: None,
) -> dict[str, TaskScores]:
    """Measure every adapter on every task.

    Args:
        base: The base model, freshly loaded; adapters are added to it.
        first_layer: Index of the lowest layer that any adapter changes.
        tasks: Party → its public task.
        adapters: Party → its release folder.
        merged: The merged model's folder.
        max_length: Tokens kept per text.
        on_task: Called with the number of tasks done.

    Returns:
        Party → scores on its task.
    """
    model = PeftModel.from_pretrained(cast(Any, base.encoder), str(merged), adapter_name="merged")
    for party, folder in adapters.items():
        model.load_adapter(str(folder), adapter_name=f"party-{party}")
    model.eval()
    split = _split(base, model, first_layer, [task.records.texts for task in tasks.values()], max_length)
    scores = {}
    for num_done, (party, task) in enumerate(tasks.items(), start=1):
        data = Activations(base, split, task.records.texts, max_length=max_length)
        scores[party] = _scores(model, split, data, task, list(adapters))
        on_task(num_done)
    return scores


def _scores(
    model: PeftModel, split: SplitEncoder, data: Activations, task: PublicTask, parties: Sequence[str]
) -> TaskScores:
    """Measure every party's adapter, the merged one and the base model on one task."""
    labels = torch.tensor(task.records.labels)
    by_adapter = {}
    for name in parties:
        model.set_adapter(f"party-{name}")
        by_adapter[name] = _accuracy(split, data, labels, task.head)
    model.set_adapter("merged")
    of_merged = _accuracy(split, data, labels, task.head)
    with model.disable_adapter():
        of_base = _accuracy(split, data, labels, task.base_head)
    return TaskScores(of_base, by_adapter, of_merged)


def _split(
    base: Base, model: PeftModel, first_layer: int, texts: Sequence[Sequence[str]], max_length: int
) -> SplitEncoder:
    """Split the model where it agrees with itself as PEFT runs it, under every adapter and under none, on a sample."""
    sample = [text for of_task in texts[:MAX_SAMPLED_TASKS] for text in of_task[:NUM_SAMPLED_TEXTS]]
    variants = [partial(_only, model, name) for name in model.peft_config]
    batches = public_batches(base, max_length, [*PUBLIC_TEXTS, *sample])
    model.set_adapter("merged")
    split, note = checked_split(base, model, first_layer, batches, [*variants, model.disable_adapter])
    if note:
        _log.warning("evaluation: %s", note)
    return split


@contextmanager
def _only(model: PeftModel, adapter: str) -> Iterator[None]:
    model.set_adapter(adapter)
    yield


@torch.no_grad()
def _accuracy(split: SplitEncoder, data: Activations, labels: Tensor, head: Head) -> Accuracy:
    num_correct = 0
    for batch in data.batches(torch.arange(len(data)), EVALUATION_BATCH):
        answers = logits(pool(split.top(batch.hidden, batch.mask), batch.mask), head).argmax(-1)[: len(batch.records)]
        num_correct += int((answers == labels[batch.records]).sum())
    return Accuracy.of(num_correct, len(data))
