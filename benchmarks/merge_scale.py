"""How merging scales with the number of adapters, in seconds and memory, beside PEFT and mergekit.

    python benchmarks/merge_scale.py [--quick] [--format json] [--parties 2,8] [--methods "average;ties"] [--limit 600]
        [--tools ours,peft] [--turns 1]

The adapters: one layer of a Llama of 7 billion weights (q, k, v, o of 4096 x 4096; gate, up of 11008 x 4096; down of
4096 x 11008), rank 16 on all seven, random A and B, every party with its own A, in folders as PEFT writes them. A job
is everything from the folders to the merged factors: reading, checking, merging. Peers do the same job: PEFT loads the
adapters into a model of that one layer and calls `add_weighted_adapter`; mergekit, which knows full matrices only, is
given each module's weight changes and runs its own task. Everybody has one core, and processor seconds are counted, so
that a busy machine changes little; the fastest turn counts. mergekit is "absent" where it is not installed.

Memory is the highest resident size during a job less that before it, in units of the largest module's matrix, after
the merged factors themselves are taken off (Linux). `--quick` divides all widths by eight and goes to 32 parties (the
linear family to 128, peers to 8); it says `"reduced": true`. Fixed costs weigh more there: its memory, above all, is no
measure of the full widths.
"""

import argparse
import json
import math
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dpmerge.server.merging.adapters.deltas import read_adapter
from dpmerge.server.merging.merge import merge
from dpmerge.server.merging.spec.spec import spec_of

RANK = 16
LINEAR = ("average", "concat")
OURS: dict[str, dict[str, Any]] = {
    "average": {},
    "concat": {},
    "average, rank 16": {"method": "task-arithmetic", "coefficient": 1.0, "rank": RANK},
    "geometry": {},
    "ties": {},
    "ties as PEFT, rank 16": {"method": "ties", "semantics": "peft", "rank": RANK},
    "ties as mergekit, full": {"method": "ties", "semantics": "mergekit", "rank": 1 << 20},
    "dare": {},
    "ties, core": {"method": "ties", "core": True},
    "knots-ties": {},
    "tsv": {},
    "iso-c": {},
    "wudi": {},
    "karcher": {},
}
PEFT = {
    "cat": "concat",
    "linear": "average",
    "svd": "average, rank 16",
    "ties": "ties",
    "ties_svd": "ties as PEFT, rank 16",
}
"""What PEFT calls it: what is nearest to it here."""
APART = ("linear", "ties")  # of PEFT, on A's and B's apart, which is no merge of weight changes: timed, not compared
MERGEKIT = {"ties": "ties as mergekit, full"}
SAME_WORK = {("peft", name): ours for name, ours in PEFT.items() if name not in APART} | {
    ("mergekit", name): ours for name, ours in MERGEKIT.items()
}


@dataclass(frozen=True)
class Cell:
    """One job, measured: seconds of the fastest turn, and peak memory less the result in matrices of one module."""

    tool: str
    method: str
    parties: int
    seconds: float
    memory: float


def shapes(divisor: int) -> dict[str, tuple[int, int]]:
    narrow, wide = 4096 // divisor, 11008 // divisor
    attention = {f"self_attn.{name}_proj": (narrow, narrow) for name in "qkvo"}
    return (
        attention | {f"mlp.{name}_proj": (wide, narrow) for name in ("gate", "up")} | {"mlp.down_proj": (narrow, wide)}
    )


def make_adapters(root: Path, divisor: int, count: int) -> None:
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "bias": "none",
        "base_model_name_or_path": "layer",
        "target_modules": sorted(name.rpartition(".")[2] for name in shapes(divisor)),
    }
    for party in range(count):
        generator = torch.Generator().manual_seed(party)
        tensors = {}
        for name, (out, width) in shapes(divisor).items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, width, generator=generator) / 64
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) / 64
        folder = root / f"p{party:04d}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")


def run_ours(folders: Sequence[Path], method: str) -> int:
    options = {"method": method} | OURS[method]
    merged = merge([read_adapter(folder) for folder in folders], spec_of(**options))
    return sum(4 * (item.a.numel() + item.b.numel()) for item in merged.modules.values())


def layer(divisor: int) -> nn.Module:
    model = nn.Module()
    for name, (out, width) in shapes(divisor).items():
        block, _, part = name.partition(".")
        if not hasattr(model, block):
            model.add_module(block, nn.Module())
        linear = nn.utils.skip_init(nn.Linear, width, out, bias=False)
        linear.weight.data.zero_()
        model.get_submodule(block).add_module(part, linear)
    return model


