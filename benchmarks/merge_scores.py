"""Scores of merges, kept one JSON line each, so that a killed run goes on and nothing is examined twice.

Two kinds of line. A *merge* line says which weights a recipe gave: its key hashes the adapters, the parameters and the
merging package's own source, so after a change of the source every recipe is merged again. A *score* line holds the
answers of one set of weights: its key hashes the weights themselves, so what the change left alone is not examined
again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from merged_accuracy import Answers, Examiner

import dpmerge.server.merging.merge as merging
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.spec.spec import spec_of

BASE_MODEL = "base"  # in place of a hash of weights


class ScoreBook:
    """A file of JSON lines, each found by its `key`; processes may append to one file at the same time."""

    def __init__(self, path: Path) -> None:
        """Open a file, or begin one. A line that a killed process left unfinished counts for nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._rows: dict[str, dict[str, Any]] = {}
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.write(self._file, b"\n")
        for line in content.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            self._rows[row["key"]] = row

    def row(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the row of `key`; make and append it if there is none."""
        if key not in self._rows:
            row = {"key": key, **make()}
            os.write(self._file, json.dumps(row, ensure_ascii=False).encode() + b"\n")  # one call: lines do not mix
            self._rows[key] = row
        return self._rows[key]


class Candidate:
    """Weights to examine: one recipe on one set of adapters, merged only when a score of it is unknown."""

    def __init__(self, adapters: Sequence[Adapter], options: Mapping[str, Any], label: Mapping[str, Any]) -> None:
        """Describe a merge.

        Args:
            adapters: What is merged.
            options: Keywords of `merge`.
            label: JSON values that tell a reader of the file what a line is about.
        """
        self._adapters, self._options, self.label = adapters, options, label
        self._modules: dict[str, LowRankDelta] | None = None

    @property
    def modules(self) -> Mapping[str, LowRankDelta]:
        """The merged factors."""
        if self._modules is None:
            self._modules = dict(merging.merge(self._adapters, spec_of(**self._options)).modules)
        return self._modules

    def sha256(self, book: ScoreBook) -> str:
        """Return the hash of the merged weights, from the book if the same recipe was merged before."""
        hashes = sorted((adapter.party, adapter.sha256) for adapter in self._adapters)
        key = hash_of(["merge", hashes, self._options, SOURCE])

        def make() -> dict[str, Any]:
            return {"kind": "merge", **self.label, "options": self._options, "weights": weights_hash(self.modules)}

        return str(book.row(key, make)["weights"])


class Scorer:
    """Answers from the book, or from an examiner and then in the book."""

    def __init__(self, book: ScoreBook, examiner: Examiner) -> None:
        """Use a book and an examiner."""
        self._book, self._examiner = book, examiner
        self.num_records = 0
        self.seconds = 0.0

    @property
    def seconds_per_1000(self) -> float:
        """Processor seconds per 1000 records examined, 0 before the first."""
        return 1000 * self.seconds / self.num_records if self.num_records else 0.0

    def base(self, task: str) -> Answers:
        """Return the answers of the base model on test records."""
        return self._answers(BASE_MODEL, lambda: {}, [task], "test", 1.0, {"method": "base"})[task]

    def own(self, adapter: Adapter, label: Mapping[str, Any]) -> Answers:
        """Return the answers of a party's own adapter on its own task's test records."""
        weights = f"adapter {adapter.sha256}"
        task = adapter.party
        return self._answers(weights, lambda: adapter.modules, [task], "test", 1.0, {**label, "method": "own"})[task]

    def merged(
        self, candidate: Candidate, tasks: Sequence[str], part: str, multiplier: float = 1.0
    ) -> dict[str, Answers]:
        """Return the answers of a merge whose weights are multiplied, on every task."""
        weights = candidate.sha256(self._book)
        return self._answers(weights, lambda: candidate.modules, tasks, part, multiplier, candidate.label)

    def _answers(
        self,
        weights: str,
        modules: Callable[[], Mapping[str, LowRankDelta]],
        tasks: Sequence[str],
        part: str,
        multiplier: float,
        label: Mapping[str, Any],
    ) -> dict[str, Answers]:
        records = {task: self._examiner.sha256(task, part) for task in tasks}

        def make() -> dict[str, Any]:
            changes = modules()
            started = time.process_time()
            answers = {task: self._examiner.answers(task, part, changes, multiplier) for task in tasks}
            self.seconds += time.process_time() - started
            self.num_records += sum(map(len, answers.values()))
            packed = {task: [len(right), np.packbits(right).tobytes().hex()] for task, right in answers.items()}
            return {"kind": "score", **label, "part": part, "multiplier": multiplier, "correct": packed}

        correct = self._book.row(hash_of(["score", weights, records, part, multiplier]), make)["correct"]
        return {task: unpack(*correct[task]) for task in tasks}


def unpack(num_records: int, packed: str) -> Answers:
    """Turn hexadecimal bits back into answers.

    >>> unpack(3, "a0").tolist()
    [True, False, True]
    """
    bits = np.frombuffer(bytes.fromhex(packed), np.uint8)
    return np.unpackbits(bits, count=num_records).astype(bool)


def hash_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def weights_hash(modules: Mapping[str, LowRankDelta]) -> str:
    """Return the SHA-256 of factors, bytes and names."""
    digest = hashlib.sha256()
    for name, factors in sorted(modules.items()):
        digest.update(f"{name}|{factors.scaling}|{tuple(factors.b.shape)}|{tuple(factors.a.shape)}".encode())
        for tensor in (factors.b, factors.a):
            digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(merging.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCE = _source_hash()
"""Hash of the merging package's source, as it was when this process imported it."""
