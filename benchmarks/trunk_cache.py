"""What it saves to run the frozen layers once per record, and that the release stays the same to the byte.

    python benchmarks/trunk_cache.py [--quick] [--format json]

One real party (trec6 on minilm-l6, LoRA on the last two of six layers, 40 steps of 128 expected records, as in the
demo) trains with the trunk cache and without, in turns, one thread, processor seconds; each counts its fastest turn.
A run is everything from reading the records to writing the release: encoding the cache *is* included, loading the
model and accounting (the same for both) are not. `speedup` is uncached over cached seconds; `step_speedup` leaves
the encoding aside, which is the limit for long trainings. `releases_equal` is 1 if all files of all runs are equal.
`--quick` takes one turn of 30 steps, over which the encoding weighs more.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from dpmerge.client.party.calibration import make_mechanism
from dpmerge.client.party.party import run_party
from dpmerge.common.config.federation import PartyPlan, parse_federation, party_plan
from dpmerge.common.encoder.base_model import load_base, lora_shapes
from dpmerge.common.privacy.accounting import cross_check

FEDERATION = """
[base]
model = "minilm-l6"
max_length = 32
[lora]
layers = "last:2"
[training]
expected_batch_size = 128
[privacy]
noise = "fast"
noise_seed = 1
[[party]]
name = "library"
task = "trec6"
epsilon = 1.0
"""


@dataclass(frozen=True)
class Run:
    """One training: processor seconds in all, and of its steps alone."""

    seconds: float
    step_seconds: float
    files: dict[str, bytes]


def account(plan: PartyPlan) -> None:
    """Calibrate and cross-check once, outside the clock; both are cached by their arguments."""
    widths = lora_shapes(load_base(plan.base.model), plan.lora).values()
    cross_check(make_mechanism(plan.privacy, plan.training, sum(width_out * plan.lora.rank for width_out, _ in widths)))


def train(plan: PartyPlan, *, cached: bool) -> Run:
    base = load_base(plan.base.model)
    after_step: dict[int, float] = {}

    def note(stage: str, num_done: int, _total: int) -> None:
        if stage == "training":
            after_step[num_done] = time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        files = run_party(plan, base, Path(folder), on_progress=note, cache_trunk=cached)
        seconds = time.process_time() - start
    return Run(seconds, after_step[plan.training.num_steps] - after_step[1], files)


def compare(num_turns: int, num_steps: int) -> dict[str, float]:
    plan = party_plan(parse_federation(FEDERATION, "the benchmark"), "library")
    plan = replace(plan, training=replace(plan.training, num_steps=num_steps))
    account(plan)
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for turn in range(num_turns):
        for cached, done in runs.items():
            done.append(train(plan, cached=cached))
            print(f"turn {turn + 1}, {cached=}: {done[-1].seconds:.1f} s", file=sys.stderr)
    with_cache, without = (min(run.seconds for run in runs[cached]) for cached in (True, False))
    steps_with, steps_without = (min(run.step_seconds for run in runs[cached]) for cached in (True, False))
    first = runs[True][0].files
    return {
        "speedup": without / with_cache,
        "releases_equal": int(all(run.files == first for done in runs.values() for run in done)),
        "step_speedup": steps_without / steps_with,
        "cached_seconds": with_cache,
        "uncached_seconds": without,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn of 30 steps")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_turns, num_steps = (1, 30) if arguments.quick else (5, 40)
    figures = compare(num_turns, num_steps)
    if arguments.format == "json":
        environment = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "num_threads": 1,
            "num_steps": num_steps,
            "turns": num_turns,
        }
        print(json.dumps({"benchmark": "trunk_cache", "figures": figures, "environment": environment}))
    else:
        for key, value in figures.items():
            print(f"{key:24} {value:.6g}")


if __name__ == "__main__":
    main()