def run_peft(folders: Sequence[Path], method: str, base: nn.Module) -> int:
    from peft import PeftModel

    names = [folder.name for folder in folders]
    model = PeftModel.from_pretrained(base, folders[0], adapter_name=names[0])
    for folder in folders[1:]:
        model.load_adapter(str(folder), adapter_name=folder.name)
    options: dict[str, Any] = {"svd_rank": RANK} if "svd" in method else {}
    if "ties" in method:
        options["density"] = 0.2
    model.add_weighted_adapter(names, [1 / len(names)] * len(names), "merged", combination_type=method, **options)
    merged = [value for key, value in model.named_parameters() if ".merged." in key]
    model.unload()
    return sum(4 * value.numel() for value in merged)


def run_mergekit(folders: Sequence[Path], method: str, divisor: int) -> int:
    from mergekit.merge_methods.generalized_task_arithmetic import (
        ConsensusMethod,
        GeneralizedTaskArithmeticMerge,
        GTATask,
        SparsificationMethod,
    )

    tensors = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    kind = GeneralizedTaskArithmeticMerge.model_construct(
        consensus_method=ConsensusMethod.sum if method == "ties" else None,
        sparsification_method=SparsificationMethod.magnitude if method == "ties" else None,
    )
    results = []
    for name, (out, width) in shapes(divisor).items():
        key = f"base_model.model.{name}.lora_"
        deltas = {f"p{t}": 2.0 * item[f"{key}B.weight"] @ item[f"{key}A.weight"] for t, item in enumerate(tensors)}
        task = GTATask.model_construct(
            method=kind,
            base_model="base",
            weight_info=SimpleNamespace(name=name, is_embed=False),
            tensor_parameters=SimpleNamespace(data={party: {"weight": 1.0, "density": 0.2} for party in deltas}),
            int8_mask=False,
            normalize=True,
            lambda_=1.0,
            rescale_norm=None,
        )
        results.append(task.execute({"base": torch.zeros(out, width)} | deltas))
    return sum(4 * result.numel() for result in results)


def resident(field: str) -> int:
    """Return VmRSS (now) or VmHWM (highest since it was reset) of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith(field)).split()[1])


def measure(job: Callable[[], int], module_bytes: int, turns: int) -> tuple[float, float]:
    seconds, memory = math.inf, 0.0
    for _ in range(turns):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, start = resident("VmRSS"), time.process_time()
        result_bytes = job()
        seconds = min(seconds, time.process_time() - start)
        memory = max(memory, (resident("VmHWM") - before - result_bytes) / module_bytes)
    return seconds, memory


def child(request: dict[str, Any]) -> None:
    """Measure one tool, a line of JSON per method and number of parties, so that a time limit loses none."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core: one thread, and one module at a time
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (request["limit"], request["limit"] + 1))
    warnings.simplefilter("ignore")
    folders, divisor, tool = sorted(Path(request["root"]).iterdir()), request["divisor"], request["tool"]
    module_bytes = 4 * max(out * width for out, width in shapes(divisor).values())
    if tool != "ours":
        import_module("peft" if tool == "peft" else "mergekit.merge_methods.generalized_task_arithmetic")  # not timed
    base = layer(divisor) if tool == "peft" else nn.Module()
    for parties, method in request["jobs"]:
        jobs: dict[str, Callable[[list[Path], str], int]] = {
            "ours": run_ours,
            "peft": partial(run_peft, base=base),
            "mergekit": partial(run_mergekit, divisor=divisor),
        }
        seconds, memory = measure(partial(jobs[tool], folders[:parties], method), module_bytes, request["turns"])
        print(json.dumps(asdict(Cell(tool, method, parties, seconds, memory))), flush=True)


