"""Slerp, the Karcher mean and Model Stock against dense vectors."""

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
from dpmerge.server.merging.methods.sphere import interpolation_ratio, karcher_mean
from dpmerge.server.merging.spec.spec import spec_of

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "merge_mergekit.json").read_text())
DELTAS = [torch.tensor(delta) for delta in GOLDEN["deltas"]]


def merged(deltas: Sequence[Tensor], weights: Sequence[float] | None = None, **options: Any) -> Tensor:
    adapters = [
        Adapter(f"p{t}", {"m": LowRankDelta(delta, torch.eye(len(delta)))}, {"base_model_name_or_path": "tiny"}, f"{t}")
        for t, delta in enumerate(deltas)
    ]
    named = None if weights is None else {f"p{t}": weight for t, weight in enumerate(weights)}
    return merge(adapters, spec_of(weights=named, **options)).modules["m"].delta()


def test_karcher_is_that_of_mergekit() -> None:
    found = merged(DELTAS, method="karcher")
    torch.testing.assert_close(found, torch.tensor(GOLDEN["karcher"]["merged"]), rtol=1e-4, atol=1e-5)


def test_karcher_is_where_the_pulls_cancel() -> None:
    weights = torch.tensor([0.5, 0.3, 0.2])
    found = merged(DELTAS, weights.tolist(), method="karcher").double().flatten()
    lengths = torch.stack([delta.norm() for delta in DELTAS])
    assert float(found.norm()) == pytest.approx(float(weights @ lengths), rel=1e-5)
    point = found / found.norm()
    pull = torch.zeros_like(point)
    for weight, delta in zip(weights, DELTAS, strict=True):
        unit = delta.double().flatten() / delta.double().norm()
        angle = torch.acos(unit @ point)
        pull += weight * angle / torch.sin(angle) * (unit - (unit @ point) * point)
    assert float(pull.norm()) < 1e-6


def test_slerp_divides_the_angle_and_agrees_with_karcher() -> None:
    first, second = (delta.double().flatten() for delta in DELTAS[:2])
    found = merged(DELTAS[:2], [0.25, 0.75], method="slerp")
    angle = torch.acos(first @ second / first.norm() / second.norm())
    way = torch.acos(first @ found.double().flatten() / first.norm() / found.double().norm())
    assert float(way) == pytest.approx(0.75 * float(angle), rel=1e-5)
    assert float(found.norm()) == pytest.approx(float(0.25 * first.norm() + 0.75 * second.norm()), rel=1e-5)
    torch.testing.assert_close(merged(DELTAS[:2], [0.25, 0.75], method="karcher"), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["slerp", "karcher"])
def test_directions_without_a_mean_give_the_straight_one(method: str) -> None:
    torch.testing.assert_close(merged([DELTAS[0], -DELTAS[0]], method=method), 0 * DELTAS[0], rtol=0, atol=1e-6)
    found = merged([DELTAS[0], -DELTAS[0]], [3, 1], method=method)
    if method == "slerp":
        torch.testing.assert_close(found, 0.5 * DELTAS[0], rtol=1e-5, atol=1e-6)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("method", ["slerp", "karcher"])
def test_a_party_that_did_not_move_has_no_direction(method: str) -> None:
    found = merged([DELTAS[0], 0 * DELTAS[1]], method=method)
    torch.testing.assert_close(found, 0.5 * DELTAS[0], rtol=1e-5, atol=1e-6)


def test_karcher_of_close_directions_does_not_wander() -> None:
    line = torch.tensor([1.0, 1.0 + 1e-9], dtype=torch.float64)
    unit = torch.stack([line, line.flip(0)]) / line.norm()
    point = karcher_mean(unit @ unit.T, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert point is not None
    assert float((point - 0.5).abs().max()) < 1e-6


def test_slerp_joins_two_parties_only() -> None:
    with pytest.raises(DpmergeError, match="slerp joins two parties, not 3; choose method karcher"):
        merged(DELTAS, method="slerp")


def test_model_stock_scales_the_average_by_the_mean_cosine() -> None:
    deltas = [DELTAS[0] + 0.5 * delta for delta in DELTAS]
    units = [delta / delta.norm() for delta in deltas]
    cosine = sum(float((units[i] * units[j]).sum()) for i, j in ((0, 1), (0, 2), (1, 2))) / 3
    expected = 3 * cosine / (1 + 2 * cosine) * torch.stack(deltas).mean(0)
    assert 0.1 < cosine < 0.95
    torch.testing.assert_close(merged(deltas, method="model-stock"), expected, rtol=1e-4, atol=1e-6)


def test_model_stock_has_no_weights() -> None:
    with pytest.raises(DpmergeError, match="model-stock as published has none"):
        merged(DELTAS, [1, 2, 3], method="model-stock")


@pytest.mark.parametrize(
    ("cosines", "expected"),
    [
        (torch.ones(4, 4), 1.0),
        (torch.eye(4), 0.0),
        (torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), 0.0),  # the formula itself would divide by 0
        (torch.full((3, 3), 0.5).fill_diagonal_(1.0), 0.75),
        (torch.ones(1, 1), 1.0),
    ],
)
def test_interpolation_ratio_in_limiting_cases(cosines: Tensor, expected: float) -> None:
    assert interpolation_ratio(cosines) == pytest.approx(expected)
    assert math.isfinite(interpolation_ratio(cosines))
