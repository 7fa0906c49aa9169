"""What a run found: the rows, their uncertainty and the words, stored as `results.json` (schema 1) and `results.csv`.

Accuracies are shares in [0, 1]; a missing one (no public test data, or a failed party) is None in Python, null in JSON
and "–" in print. Means, regressions and units are derived from the rows and written beside them.

>>> movie = PartyResult(
...     party="cinema", task="movie", epsilon=2.0, delta=1e-5, noise_multiplier=1.1, num_train=2800, num_test=700,
...     accuracy=Accuracies(base=0.70, own=0.80, merged=0.78), accuracy_se=Accuracies(base=0.02, own=0.02, merged=0.02),
... )
>>> results = Results(config={}, versions={}, merge={"method": "average"}, seconds={}, parties=(movie,))
>>> round(movie.gap_points, 3), results.mean_accuracy.merged, results.regressions
(2.0, 0.78, ())
"""

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import replace_file
from dpmerge.common.printable import cell, json_text
from dpmerge.common.untrusted.reading import read_file
from dpmerge.server.intake.loudness import loud_warnings

Status = Literal["finished", "failed", "late", "withdrawn"]
"""Released; failed or was refused; silent when the deadline came; released, and then withdrew."""

SCHEMA = 1
RESULTS_FILE = "results.json"
MAX_RESULTS_BYTES = 1 << 28
CSV_FILE = "results.csv"
UNITS = {
    "accuracy": "share of correct answers on the public test records, 0 to 1",
    "accuracy_se": "standard error of the accuracy, same unit",
    "accuracy_by_adapter": "accuracy on this party's task with each party's adapter",
    "mean_accuracy": "mean over the parties that have all three accuracies",
    "mean_accuracy_se": "standard error of that mean over test records; it does not cover training noise",
    "epsilon": "privacy budget of one release, as its accountant claims it; null without privacy",
    "delta": "probability",
    "noise_multiplier": "standard deviation of the noise over the clip norm; null without privacy",
    "num_train": "records",
    "num_dropped": "records that could not be used",
    "num_test": "records",
    "drift": "Frobenius norm of the adapter's weight change",
    "noise_share": "estimated share of noise in the adapter's squared norm, 0 to 1",
    "gap_points": "percentage points, own minus merged",
    "seconds": "seconds of wall clock",
}


@dataclass(frozen=True, kw_only=True)
class Accuracies:
    """One number each for the base model, the party's own model and the merged model."""

    base: float | None = None
    own: float | None = None
    merged: float | None = None

    def complete(self) -> bool:
        """Whether all three are there."""
        return None not in (self.base, self.own, self.merged)


@dataclass(frozen=True, kw_only=True)
class PartyResult:
    """One party's row.

    Args:
        status: All but "finished" need a `reason`, which for "failed" begins with the error's code.
        sentence: The plain ε statement of what was released, which names the party; empty if nothing was.
        num_train: Stays with whoever ran the simulation; a deployed party does not send it.
        num_dropped: Records of its file that could not be used; stays there too.
        dropped: Why, a text per reason with its count and the first such record's place.
        accuracy_by_adapter: Accuracy on this party's task with each party's adapter.
    """

    party: str
    task: str
    status: Status = "finished"
    reason: str | None = None
    private: bool = True
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    num_train: int | None = None
    num_dropped: int | None = None
    dropped: tuple[str, ...] = ()
    num_test: int | None = None
    accuracy: Accuracies = field(default_factory=Accuracies)
    accuracy_se: Accuracies = field(default_factory=Accuracies)
    accuracy_by_adapter: Mapping[str, float] = field(default_factory=dict)
    drift: float | None = None
    noise_share: float | None = None
    sentence: str = ""

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise ValueError(f"Expected status={self.status!r} of {self.party} to be one of {get_args(Status)}.")
        if (self.status == "finished") == bool(self.reason):
            raise ValueError(f"Expected a reason={self.reason!r} of {self.party} exactly unless it finished.")
        for name, value in [*asdict(self.accuracy).items(), *self.accuracy_by_adapter.items()]:
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"Expected accuracy {name}={value} of {self.party} in [0, 1].")

    @property
    def gap_points(self) -> float | None:
        """Own minus merged accuracy, in percentage points."""
        own, merged = self.accuracy.own, self.accuracy.merged
        return None if own is None or merged is None else 100 * (own - merged)

    @property
    def regressed(self) -> bool:
        """Whether merging made the task worse than the base model did, beyond two standard errors of the difference.

        The two errors are added as if independent; both models answer the same records, so this is cautious.
        """
        base, merged = self.accuracy.base, self.accuracy.merged
        if base is None or merged is None:
            return False
        return merged < base - 2 * math.hypot(self.accuracy_se.base or 0.0, self.accuracy_se.merged or 0.0)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Everything that a run reports.

    Args:
        config: `Federation.to_dict()`.
        versions: Package → version.
        merge: At least `method`; whatever the method says about itself beside it. Empty if nothing was merged.
        seconds: Stage → wall-clock seconds.
        parties: One row each, in the order of the federation file.
        reduced: Whether this was a run cut short on purpose (a quick benchmark, a check), not to be quoted.
        not_merged: Why nothing was merged; empty if something was.
    """

    config: Mapping[str, Any]
    versions: Mapping[str, str]
    merge: Mapping[str, Any]
    seconds: Mapping[str, float]
    parties: tuple[PartyResult, ...]
    reduced: bool = False
    not_merged: str = ""

    @property
    def measured(self) -> tuple[PartyResult, ...]:
        """The rows that count in the means: those with all three accuracies, so that like is compared with like."""
        return tuple(party for party in self.parties if party.accuracy.complete())

    @property
    def mean_accuracy(self) -> Accuracies:
        """Means over `measured`."""
        return self._over_measured("accuracy", statistics.fmean)

    @property
    def mean_accuracy_se(self) -> Accuracies:
        """Standard errors of these means, the parties' test records being independent."""
        return self._over_measured("accuracy_se", lambda errors: math.hypot(*errors) / len(errors))

    @property
    def regressions(self) -> tuple[str, ...]:
        """Names of the parties whose task the merged model does worse than the base model."""
        return tuple(party.party for party in self.parties if party.regressed)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each party that uses none, or under half, of its records, or is far louder than the others."""
        unused = (
            f"{party.party}: {party.num_train} of {party.num_train + (party.num_dropped or 0)} records can be used; "
            "check text, label and labels"
            for party in self.parties
            if party.num_train is not None and party.num_train < max(1, party.num_dropped or 0)
        )
        drifts = {party.party: party.drift for party in self.parties if party.drift is not None}
        return (*unused, *loud_warnings(drifts))

    @property
    def absent(self) -> tuple[PartyResult, ...]:
        """The parties without a release that could be merged."""
        return tuple(party for party in self.parties if party.status != "finished")

    @property
    def complete(self) -> bool:
        """Whether there is a merge, and in it every party that did not withdraw."""
        return not self.not_merged and all(party.status == "withdrawn" for party in self.absent)

    def _over_measured(self, name: str, summary: Callable[[list[float]], float]) -> Accuracies:
        rows = [getattr(party, name) for party in self.measured]
        columns = {key: [getattr(row, key) for row in rows] for key in ("base", "own", "merged")}
        return Accuracies(**{key: summary(column) for key, column in columns.items() if column and None not in column})

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of schema 1, derived keys included."""
        return {
            "schema": SCHEMA,
            "reduced": self.reduced,
            "config": dict(self.config),
            "versions": dict(self.versions),
            "merge": dict(self.merge),
            "not_merged": self.not_merged,
            "mean_accuracy": asdict(self.mean_accuracy),
            "mean_accuracy_se": asdict(self.mean_accuracy_se),
            "regressions": list(self.regressions),
            "warnings": list(self.warnings),
            "seconds": dict(self.seconds),
            "parties": [asdict(party) for party in self.parties],
            "units": UNITS,
        }


