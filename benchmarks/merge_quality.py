"""Which merge method keeps most of what private adapters learned: every core method on the same trained adapters.

    python benchmarks/merge_quality.py [--quick] [--format json|markdown]

Per ε and seed the tasks' adapters (trained once, see trained_adapters.py) are merged by every method, with and without
`denoise`, all of them and the demo's five alone. Each merge is scored at its data-free default and, as an upper bound,
at the best multiple of that coefficient, chosen by mean accuracy on one half of the public test records; all scores are
of the other half. Accuracies and differences are in percent, means over tasks and seeds; intervals (95 %) resample
records. Scores are kept in merge_quality.jsonl beside the adapters: a killed run goes on, and processes with different
--seeds may share the file. `--quick` takes about five minutes: three tasks, one seed, no ε = 8, few records.
"""

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from merge_comparison import DENOISED, Cell, Outcome, Scores, accuracy, figures, markdown, rows
from merge_scores import Candidate, ScoreBook, Scorer
from merged_accuracy import PARTS, Examiner
from trained_adapters import BASE, LAYERS, MAX_LENGTH, cache_folder, cell_folder, grid, plan_of, train_cells

from dpmerge.common.config.federation import PartyPlan
from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import Adapter, read_adapter

TASKS = "trec6,movie,product,editorial,tweet,news,bbc,mail"
DEMO = ("trec6", "movie", "product", "editorial", "tweet")
MULTIPLES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
QUICK = {"tasks": "trec6,product,tweet", "epsilons": "1,none", "seeds": "0", "validation": 50, "test": 150}
QUICK_MULTIPLES = (0.5, 1.0, 2.0)

FULL = 384  # the base model's width: element-wise methods lose nothing to a rank, as they were published
METHODS: dict[str, dict[str, Any]] = {
    "average": {"method": "average"},
    "task-arithmetic 0.3": {"method": "task-arithmetic", "coefficient": 0.3},
    "task-arithmetic 0.5": {"method": "task-arithmetic", "coefficient": 0.5},
    "ties": {"method": "ties", "rank": FULL},
    "dare": {"method": "dare", "rank": FULL},
    "dare-ties": {"method": "dare-ties", "rank": FULL},
    "knots-ties": {"method": "knots-ties"},
    "ties in core space": {"method": "ties", "core": True},
    "tsv": {"method": "tsv"},
    "iso-c": {"method": "iso-c"},
    "iso-cts": {"method": "iso-cts"},
    "wudi": {"method": "wudi"},
    "geometry": {"method": "geometry"},
}


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    tasks = options.tasks.split(",")
    sizes = {"num_validation": options.validation, "num_test": options.test}
    examiner = Examiner(BASE, LAYERS, tasks, max_length=MAX_LENGTH, **sizes)
    scorer = Scorer(ScoreBook(cache_folder() / "merge_quality.jsonl"), examiner)
    problems = load_cells(options, tasks, examiner.base_sha256)
    outcome = measure(scorer, problems, chosen_variants(options), chosen_multiples(options))
    result = {
        "benchmark": "merge_quality",
        "reduced": options.reduced,
        "figures": figures(outcome),
        "rows": rows(outcome),
        "refused": outcome.refused,
        "environment": {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "num_threads": options.threads,
            "records": {task: {part: examiner.num_records(task, part) for part in PARTS} for task in tasks},
            "records_examined": scorer.num_records,
            "seconds_per_1000_records": scorer.seconds_per_1000,
        },
    }
    if options.format == "json":
        print(json.dumps(result))
    elif options.format == "markdown":
        print(markdown(result["rows"]))
    else:
        for key, value in result["figures"].items():
            print(f"{key:40} {value:.2f}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three tasks, ε = 1 and no privacy, one seed, few records")
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--epsilons", default="1,8,none")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS), help="rows of METHODS")
    parser.add_argument("--validation", type=int, default=200, help="records per task to choose coefficients by")
    parser.add_argument("--test", type=int, default=300, help="records per task to report on")
    parser.add_argument("--no-denoise", dest="denoise", action="store_false", help="leave denoised variants out")
    parser.add_argument("--no-upper-bound", dest="upper_bound", action="store_false", help="data-free defaults only")
    parser.add_argument("--cached-only", action="store_true", help="leave out cells that are not fully trained")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    whole = ("tasks", "epsilons", "seeds", "methods", "validation", "test", "denoise", "upper_bound")
    options.reduced = any(getattr(options, key) != parser.get_default(key) for key in whole)
    return options


