"""Adapters drawn over all of `LoraConfig`: what is merged is what PEFT computes, and the rest is refused by name."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of what the cases are about


def cases() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module("adapter_cases")


@pytest.mark.parametrize(("count", "seed"), [(80, 0), pytest.param(400, 1, marks=pytest.mark.slow)])
def test_every_case_is_exact_or_refused_by_name(count: int, seed: int) -> None:
    module = cases()
    results = module.adapter_results(count, seed)
    assert [(r.case.name, r.case.configs, r.error, r.said) for r in results if r.wrong] == []
    assert sum(result.error is not None for result in results) > count / 3
    assert len(results) == count
