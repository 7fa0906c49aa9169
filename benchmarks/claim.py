"""Whether the claim holds where it is made: in the loop that runs, at its edges, for every record.

    python benchmarks/claim.py [--quick] [--format json]

`planted_total` defects are planted in the source of the training loop, one at a time; `planted_caught` of them raise an
alarm in checks that were not written for them (`benchmarks/loop`), in `planted_seconds`. The same checks run on the
sound loop with keys of the operating system, 200 times: `false_alarms` of those runs raise any alarm. `checks_run`
statements are tested in all of them, of which `checks_with_chance` could fail by chance.

`hostile_pairs` of data sets differ in one hostile record; a party's answer tells `hostile_pairs_told_apart` of them
apart (`hostile_records.py`). `bystander_change_max` is the most that a record's row changed, relative to its norm, when
another record left its batch, and `…_plain` the same without fixed shapes (`bystanders.py`).
`epsilon_below_closed_form_max` is the most by which a claimed ε lies below the exact one where that is known
(`closed_form.py`); below 0 none does. `longest_record_seconds` is what the longest record that is used adds to an
answer. `--quick` takes fewer runs, pairs and cases, and says `"reduced": true`.
"""

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from bystanders import figures as bystander_figures
from closed_form import worst_shortfall
from hostile_records import figures as hostile_figures
from hostile_records import longest_record_seconds
from loop.report import false_alarms, planted_report


def figures(*, quick: bool) -> dict[str, float]:
    """Return every figure of this benchmark, part by part."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "planting defects": planted_report,
        "looking for false alarms": lambda: false_alarms(3 if quick else 200),
        "reading hostile records": lambda: hostile_figures(96 if quick else 10_000, num_whole=0 if quick else 32),
        "timing the longest record": longest_record_seconds,
        "taking records away": lambda: bystander_figures(*((48, 2) if quick else (128, 32))),
        "claiming ε": lambda: {"epsilon_below_closed_form_max": worst_shortfall(full=not quick)},
    }
    found: dict[str, float] = {}
    for words, part in parts.items():
        print(words, file=sys.stderr, flush=True)
        found |= part()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs of the sound loop")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    found = figures(quick=arguments.quick)
    if arguments.format == "json":
        environment = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "num_threads": 1,
        }
        whole = {"benchmark": "claim", "figures": found, "reduced": arguments.quick, "environment": environment}
        print(json.dumps(whole))
    else:
        for key, value in found.items():
            print(f"{key:24} {value:.6g}")


if __name__ == "__main__":
    main()
