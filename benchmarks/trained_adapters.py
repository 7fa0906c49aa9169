"""Real private adapters for the benchmarks that merge: trained once, kept by what they were trained from.

    python benchmarks/trained_adapters.py --tasks trec6,movie --epsilons 1,8,none --seeds 0,1,2

A cell is one party's training; it is found again by the SHA-256 of its whole plan and of the base model, so that a
killed run goes on where it stopped, and a changed setting trains anew. Noise is fast and seeded, for experiments only.
"""

import argparse
import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from dpmerge.client.party.party import run_party
from dpmerge.common.config.federation import PartyPlan, parse_federation, party_plan
from dpmerge.common.data.tasks import load_task
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import adapted_layers, load_base
from dpmerge.common.encoder.split_encoder import SplitEncoder

BASE = "minilm-l6"
LAYERS = "last:2"
MAX_LENGTH = 32

# The demo's training; without noise its step is too long, as docs/results.md found on tasks outside the demo.
TRAINING = {"num_steps": 40, "expected_batch_size": 128, "learning_rate": 1.6e-2, "rho": 0.1, "alignment": 1e-3}
NONPRIVATE = {"learning_rate": 2e-3}
CLIP_NORM = 0.3


def cache_folder() -> Path:
    """Where trained cells are kept: $DPMERGE_BENCHMARK_CACHE, or a folder below the user's cache."""
    return Path(os.environ.get("DPMERGE_BENCHMARK_CACHE", Path.home() / ".cache" / "dpmerge" / "benchmarks"))


def plan_of(
    task: str,
    epsilon: float | None,
    seed: int,
    training: Mapping[str, object] | None = None,
    *,
    lora: Mapping[str, object] | None = None,
    l2_clip_norm: float = CLIP_NORM,
) -> PartyPlan:
    """Return the plan of one cell.

    Args:
        task: Name of a public task, which is also the party's name.
        epsilon: At δ = 1e-5; None trains without noise.
        seed: Sets the shared A, the Poisson samples and the noise.
        training: Keys of `[training]` that differ from the demo's.
        lora: Keys of `[lora]` that differ from the demo's.
        l2_clip_norm: C, where there is noise.
    """
    settings = TRAINING | (NONPRIVATE if epsilon is None else {}) | dict(training or {})
    text = f"[run]\nseed = {seed}\n[base]\nmodel = {BASE!r}\nmax_length = {MAX_LENGTH}\n"
    text += _section("lora", lora or {}) + _section("training", settings)
    privacy = (
        f'epsilon = {epsilon}\nl2_clip_norm = {l2_clip_norm}\nnoise = "fast"\nnoise_seed = {noise_seed(task, seed)}\n'
        if epsilon is not None
        else "private = false\n"
    )
    federation = parse_federation(f'{text}[privacy]\n{privacy}[[party]]\nname = "{task}"\ntask = "{task}"\n', "cell")
    return party_plan(federation, task)


def _section(name: str, settings: Mapping[str, object]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in settings.items())


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def noise_seed(task: str, seed: int) -> int:
    """Return a cell's own seed: noise that parties share would not average out, and look like agreement."""
    return zlib.crc32(f"{task}|{seed}".encode())


def cell_folder(plan: PartyPlan, base_sha256: str) -> Path:
    """Return the folder of a cell, trained or not."""
    return cache_folder() / hashlib.sha256((plan.fingerprint() + base_sha256).encode()).hexdigest()[:24]


def train_cells(plans: Iterable[PartyPlan]) -> list[Path]:
    """Train the cells that are not in the cache, and return the release folders of all, in order.

    Cells of one task in a row share the trunk's activations.
    """
    folders, encoded = [], {}
    base_sha256 = load_base(BASE).sha256
    for plan in plans:
        folder = cell_folder(plan, base_sha256)
        if not (folder / "release").exists():
            started, task = time.process_time(), plan.party
            base = load_base(BASE)
            if task not in encoded:
                split = SplitEncoder(base.encoder, base.layers, adapted_layers(base, LAYERS)[0])
                encoded = {task: Activations(base, split, load_task(task).train.texts, max_length=MAX_LENGTH)}
            run_party(plan, base, folder, activations=encoded[task])
            seconds = time.process_time() - started
            print(f"{task} epsilon {plan.privacy.epsilon} seed {plan.seed}: {seconds:.0f} s", file=sys.stderr)
        folders.append(folder / "release")
    return folders


def grid(tasks: Sequence[str], epsilons: Sequence[float | None], seeds: Sequence[int]) -> list[PartyPlan]:
    """Return the plans of a grid, task by task."""
    return [plan_of(task, epsilon, seed) for task in tasks for seed in seeds for epsilon in epsilons]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", default="trec6,movie,product,editorial,tweet,news,bbc,mail")
    parser.add_argument("--epsilons", default="1,8,none")
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    epsilons = [None if text == "none" else float(text) for text in options.epsilons.split(",")]
    seeds = [int(text) for text in options.seeds.split(",")]
    train_cells(grid(options.tasks.split(","), epsilons, seeds))


if __name__ == "__main__":
    main()
