"""The observed loop of `benchmarks/loop`, which benchmarks and tests share: benchmarks may not import tests."""

import importlib
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    checks, defects, observe, queries, report = (
        importlib.import_module(f"loop.{name}") for name in ("checks", "defects", "observe", "queries", "report")
    )
