"""Training few directions made from public text against training all of LoRA: own and merged accuracy at equal ε.

    python benchmarks/low_dimension.py [--quick] [--format json|markdown] [--ablation k,clip,refresh,…]

Five tasks, ε = 1 and 8 by PLD, three seeds; every arm draws records and noise from the same seeds, and meets the ε
with the noise that its own mechanism needs. Own and merged (`average`, and `geometry`, whose coefficient needs no data)
are scored on all public test records. Differences are paired, in percentage points, with 95 % intervals that resample
records. Trained cells and scores are kept below $DPMERGE_BENCHMARK_CACHE: a killed run goes on, and processes with
other --tasks, --arms, --epsilons or --seeds, and --train-only, share the training. `--quick` takes up to ten minutes:
two tasks, ε = 1, one seed, two arms, few records.
"""

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from merge_comparison import Scores, mean_accuracy, paired
from merge_scores import Candidate, ScoreBook, Scorer
from merged_accuracy import PARTS, Examiner
from subspace_step import step_time_over_full
from trained_adapters import BASE, LAYERS, MAX_LENGTH, cache_folder, cell_folder, plan_of, train_cells

from dpmerge.common.config.federation import PartyPlan
from dpmerge.server.merging.adapters.deltas import Adapter, read_adapter

Arm = Mapping[str, Any]
"""Learning rate, clip norm, and what the arm changes of `[lora]` and of `[training]`'s pull and subspace."""

# Tuned at ε = 1 on sms, bbc and mail, with the public texts of news: a dozen settings of the full arm, three or four of
# each other. No party below has any of these tasks. The texts of sms are the related ones here, those of mail
# deliberately unrelated.
REFERENCE, OURS = "full", "public sms"
FULL = {"learning_rate": 1.6e-2, "l2_clip_norm": 0.3}
PUBLIC = {"learning_rate": 0.06, "l2_clip_norm": 0.5, "subspace": {"k": 256, "public": "sms"}}
ARMS: dict[str, Arm] = {
    REFERENCE: FULL,
    "rank 2": {**FULL, "learning_rate": 3.2e-2, "lora": {"rank": 2, "alpha": 4}},
    # Random directions hold a share k/P of a gradient's energy, so the full arm's clip norm shrinks by √(256/55296).
    "random": {"learning_rate": 0.06, "l2_clip_norm": 0.02, "subspace": {"k": 256, "public": "none"}},
    OURS: PUBLIC,
    "public mail": {**PUBLIC, "subspace": {"k": 256, "public": "mail"}},
}


def changed(**subspace: object) -> Arm:
    """Return our arm with some keys of its subspace exchanged."""
    return {**PUBLIC, "subspace": {**PUBLIC["subspace"], **subspace}}


ABLATIONS: dict[str, dict[str, Arm]] = {
    "k": {f"k = {k}": changed(k=k, num_public=max(1000, 2 * k)) for k in (8, 16, 32, 64, 128, 512, 1024)}
    | {"k = auto": changed(k="auto")},
    "clip": {f"clip {c}": {**PUBLIC, "l2_clip_norm": c} for c in (0.1, 0.25, 1.0, 2.0)}
    | {f"clip {origin}": changed(clip=origin) for origin in ("public", "quantile")},
    "refresh": {f"refresh every {steps} steps": changed(refresh_every_steps=steps) for steps in (10, 20)},
    "allocation": {
        "allocation public": changed(allocation="public"),
        "allocation history": changed(allocation="history", refresh_every_steps=10),
    },
    "pull": {"no pull": {**PUBLIC, "alignment": 0.0}},
    "combined": {"all combined": changed(k="auto", clip="quantile", allocation="public", refresh_every_steps=20)},
}
ALL_ARMS = ARMS | {name: arm for group in ABLATIONS.values() for name, arm in group.items()}

TASKS = "trec6,movie,product,editorial,tweet"
MERGED = ("average", "geometry")
QUICK = {"tasks": "trec6,product", "arms": f"{REFERENCE},{OURS}", "epsilons": "1", "seeds": "0", "test": 150}

