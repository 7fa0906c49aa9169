"""DELLA, Breadcrumbs and SCE against mergekit's numbers, PCB against its formulas on flat lists, and small matrices."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.merge import merge
from dpmerge.server.merging.methods.sparse import keep_probabilities, middle
from dpmerge.server.merging.spec.spec import spec_of

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "merge_mergekit.json").read_text())
DELTAS = [torch.tensor(delta) for delta in GOLDEN["deltas"]]


def merged(deltas: Sequence[Tensor], **options: Any) -> Tensor:
    adapters = [
        Adapter(f"p{t}", {"m": LowRankDelta(delta, torch.eye(len(delta)))}, {"base_model_name_or_path": "tiny"}, f"{t}")
        for t, delta in enumerate(deltas)
    ]
    return merge(adapters, spec_of(**options)).modules["m"].delta()


@pytest.mark.parametrize("case", GOLDEN["breadcrumbs"])
def test_breadcrumbs_are_those_of_mergekit(case: dict[str, Any]) -> None:
    found = merged(DELTAS, method="breadcrumbs", density=case["density"], outliers=case["outliers"])
    torch.testing.assert_close(found, torch.tensor(case["merged"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", GOLDEN["della"])
def test_della_keeps_with_mergekits_probabilities(case: dict[str, Any]) -> None:
    room = min(case["density"], 1 - case["density"])
    found = keep_probabilities(DELTAS[0], case["density"], case["epsilon"] / room)
    torch.testing.assert_close(found, torch.tensor(case["probabilities"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", GOLDEN["sce"])
def test_sce_is_that_of_mergekit(case: dict[str, Any]) -> None:
    found = merged(DELTAS, method="sce", density=case["density"])
    torch.testing.assert_close(found, torch.tensor(case["merged"]), rtol=1e-5, atol=1e-6)


def test_della_is_unbiased_and_prefers_large_entries() -> None:
    delta = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    options = {"method": "della", "density": 0.5, "spread": 0.8, "rank": 20}
    runs = torch.stack([merged([delta], seed=seed, **options) for seed in range(60)])
    kept = runs.abs() > 1e-5
    order = delta.abs().argsort(1)
    assert float(kept.float().mean()) == pytest.approx(0.5, abs=0.01)
    assert float(kept.float().mean(0).gather(1, order)[:, -10:].mean()) > 0.7
    assert float(kept.float().mean(0).gather(1, order)[:, :10].mean()) < 0.3
    error = (runs.mean(0) - delta).norm() / delta.norm()
    assert error < 0.15


def pcb_by_lists(deltas: Sequence[Tensor], density: float) -> Tensor:
    """The authors' scores, number by number."""
    flat = [delta.double().flatten().tolist() for delta in deltas]
    weights = []
    for values in flat:
        sizes = [abs(value) for value in values]
        low, high = min(sizes), max(sizes)
        scores = [
            math.exp(len(flat) * ((size - low) / (high - low)) ** 2) * math.tanh(value * sum(column))
            for size, value, column in zip(sizes, values, zip(*flat, strict=True), strict=True)
        ]
        least = sorted(scores)[-int(density * len(scores))]
        top = max(scores)
        weights.append([max(score - least, 0.0) / (top - least) for score in scores])
    result = []
    for column, shares in zip(zip(*flat, strict=True), zip(*weights, strict=True), strict=True):
        whole = sum(shares)
        result.append(sum(v * w for v, w in zip(column, shares, strict=True)) / whole if whole else 0.0)
    return torch.tensor(result).view_as(deltas[0])


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_pcb_is_what_its_formulas_say(density: float) -> None:
    found = merged(DELTAS, method="pcb", density=density, coefficient=1.2)
    torch.testing.assert_close(found, 1.2 * pcb_by_lists(DELTAS, density), rtol=1e-4, atol=1e-5)


def test_pcb_clamps_the_extremes_of_large_matrices() -> None:
    delta = torch.linspace(0.5, 1.0, 20_000).view(100, 200)
    delta[0, 0] = 1000.0
    assert merged([delta], method="pcb", density=0.1).abs().max() < 1.1


@pytest.mark.parametrize("method", ["breadcrumbs", "sce", "pcb", "della"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1)])
def test_small_matrices_keep_an_entry_at_any_density(method: str, shape: tuple[int, int]) -> None:
    deltas = [torch.arange(1.0, 1 + math.prod(shape)).view(shape) * sign for sign in (1.0, 2.0)]
    runs = [merged(deltas, method=method, density=0.01, seed=seed) for seed in range(400 if method == "della" else 1)]
    assert max(float(run.abs().max()) for run in runs) > 0
    assert all(torch.isfinite(run).all() for run in runs)


def test_breadcrumbs_drop_outliers_only_where_the_density_leaves_room() -> None:
    row = torch.tensor([[4.0, -3.0, 2.0, 1.0]])
    assert middle(row, 0.5, 0.25).tolist() == [[0.0, -3.0, 2.0, 0.0]]
    assert middle(row, 1.0, 0.25).tolist() == row.tolist()
    assert middle(row, 0.01, 0.0).tolist() == [[4.0, 0.0, 0.0, 0.0]]


def test_sce_of_identical_adapters_keeps_them() -> None:
    found = merged([DELTAS[0]] * 3, method="sce", density=0.1)
    torch.testing.assert_close(found, DELTAS[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["sce", "breadcrumbs", "della"])
def test_scale_changes_nothing_but_the_scale(method: str) -> None:
    whole = merged(DELTAS, method=method, density=0.3)
    small = merged([1e-12 * delta for delta in DELTAS], method=method, density=0.3)
    torch.testing.assert_close(1e12 * small, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["sce", "pcb"])
def test_weights_that_a_method_would_ignore_are_refused(method: str) -> None:
    with pytest.raises(DpmergeError, match="makes its own"):
        merged(DELTAS[:2], method=method, weights={"p0": 1.0, "p1": 2.0})
