"""Whether what people bring is right, or refused in words: models, adapters and files.

    python benchmarks/any_input.py [--quick] [--format json]

`architectures_tried` kinds of models, tiny and random: `architectures_right` of them are split, trained and released
as the whole model computes, with `split_error_max` at most; `architectures_refused` are refused by name
(`architectures.py`). `adapter_cases` kinds of LoRA adapters, made by PEFT, are merged and compared with dense float64:
`adapter_error_max` is the worst relative error, `adapter_cases_refused` are refused by name, `adapter_cases_wrong` are
neither right nor refused (`adapter_cases.py`). `file_cases` files are read and what was used and dropped is compared
with the truth: `file_cases_wrong` (`file_cases.py`).
`--quick` draws fewer adapters, and says `"reduced": true`.
"""

import argparse
import json
import platform
import sys
import warnings

import peft
import torch
import transformers
from adapter_cases import adapter_figures
from architectures import architectures
from file_cases import figures as file_figures


def figures(*, quick: bool) -> dict[str, float]:
    """Return every figure of this benchmark, part by part."""
    print("reading files", file=sys.stderr, flush=True)
    found: dict[str, float] = dict(file_figures())
    print("merging adapters", file=sys.stderr, flush=True)
    found |= adapter_figures(60 if quick else 400)
    print("trying architectures", file=sys.stderr, flush=True)
    return found | architectures()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer adapters")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = figures(quick=arguments.quick)
    if arguments.format == "json":
        versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
        environment = {"machine": platform.machine(), "python": platform.python_version(), **versions}
        whole = {"benchmark": "any_input", "figures": found, "reduced": arguments.quick, "environment": environment}
        print(json.dumps(whole))
    else:
        for key, value in found.items():
            print(f"{key:24} {value:.6g}")


if __name__ == "__main__":
    main()