def results_from_dict(tables: Mapping[str, Any]) -> Results:
    """Read back what `Results.to_dict` wrote.

    Raises:
        ValueError: If the schema is another one, or a key is missing, unknown or refused.
    """
    if tables.get("schema") != SCHEMA:
        raise ValueError(f"Expected schema={tables.get('schema')!r} to be {SCHEMA}.")
    try:
        own = {key.name: tables[key.name] for key in fields(Results) if key.name in tables or key.default is MISSING}
        own["parties"] = tuple(_party(row) for row in tables["parties"])
        return Results(**own)
    except KeyError as missing:
        raise ValueError(f"Expected the key {missing}.") from None
    except (TypeError, AttributeError) as problem:
        raise ValueError(str(problem)) from None


def _party(row: Mapping[str, Any]) -> PartyResult:
    accuracies = {key: Accuracies(**row[key]) for key in ("accuracy", "accuracy_se")}
    return PartyResult(**{**row, **accuracies, "dropped": tuple(row.get("dropped", ()))})


def write_results(folder: Path, results: Results) -> None:
    """Write `results.json` and `results.csv` into an existing folder, each in one step.

    Args:
        folder: The run's folder.
        results: What the run found.

    Raises:
        ValueError: If a number is NaN or infinite, which JSON does not have.
    """
    text = json_text(results.to_dict())
    for name, content in ((RESULTS_FILE, text + "\n"), (CSV_FILE, csv_text(results))):
        replace_file(folder / name, content)


def load_results(folder: Path) -> Results:
    """Read the results of a finished run.

    Raises:
        DpmergeError: DPM-303 if there are none, or not of this schema.
    """
    path = folder / RESULTS_FILE
    try:
        return results_from_dict(json.loads(read_file(path, MAX_RESULTS_BYTES).decode()))
    except DpmergeError as refusal:
        raise DpmergeError("DPM-303", refusal.problem, refusal.fix) from None
    except OSError as problem:
        fix = "give the --out folder of a run that finished"
        raise DpmergeError("DPM-303", f"{path} cannot be read: {problem.strerror}", fix) from None
    except (ValueError, AttributeError, RecursionError) as problem:
        fix = "run `dpmerge simulate` again with this version"
        raise DpmergeError("DPM-303", f"{path} is not a result of schema {SCHEMA}: {problem}", fix) from None


def csv_text(results: Results) -> str:
    """One line per party, numbers in full, nested accuracies as `accuracy_base` and so on."""
    rows = [_flat(party) for party in results.parties]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]) if rows else ["party"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _flat(party: PartyResult) -> dict[str, object]:
    row = asdict(party)
    del row["accuracy_by_adapter"], row["dropped"], row["sentence"]
    nested = {f"{name}_{key}": value for name in ("accuracy", "accuracy_se") for key, value in row.pop(name).items()}
    row |= nested | {"gap_points": party.gap_points, "regressed": party.regressed}
    return {key: cell(value) for key, value in row.items()}