Condition = tuple[str, float, int]
"""Arm, ε and seed."""


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    tasks = options.tasks.split(",")
    seeds = [int(text) for text in options.seeds.split(",")]
    conditions = [
        (arm, float(epsilon), seed) for seed in seeds for arm in options.arms for epsilon in options.epsilons.split(",")
    ]
    if not options.cached_only:
        train_cells(plan_of_arm(task, *condition) for task in tasks for condition in conditions)
    if options.train_only:
        return
    sizes = {"num_validation": options.test // 2, "num_test": options.test // 2}
    examiner = Examiner(BASE, LAYERS, tasks, max_length=MAX_LENGTH, **sizes)
    scorer = Scorer(ScoreBook(cache_folder() / "low_dimension.jsonl"), examiner)
    adapters = dict(trained(tasks, conditions, examiner.base_sha256))
    scores = {condition: measured(scorer, found, condition) for condition, found in adapters.items()}
    table = rows(scores)
    result = {
        "benchmark": "low_dimension",
        "reduced": options.reduced or len(scores) < len(conditions),
        "figures": figures(table) | {"step_time_over_full": step_time_over_full(PUBLIC["subspace"]["k"])},
        "rows": table,
        "settings": {arm: ALL_ARMS[arm] for arm in options.arms},
        "environment": {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "records": {task: sum(examiner.num_records(task, part) for part in PARTS) for task in tasks},
        },
    }
    if options.format == "json":
        print(json.dumps(result))
    elif options.format == "markdown":
        print(markdown(table))
    else:
        print("\n".join(f"{key:40} {value:.3f}" for key, value in result["figures"].items()))
        if result["reduced"]:
            print("a reduced grid: not the figures of docs/results.md")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two tasks, ε = 1, one seed, two arms, few records")
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ALL_ARMS)}")
    parser.add_argument("--ablation", default="", help=f"further arms, of {', '.join(ABLATIONS)}; use fewer seeds")
    parser.add_argument("--epsilons", default="1,8")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--test", type=int, default=100_000, help="at most so many test records per task")
    parser.add_argument("--train-only", action="store_true", help="train what is missing, and end")
    parser.add_argument("--cached-only", action="store_true", help="leave out what is not fully trained")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    whole = ("tasks", "arms", "epsilons", "seeds", "test")
    options.reduced = any(getattr(options, key) != parser.get_default(key) for key in whole)
    ablations = [name for group in filter(None, options.ablation.split(",")) for name in ABLATIONS[group]]
    options.arms = list(dict.fromkeys(options.arms.split(",") + ablations))
    unknown = set(options.arms) - set(ALL_ARMS)
    if unknown:
        parser.error(f"no such arms: {', '.join(sorted(unknown))}")
    return options


def plan_of_arm(task: str, arm: str, epsilon: float, seed: int) -> PartyPlan:
    """Return the plan of one party's training."""
    settings = ALL_ARMS[arm]
    training = {key: settings[key] for key in ("learning_rate", "alignment", "subspace") if key in settings}
    return plan_of(task, epsilon, seed, training, lora=settings.get("lora"), l2_clip_norm=settings["l2_clip_norm"])


def trained(
    tasks: Sequence[str], conditions: Sequence[Condition], base_sha256: str
) -> Iterator[tuple[Condition, list[Adapter]]]:
    """Yield every condition's adapters, and say which are left out because some are not trained."""
    for condition in conditions:
        folders = [cell_folder(plan_of_arm(task, *condition), base_sha256) / "release" for task in tasks]
        if all(map(Path.exists, folders)):
            yield condition, list(map(read_adapter, folders))
        else:
            print(f"left out, not trained: {condition}", file=sys.stderr)


