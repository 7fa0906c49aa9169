"""How the demo's settings were chosen: on public tasks that are not in the demo, own and merged accuracy.

    python benchmarks/demo_settings.py [--quick] [--format json]

Each row trains one party per task (sms, bbc, mail; base minilm-l6, LoRA on the last two layers, label-text heads,
secure noise), merges the three releases by `average` and by `geometry`, and measures all on the public test records.
Accuracies are shares in [0, 1], means over the tasks; one training each, so differences under a point mean nothing. A
row takes about three minutes of one core; so does `--quick`, which trains: the demo's own row with 10 steps.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from dpmerge.client.party.party import run_party
from dpmerge.common.config.federation import parse_federation, party_plan
from dpmerge.common.data.tasks import TASKS, load_task
from dpmerge.common.encoder.base_model import adapted_layers, load_base
from dpmerge.common.encoder.heads import label_text_head
from dpmerge.common.release.format import to_files, write_files
from dpmerge.server.evaluation.evaluate import PublicTask, evaluate
from dpmerge.server.merging.adapters.deltas import Adapter, adapter_from_files
from dpmerge.server.merging.merge import as_release, merge
from dpmerge.server.merging.spec.spec import spec_of

PARTIES = ("sms", "bbc", "mail")
DEMO = {
    "learning_rate": 1.6e-2,
    "l2_clip_norm": 0.3,
    "sharpness": "sat",
    "rho": 0.1,
    "alignment": 1e-3,
    "optimizer": "adam",
    "num_steps": 40,
    "expected_batch_size": 128,
    "epsilon": 1.0,
}
CHANGES = (
    {},
    {"learning_rate": 8e-3},
    {"learning_rate": 3.2e-2},
    {"l2_clip_norm": 0.1},
    {"sharpness": "none", "rho": 0.0},
    {"rho": 1.0},
    {"sharpness": "sam"},
    {"alignment": 0.0},
    {"alignment": 1e-2},
    {"optimizer": "dp-adam", "learning_rate": 8e-3},
    {"expected_batch_size": 256, "num_steps": 30},
    {"epsilon": 8.0},
)
PRIVACY_KEYS = ("l2_clip_norm", "epsilon")


def federation_text(settings: dict[str, object]) -> str:
    training = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items() if key not in PRIVACY_KEYS)
    privacy = "\n".join(f"{key} = {json.dumps(settings[key])}" for key in PRIVACY_KEYS)
    parties = "\n".join(f'[[party]]\nname = "{task}"\ntask = "{task}"' for task in PARTIES)
    return f'[base]\nmodel = "minilm-l6"\n[training]\n{training}\n[privacy]\n{privacy}\n{parties}\n'


def measure(settings: dict[str, object]) -> dict[str, float]:
    """Train, merge and evaluate one row; mean accuracies over the tasks and processor seconds."""
    started = time.process_time()
    federation = parse_federation(federation_text(settings), "demo_settings")
    with tempfile.TemporaryDirectory() as name:
        folder, adapters = Path(name), []
        for party in PARTIES:
            plan = party_plan(federation, party)
            files = run_party(plan, load_base("minilm-l6"), folder / party)
            adapters.append(adapter_from_files(files, party))
        accuracy: dict[str, float] = {}
        for method in ("average", "geometry"):
            merged = merge(adapters, spec_of(method))
            write_files(folder / method, to_files(as_release(merged, adapters)))
            accuracy |= mean_accuracies(folder, method, adapters)
    return accuracy | {"seconds": time.process_time() - started}


def mean_accuracies(folder: Path, method: str, adapters: list[Adapter]) -> dict[str, float]:
    base = load_base("minilm-l6")
    tasks = {}
    for adapter in adapters:
        head = adapter.heads[adapter.party]
        base_head = label_text_head(base, TASKS[adapter.party].labels)
        tasks[adapter.party] = PublicTask(load_task(adapter.party).test, head, base_head)
    releases = {party: folder / party / "release" for party in PARTIES}
    first = adapted_layers(base, "last:2")[0]
    scores = evaluate(base, first, tasks, releases, folder / method, max_length=32)
    return {
        "base": sum(score.base.value for score in scores.values()) / len(PARTIES),
        "own": sum(score.by_adapter[party].value for party, score in scores.items()) / len(PARTIES),
        method: sum(score.merged.value for score in scores.values()) / len(PARTIES),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the demo's row only, with 10 steps")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes: tuple[dict[str, object], ...] = ({"num_steps": 10},) if options.quick else CHANGES
    rows = []
    for change in changes:
        row = {"change": change, **measure({**DEMO, **change})}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    result = {
        "benchmark": "demo_settings",
        "reduced": options.quick,
        "figures": {key: rows[0][key] for key in ("base", "own", "average", "geometry")},
        "rows": rows,
        "environment": {"machine": platform.machine(), "torch": torch.__version__, "num_threads": 1, "demo": DEMO},
    }
    if options.format == "json":
        print(json.dumps(result))
    else:
        for key, value in result["figures"].items():  # type: ignore[attr-defined]
            print(f"{key}: {value:.3f}")


if __name__ == "__main__":
    main()