def cells(request: dict[str, Any]) -> Iterator[Cell]:
    """Run `child` in a process of its own, and yield what it measured within the limit of processor seconds."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = os.environ | one_thread | {"MALLOC_MMAP_THRESHOLD_": "2097152"}  # freed memory goes back: peaks show
    command = [sys.executable, __file__, "--child", json.dumps(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment)
    if done.returncode not in (0, -signal.SIGXCPU, -signal.SIGKILL):
        done.check_returncode()
    for line in done.stdout.splitlines():
        yield Cell(**json.loads(line))


def plan(arguments: argparse.Namespace, known: dict[str, str]) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield (tool, [(parties, method), …]), one process each; in a full run each job has its own, and its own limit."""
    counts = [int(text) for text in arguments.parties.split(",")]
    chosen = arguments.methods.split(";") if arguments.methods else list(OURS)
    most = (
        {"ours": 32, "peft": 8, "mergekit": 8} if arguments.quick else dict.fromkeys(("ours", "peft", "mergekit"), 128)
    )
    for tool, methods in (("ours", {name: name for name in OURS}), ("peft", PEFT), ("mergekit", MERGEKIT)):
        jobs = [
            (parties, method)
            for parties in counts
            for method, ours in methods.items()
            if tool in arguments.tools.split(",")
            and known.get(tool) != "absent"
            and ours in chosen
            and (parties <= most[tool] or (tool == "ours" and method in LINEAR))
        ]
        yield from ((tool, group) for group in ([jobs] if arguments.quick else [[job] for job in jobs]) if group)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of log y on log x.

    >>> round(slope([(1, 3), (2, 6), (4, 12)]), 6)
    1.0
    """
    xs, ys = ([math.log(value) for value in axis] for axis in zip(*points, strict=True))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def figures(found: Sequence[Cell]) -> dict[str, float]:
    at = {(cell.tool, cell.method, cell.parties): cell for cell in found}
    ours = [cell for cell in found if cell.tool == "ours"]
    result = {"peak_rss_over_module": max(cell.memory for cell in ours)} if ours else {}
    linear = [cell.memory for cell in ours if cell.method in LINEAR]
    if linear:
        result["peak_rss_over_module_linear"] = max(linear)
    if ("ours", "average", 128) in at:
        result["seconds_per_adapter_128"] = at["ours", "average", 128].seconds / 128
    lines = [[(cell.parties, cell.seconds) for cell in ours if cell.method == method] for method in LINEAR]
    if min(len(line) for line in lines) > 1:
        result["growth_exponent"] = max(slope(line) for line in lines)
    worst: dict[str, float] = {}
    for cell in found:
        same = at.get(("ours", SAME_WORK.get((cell.tool, cell.method), ""), cell.parties))
        if same:
            ratio = same.seconds / cell.seconds
            result[f"{same.method} / {cell.tool} {cell.method}, {cell.parties} parties"] = ratio
            worst[cell.tool] = max(worst.get(cell.tool, 0.0), ratio)
    return result | {f"time_over_{tool}": ratio for tool, ratio in worst.items()}


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "peft", "mergekit"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def print_table(found: Sequence[Cell]) -> None:
    for cell in found:
        print(f"{cell.tool:9}{cell.method:26}{cell.parties:5}{cell.seconds:10.3f} s{cell.memory:8.2f}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the widths, up to 32 parties")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--parties", help="numbers of adapters, separated by commas")
    parser.add_argument("--methods", default="", help=f"some of {'; '.join(OURS)}, separated by semicolons")
    parser.add_argument(
        "--limit", type=int, default=600, help="processor seconds for one method at one number of parties"
    )
    parser.add_argument("--tools", default="ours,peft,mergekit", help="some of these")
    parser.add_argument("--turns", type=int, default=1, help="the fastest counts; a first one also loads code")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.parties = arguments.parties or ("2,8,32,128" if arguments.quick else "2,8,32,128,1024")
    if arguments.child:
        child(json.loads(arguments.child))
        return
    known = versions()
    work = list(plan(arguments, known))
    settings = {"divisor": 8 if arguments.quick else 1, "turns": arguments.turns}
    found: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        make_adapters(Path(folder), settings["divisor"], max(parties for _, jobs in work for parties, _ in jobs))
        for tool, jobs in work:
            print(f"{tool}: {jobs}", file=sys.stderr)
            request = {"root": folder, "tool": tool, "jobs": jobs, "limit": arguments.limit, **settings}
            found += cells(request)
    print_table(found)
    measured = {(cell.tool, cell.parties, cell.method) for cell in found}
    planned = [(tool, parties, method) for tool, jobs in work for parties, method in jobs]
    result = {
        "benchmark": "merge_scale",
        "reduced": arguments.quick,
        "figures": figures(found),
        "environment": known
        | {"machine": platform.machine(), "python": platform.python_version(), "num_threads": 1, **settings},
        "cells": [asdict(cell) for cell in found],
        "over_limit": [" ".join(map(str, job)) for job in planned if job not in measured],
    }
    if arguments.format == "json":
        print(json.dumps(result))
    else:
        for key, value in result["figures"].items():
            print(f"{key:60} {value:.6g}")


if __name__ == "__main__":
    main()