def measured(scorer: Scorer, adapters: Sequence[Adapter], condition: Condition) -> dict[str, Scores]:
    """Return answers on all test records: of the base model, of every party's own adapter, of the merges."""
    arm, epsilon, seed = condition
    label = {"arm": arm, "epsilon": epsilon, "seed": seed}
    tasks = [adapter.party for adapter in adapters]

    def answers(merged: Sequence[Adapter], tasks: Sequence[str], method: str, name: str, multiplier: float) -> Scores:
        candidate = Candidate(merged, {"method": method, "seed": seed}, {**label, "method": name})
        parts = [scorer.merged(candidate, tasks, part, multiplier) for part in PARTS]
        return {task: np.concatenate([part[task] for part in parts]) for task in tasks}

    scores = {method: answers(adapters, tasks, method, method, 1.0) for method in MERGED}
    scores["own"], scores["base"] = {}, {}
    for adapter in adapters:  # the average of one is itself, and none of it is the base model
        scores["own"] |= answers([adapter], [adapter.party], "average", "own", 1.0)
        scores["base"] |= answers([adapter], [adapter.party], "average", "base", 0.0)
    means = ", ".join(f"{name} {mean_accuracy([each]):.2f}" for name, each in scores.items())
    print(f"{arm}, ε {epsilon:g}, seed {seed}: {means}", file=sys.stderr)
    return scores


def rows(scores: Mapping[Condition, Mapping[str, Scores]]) -> list[dict[str, Any]]:
    """Return one row per arm and ε; arms of an ablation are compared with ours, the others with full LoRA."""
    table = []
    for arm, epsilon in dict.fromkeys((arm, epsilon) for arm, epsilon, _ in scores):
        seeds = [seed for name, budget, seed in scores if (name, budget) == (arm, epsilon)]
        row: dict[str, Any] = {"arm": arm, "epsilon": epsilon, "seeds": seeds}
        row["reference"] = reference = REFERENCE if arm in ARMS else OURS
        shared = [seed for seed in seeds if (reference, epsilon, seed) in scores]
        for kind in ("base", "own", *MERGED):
            mine = [scores[arm, epsilon, seed][kind] for seed in seeds]
            row[kind] = mean_accuracy(mine)
            row[f"{kind}_by_task"] = {
                task: 100 * float(np.mean([each[task].mean() for each in mine])) for task in mine[0]
            }
            if kind != "base" and shared and arm != reference:
                pairs = [(scores[arm, epsilon, seed][kind], scores[reference, epsilon, seed][kind]) for seed in shared]
                gain = paired(*zip(*pairs, strict=True))
                row[f"{kind}_gain"], row[f"{kind}_gain_ci"] = gain.mean, [gain.low, gain.high]
                row[f"{kind}_gain_by_seed"] = list(gain.by_seed)
        table.append(row)
    return table


def figures(table: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what our arm gains over full LoRA, in percentage points."""
    names = {"own": "own", "average": "merged_average", "geometry": "merged_geometry"}
    found: dict[str, float] = {}
    for row in table:
        for kind, name in names.items():
            if row["arm"] == OURS and f"{kind}_gain" in row:
                key = f"{name}_gain_epsilon_{row['epsilon']:g}"
                low, high = row[f"{kind}_gain_ci"]
                found |= {key: row[f"{kind}_gain"], f"{key}_ci_low": low, f"{key}_ci_high": high}
    return found


def markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table per ε."""
    lines = []
    for epsilon in dict.fromkeys(row["epsilon"] for row in table):
        group = [row for row in table if row["epsilon"] == epsilon]
        lines += [f"ε = {epsilon:g}, base {group[0]['base']:.1f}.", ""]
        lines += ["| arm | seeds | own | gain | `average` | gain | `geometry` | gain | over |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for row in group:
            cells = [text for kind in ("own", *MERGED) for text in (f"{row[kind]:.1f}", _gain(row, kind))]
            over = row["reference"] if "own_gain" in row else ""
            seeds = ", ".join(map(str, row["seeds"]))
            lines.append(f"| {row['arm']} | {seeds} | {' | '.join(cells)} | {over} |")
        lines.append("")
    return "\n".join(lines)


def _gain(row: Mapping[str, Any], kind: str) -> str:
    if f"{kind}_gain" not in row:
        return ""
    low, high = row[f"{kind}_gain_ci"]
    return f"{row[f'{kind}_gain']:+.1f} [{low:+.1f}, {high:+.1f}]"


if __name__ == "__main__":
    main()
