"""Whether the claim holds where it is made: in the loop that runs, at its edges, for every record.

    python benchmarks/claim.py [--quick] [--format json]

`planted_total` defects are planted in the source of the training loop, one at a time; `planted_caught` of them raise an
alarm in checks that were not written for them (`benchmarks/loop`), in `planted_seconds`. The same checks run on the
sound loop with keys of the operating system, 200 times: `false_alarms` of those runs raise any alarm. `checks_run`
statements are tested in all of them, of which `checks_with_chance` could fail by chance.
`--quick` looks at the sound loop three times, and says `"reduced": true`.
"""

import argparse
import json
import platform
import sys
import warnings

import torch
from loop.report import false_alarms, planted_report

NUM_RUNS = {False: 200, True: 3}


def figures(*, quick: bool) -> dict[str, float]:
    """Return every figure of this benchmark, part by part."""
    print("planting defects", file=sys.stderr)
    found = planted_report()
    print("looking for false alarms", file=sys.stderr)
    return found | false_alarms(NUM_RUNS[quick])


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