def load_cells(options: argparse.Namespace, tasks: list[str], base_sha256: str) -> dict[Cell, list[Adapter]]:
    """Train what is missing, and return every merge problem with its adapters."""
    epsilons = [None if text == "none" else float(text) for text in options.epsilons.split(",")]
    seeds = [int(text) for text in options.seeds.split(",")]
    check_noise(grid(tasks, epsilons, seeds))
    if not options.cached_only:
        train_cells(grid(tasks, epsilons, seeds))
    sets = [tuple(tasks)] + ([DEMO] if set(DEMO) < set(tasks) else [])
    problems = {}
    for epsilon in epsilons:
        for seed in seeds:
            folders = {task: cell_folder(plan_of(task, epsilon, seed), base_sha256) / "release" for task in tasks}
            missing = [task for task, folder in folders.items() if not folder.exists()]
            for names in sets:
                if set(names) & set(missing):
                    print(f"left out: ε {epsilon}, seed {seed}: {', '.join(missing)} not trained", file=sys.stderr)
                    options.reduced = True
                else:
                    problems[Cell(names, epsilon, seed)] = [read_adapter(folders[name]) for name in names]
    return problems


def check_noise(plans: Sequence[PartyPlan]) -> None:
    """Refuse parties that draw the same noise: their adapters would be nearly parallel, and no merge could average it.

    Raises:
        ValueError: Two tasks' plans have one noise seed.
    """
    drawn: dict[tuple[float | None, int, int | None], str] = {}
    for plan in plans:
        if plan.privacy.private:
            other = drawn.setdefault((plan.privacy.epsilon, plan.seed, plan.privacy.noise_seed), plan.party)
            if other != plan.party:
                raise ValueError(
                    f"Expected noise_seed={plan.privacy.noise_seed} in the plans of {other} or {plan.party}, not both."
                )


def chosen_variants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    variants = {name: METHODS[name] for name in options.methods.split(",")}
    if options.denoise:
        variants |= {name + DENOISED: {**settings, "denoise": True} for name, settings in variants.items()}
    return variants


def chosen_multiples(options: argparse.Namespace) -> tuple[float, ...]:
    if not options.upper_bound:
        return ()
    return QUICK_MULTIPLES if options.quick else MULTIPLES


def measure(
    scorer: Scorer,
    problems: Mapping[Cell, list[Adapter]],
    variants: Mapping[str, Mapping[str, Any]],
    multiples: Sequence[float],
) -> Outcome:
    """Score everything: all data-free defaults first, because the upper bounds take most of the time."""
    outcome = Outcome()
    for cell, adapters in problems.items():
        label = {"epsilon": cell.epsilon, "seed": cell.seed}
        outcome.base[cell] = {task: scorer.base(task) for task in cell.tasks}
        outcome.own[cell] = {adapter.party: scorer.own(adapter, label) for adapter in adapters}
    for name, cell, candidate in candidates(problems, variants):
        try:
            scores = scorer.merged(candidate, cell.tasks, "test")
        except DpmergeError as refusal:
            outcome.refused[name] = refusal.problem
            continue
        outcome.merged.setdefault(cell, {})[name] = scores
        log(cell, name, scores, scorer)
    for name, cell, candidate in candidates(problems, variants):
        if name in outcome.refused or not multiples:
            continue
        validation = {m: accuracy(scorer.merged(candidate, cell.tasks, "validation", m)) for m in multiples}
        best = max(multiples, key=lambda m: (validation[m], -abs(np.log(m))))  # of equals the nearest to the default
        scores = scorer.merged(candidate, cell.tasks, "test", best)
        outcome.best.setdefault(cell, {})[name] = scores
        outcome.multiple.setdefault(cell, {})[name] = best
        log(cell, f"{name} ×{best}", scores, scorer)
    return outcome


def candidates(
    problems: Mapping[Cell, list[Adapter]], variants: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Cell, Candidate]]:
    for cell, adapters in problems.items():
        for name, settings in variants.items():
            label = {"tasks": len(cell.tasks), "epsilon": cell.epsilon, "seed": cell.seed, "method": name}
            yield name, cell, Candidate(adapters, {**settings, "seed": cell.seed}, label)


def log(cell: Cell, name: str, scores: Scores, scorer: Scorer) -> None:
    where = f"{len(cell.tasks)} tasks, ε {cell.epsilon}, seed {cell.seed}"
    print(
        f"{where}: {name}: {accuracy(scores):.2f} ({scorer.seconds_per_1000:.2f} s per 1000 records)", file=sys.stderr
    )


if __name__ == "__main__":
    main()
