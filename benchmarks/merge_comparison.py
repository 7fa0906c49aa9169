"""What a comparison of merge methods comes to: means, paired differences with intervals, the figures, a table.

Accuracies and differences are in percent, means over tasks and then seeds. Two methods are compared on the same records
and the same adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from merged_accuracy import Answers

NUM_RESAMPLES = 10_000
DENOISED = " + denoise"
OURS = "geometry"
REFERENCE = "average"

Scores = dict[str, Answers]
"""Task → answers on its test records."""


@dataclass(frozen=True)
class Cell:
    """One merge problem: a set of tasks, and the ε and seed of their adapters."""

    tasks: tuple[str, ...]
    epsilon: float | None
    seed: int


@dataclass
class Outcome:
    """What was measured, per cell: base and own, and per variant the data-free and the best multiple's scores."""

    base: dict[Cell, Scores] = field(default_factory=dict)
    own: dict[Cell, Scores] = field(default_factory=dict)
    merged: dict[Cell, dict[str, Scores]] = field(default_factory=dict)
    best: dict[Cell, dict[str, Scores]] = field(default_factory=dict)
    multiple: dict[Cell, dict[str, float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A paired difference of two accuracies in percent, with its 95 % interval and the difference of every seed."""

    mean: float
    low: float
    high: float
    by_seed: tuple[float, ...]


def accuracy(scores: Scores) -> float:
    """Return the mean over tasks of the accuracy in percent."""
    return 100 * float(np.mean([right.mean() for right in scores.values()]))


def mean_accuracy(scores: Sequence[Scores]) -> float:
    """Return the mean over seeds."""
    return float(np.mean([accuracy(each) for each in scores]))


def paired(ours: Sequence[Scores], theirs: Sequence[Scores]) -> Difference:
    """Compare two methods record by record, over seeds.

    The seeds' adapters answer the same records, so a record is drawn for all seeds at once, within its task. Seeds are
    not resampled: the interval tells what other test records would give, not other trainings.
    """
    rng = np.random.default_rng(0)
    resampled = np.zeros(NUM_RESAMPLES)
    for task in ours[0]:
        difference = np.mean([a[task].astype(float) - b[task] for a, b in zip(ours, theirs, strict=True)], axis=0)
        values, counts = np.unique(difference, return_counts=True)
        drawn = rng.multinomial(len(difference), counts / len(difference), NUM_RESAMPLES)
        resampled += drawn @ values / len(difference) / len(ours[0])
    by_seed = tuple(accuracy(a) - accuracy(b) for a, b in zip(ours, theirs, strict=True))
    low, high = 100 * np.percentile(resampled, (2.5, 97.5))
    return Difference(float(np.mean(by_seed)), float(low), float(high), by_seed)


@dataclass(frozen=True)
class Problem:
    """The cells of one set of tasks at one ε, over seeds."""

    tasks: tuple[str, ...]
    epsilon: float | None
    cells: tuple[Cell, ...]

    def scores(self, kept: Mapping[Cell, Mapping[str, Scores]], method: str) -> list[Scores]:
        """Return a method's scores of every seed."""
        return [kept[cell][method] for cell in self.cells]


def problems_of(outcome: Outcome) -> list[Problem]:
    """Group the cells over their seeds, in the order of measuring."""
    grouped: dict[tuple[tuple[str, ...], float | None], list[Cell]] = {}
    for cell in outcome.merged:
        grouped.setdefault((cell.tasks, cell.epsilon), []).append(cell)
    return [Problem(tasks, epsilon, tuple(cells)) for (tasks, epsilon), cells in grouped.items()]


def best_peer(problem: Problem, outcome: Outcome) -> str:
    """Return the best method without our parts, by the very test scores it is compared on, which favours it."""
    peers = [name for name in outcome.merged[problem.cells[0]] if name != OURS and not name.endswith(DENOISED)]
    return max(peers, key=lambda name: mean_accuracy(problem.scores(outcome.merged, name)))


def figures(outcome: Outcome) -> dict[str, float]:
    """Return `geometry` against the best data-free peer at ε = 1, and against `average` without privacy."""
    problems = problems_of(outcome)
    most = max((len(problem.tasks) for problem in problems), default=0)
    found: dict[str, float] = {}
    for problem in problems:
        methods = outcome.merged[problem.cells[0]]
        suffix = "" if len(problem.tasks) == most else "_demo"
        if OURS not in methods:
            continue
        if problem.epsilon == 1 and len(methods) > 1:
            found |= _figure(problem, outcome, best_peer(problem, outcome), f"geometry_minus_best_peer{suffix}")
        if problem.epsilon is None and REFERENCE in methods:
            found |= _figure(problem, outcome, REFERENCE, f"geometry_minus_average_nonprivate{suffix}")
    return found


def _figure(problem: Problem, outcome: Outcome, other: str, name: str) -> dict[str, float]:
    difference = paired(problem.scores(outcome.merged, OURS), problem.scores(outcome.merged, other))
    return {name: difference.mean, f"{name}_ci_low": difference.low, f"{name}_ci_high": difference.high}


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return one row per set of tasks, ε and method; a denoised method is also compared with itself."""
    return [
        _row(problem, outcome, method)
        for problem in problems_of(outcome)
        for method in outcome.merged[problem.cells[0]]
    ]


def _row(problem: Problem, outcome: Outcome, method: str) -> dict[str, Any]:
    scores = problem.scores(outcome.merged, method)
    row: dict[str, Any] = {
        "tasks": list(problem.tasks),
        "epsilon": problem.epsilon,
        "seeds": [cell.seed for cell in problem.cells],
        "method": method,
        "base": mean_accuracy([outcome.base[cell] for cell in problem.cells]),
        "own": mean_accuracy([outcome.own[cell] for cell in problem.cells]),
        "merged": mean_accuracy(scores),
        "best_peer": method == best_peer(problem, outcome),
        "by_task": {task: 100 * float(np.mean([each[task].mean() for each in scores])) for task in problem.tasks},
    }
    plain = method.removesuffix(DENOISED)
    for key, other in (("minus_average", REFERENCE), ("minus_plain", plain)):
        if other != method and other in outcome.merged[problem.cells[0]]:
            difference = paired(scores, problem.scores(outcome.merged, other))
            row |= {key: difference.mean, f"{key}_ci": [difference.low, difference.high]}
            row[f"{key}_by_seed"] = list(difference.by_seed)
    if all(method in outcome.best.get(cell, {}) for cell in problem.cells):
        row["upper_bound"] = mean_accuracy(problem.scores(outcome.best, method))
        row["multiples"] = [outcome.multiple[cell][method] for cell in problem.cells]
    return row


def markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table per set of tasks and ε: plain beside denoised."""
    parts: dict[tuple[int, Any], list[Mapping[str, Any]]] = {}
    for row in table:
        parts.setdefault((len(row["tasks"]), row["epsilon"]), []).append(row)
    lines = []
    for (num_tasks, epsilon), group in parts.items():
        privacy = "no privacy" if epsilon is None else f"ε = {epsilon:g}"
        base, own = group[0]["base"], group[0]["own"]
        seeds = ", ".join(map(str, group[0]["seeds"]))
        lines += [f"{num_tasks} tasks, {privacy}, seeds {seeds}: base {base:.1f}, own {own:.1f}.", ""]
        lines += ["| method | merged | minus `average` | best multiple | denoised | minus plain | best multiple |"]
        lines += ["|---|---|---|---|---|---|---|"]
        by_method = {row["method"]: row for row in group}
        for name, row in by_method.items():
            if not name.endswith(DENOISED):
                denoised = by_method.get(name + DENOISED, {})
                cells = [*_cells(row, "minus_average"), *_cells(denoised, "minus_plain")]
                lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cells(row: Mapping[str, Any], key: str) -> list[str]:
    merged = f"{row['merged']:.1f}" if row else ""
    difference = f"{row[key]:+.1f} [{row[key + '_ci'][0]:+.1f}, {row[key + '_ci'][1]:+.1f}]" if key in row else ""
    multiples = ", ".join(f"{multiple:g}" for multiple in row.get("multiples", ()))
    return [merged, difference, f"{row['upper_bound']:.1f} (×{multiples})" if multiples else ""]
