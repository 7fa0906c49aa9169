"""What a merge is worth on public validation data, and the coefficient on the sum chosen by it. Never on private data.

The server cannot tell public records from private ones: whoever names the files declares them public. So nothing here
happens unless files are named, and what was named is recorded by hash.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpmerge.common.data.records import Records, read_records
from dpmerge.common.encoder.base_model import Base
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import Head, to_files, write_files
from dpmerge.server.evaluation.evaluate import PublicTask, evaluate
from dpmerge.server.merging.adapters.deltas import Adapter
from dpmerge.server.merging.merge import Merged, as_release

STEPS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
DEFAULT_MAX_LENGTH = 32  # tokens, as in a federation file, where no statement says another number


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What was measured, and which coefficient it was chosen by.

    Attributes:
        coefficient: The best mean accuracy's, the smallest of several equal ones.
        mean_accuracy: Its mean over the parties with a file, in [0, 1].
        accuracy: Party → accuracy of the merged model with that coefficient.
        own: Party → accuracy of its own adapter on the same records, where there is one.
        grid: (coefficient, mean accuracy) of all that was tried; one alone if there was nothing to choose.
        files: Party → SHA-256 of its file and the number of records used.
    """

    coefficient: float
    mean_accuracy: float
    accuracy: Mapping[str, float]
    own: Mapping[str, float]
    grid: tuple[tuple[float, float], ...]
    files: Mapping[str, Mapping[str, str | int]]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"grid": [list(pair) for pair in self.grid]}


def grid(num_adapters: int) -> tuple[float, ...]:
    """Return the coefficients that are tried: the average's 1/T and fixed steps up to the plain sum.

    >>> grid(2)
    (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
    """
    return tuple(sorted({*STEPS, 1 / num_adapters}))


def choose_coefficient(
    base: Base,
    adapters: Mapping[Path, Adapter],
    tasks: Mapping[str, PublicTask],
    files: Mapping[str, Path],
    coefficients: Sequence[float],
    merged_at: Callable[[float], Merged],
) -> Validation:
    """Measure the merge at every coefficient and keep the one of the best mean accuracy.

    Args:
        base: The base model, freshly loaded; adapters are added to it.
        adapters: Folder → adapter, of what is merged; the heads answer for the merged model.
        tasks: Party → what to measure on; see `public_tasks`.
        files: Party → the file that its records came from, for the account.
        coefficients: What to try, in ascending order; see `grid`.
        merged_at: Coefficient → merge.
    """
    inputs = list(adapters.values())
    with tempfile.TemporaryDirectory() as scratch:
        folders = {f"grid-{index}": Path(scratch) / str(index) for index in range(len(coefficients))}
        for folder, coefficient in zip(folders.values(), coefficients, strict=True):
            write_files(folder, to_files(as_release(merged_at(coefficient), inputs)))
        own = {adapter.party: folder for folder, adapter in adapters.items() if adapter.party in tasks}
        everything = folders | {f"own-{party}": folder for party, folder in own.items()}
        first, length = first_layer(base, inputs), max_length(inputs)
        scores = evaluate(base, first, tasks, everything, folders["grid-0"], max_length=length)
    by_grid = [{party: scores[party].by_adapter[name].value for party in tasks} for name in folders]
    means = [statistics.fmean(row.values()) for row in by_grid]
    best = means.index(max(means))
    return Validation(
        coefficient=coefficients[best],
        mean_accuracy=means[best],
        accuracy=by_grid[best],
        own={party: scores[party].by_adapter[f"own-{party}"].value for party in own},
        grid=tuple(zip(coefficients, means, strict=True)),
        files={party: _about(path, tasks[party].records) for party, path in files.items()},
    )


def public_tasks(adapters: Sequence[Adapter], files: Mapping[str, Path]) -> dict[str, PublicTask]:
    """Read public files against the heads that came with the adapters.

    Args:
        adapters: What is merged.
        files: Party → a public file with the columns `text` and `label`.

    Raises:
        DpmergeError: DPM-103 for a party without a head; DPM-203 for a file that cannot be read or used.
    """
    heads = {party: head for adapter in adapters for party, head in adapter.heads.items()}
    return {
        party: PublicTask(_records(party, path, heads), heads[party], heads[party]) for party, path in files.items()
    }


def check_base(base: Base, adapters: Sequence[Adapter]) -> None:
    """Refuse a base model that is not the one that the statements name by hash.

    Args:
        base: The opened base model.
        adapters: Those that are merged; a hash that a statement gives must be the base model's.

    Raises:
        DpmergeError: DPM-204.
    """
    for adapter in adapters:
        if adapter.base_sha256 not in (None, base.sha256):
            problem = f"base model {base.name} is not the one of {adapter.party}: its SHA-256 is {base.sha256[:12]}…"
            raise DpmergeError("DPM-204", problem, "give --base the model that the adapters were trained on")


def _records(party: str, path: Path, heads: Mapping[str, Head]) -> Records:
    if party not in heads:
        fix = f"name one of {', '.join(sorted(heads))}" if heads else "validation needs releases: they bring heads"
        raise DpmergeError("DPM-103", f"--validate {party}={path}: no release has a head of {party}", fix)
    records = read_records(path, text="text", label="label", labels=dict.fromkeys(heads[party].labels, ""))
    if not len(records):
        fix = f"give texts in the column text, and in label one of {', '.join(heads[party].labels)}"
        raise DpmergeError("DPM-203", f"the validation file {path} of {party} has no usable record", fix)
    return records


def _about(path: Path, records: Records) -> dict[str, str | int]:
    return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "num_records": len(records)}


def first_layer(base: Base, adapters: Sequence[Adapter]) -> int:
    """Return the lowest layer that any adapter changes, 0 if one changes something outside the layers.

    Args:
        base: The base model.
        adapters: Those that are merged.
    """
    names = {name for adapter in adapters for name in adapter.modules}
    inside = [name.removeprefix(f"{base.layers}.").partition(".")[0] for name in names]
    return min((int(index) if index.isdigit() else 0 for index in inside), default=0)


def max_length(adapters: Sequence[Adapter]) -> int:
    """Return the longest `max_length` that a statement names: what the parties trained with."""
    settings = [adapter.statement.get("training") for adapter in adapters]
    lengths = [item.get("max_length") for item in settings if isinstance(item, Mapping)]
    return max((length for length in lengths if type(length) is int), default=DEFAULT_MAX_LENGTH)
