"""TIES against PEFT's functions, mergekit's numbers and a slow loop; DARE against its expectation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils import merge_utils
from torch import Tensor

from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.low_rank.strips import thresholds
from dpmerge.server.merging.merge import merge
from dpmerge.server.merging.spec.spec import spec_of

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "ties_mergekit.json").read_text())
WEIGHTS = [(1.0, 1.0, 1.0), (1.0, 0.7, 0.4)]


def full(delta: Tensor) -> LowRankDelta:
    """Hold any matrix as factors of full rank, exactly."""
    return LowRankDelta(delta, torch.eye(len(delta)))


def adapters(*per_party: Sequence[Tensor]) -> list[Adapter]:
    config = {"base_model_name_or_path": "tiny"}
    return [
        Adapter(f"p{t}", {f"m{i}": full(delta) for i, delta in enumerate(deltas)}, config, f"{t}")
        for t, deltas in enumerate(per_party)
    ]


def randoms(count: int, shape: tuple[int, int] = (8, 11), seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def merged(per_party: Sequence[Tensor], weights: Sequence[float], **options: Any) -> Tensor:
    named = {f"p{t}": weight for t, weight in enumerate(weights)}
    return merge(adapters(*([delta] for delta in per_party)), spec_of(weights=named, **options)).modules["m0"].delta()


@pytest.mark.parametrize("density", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_peft_semantics_are_those_of_peft(weights: tuple[float, ...], density: float) -> None:
    deltas = randoms(3)
    expected = merge_utils.ties(deltas, torch.tensor(weights), density)
    found = merged(deltas, weights, method="ties", semantics="peft", density=density)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", range(len(GOLDEN["cases"])))
def test_mergekit_semantics_are_those_of_mergekit(case: int) -> None:
    numbers = GOLDEN["cases"][case]
    deltas = [torch.tensor(delta) for delta in GOLDEN["deltas"]]
    found = merged(deltas, numbers["weights"], method="ties", semantics="mergekit", density=numbers["density"])
    torch.testing.assert_close(found, torch.tensor(numbers["merged"]), rtol=1e-5, atol=1e-6)


def test_semantics_differ_only_where_they_should() -> None:
    deltas = randoms(3)
    same, skewed = (
        {s: merged(deltas, w, method="ties", semantics=s, density=0.5) for s in ("peft", "mergekit")} for w in WEIGHTS
    )
    torch.testing.assert_close(same["peft"], same["mergekit"])
    differing = ((skewed["peft"] - skewed["mergekit"]).abs() > 1e-6).float().mean()
    assert differing > 0.4


@pytest.mark.parametrize("density", [0.1, 0.35, 1.0])
def test_paper_semantics_are_algorithm_one(density: float) -> None:
    parties = [[*randoms(1, (8, 11), t), *randoms(1, (5, 7), 10 + t)] for t in range(3)]
    parties[1][1] *= 0.05  # one module of one party is small: a threshold over the whole model drops most of it
    found = merge(adapters(*parties), spec_of("ties", density=density, coefficient=0.6))

    trimmed = []
    for deltas in parties:
        flat = torch.cat([delta.flatten() for delta in deltas])
        kept = max(1, int(density * len(flat)))
        threshold = sorted(flat.abs().tolist())[-kept]
        trimmed.append([value if abs(value) >= threshold else 0.0 for value in flat.tolist()])
    expected = []
    for values in zip(*trimmed, strict=True):
        total = sum(values)
        agreeing = [value for value in values if value * total > 0]
        expected.append(0.6 * sum(agreeing) / len(agreeing) if agreeing else 0.0)
    flat = torch.cat([found.modules[name].delta().flatten() for name in ("m0", "m1")])
    torch.testing.assert_close(flat, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_opposed_entries_cancel_under_the_paper_and_go_positive_elsewhere() -> None:
    delta = torch.tensor([[1.0, -2.0]])
    for semantics, expected in (("paper", [[0.0, 0.0]]), ("peft", [[1.0, 2.0]]), ("mergekit", [[1.0, 2.0]])):
        found = merged([delta, -delta], (1.0, 1.0), method="ties", semantics=semantics, density=1.0)
        torch.testing.assert_close(found, torch.tensor(expected))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.floats(0.01, 1.0),
)
def test_the_threshold_is_the_exact_order_statistic(values: list[float], density: float) -> None:
    half = (len(values) + 1) // 2
    parts = [torch.tensor([values[:half]]), torch.tensor([values[half:]]).reshape(1, -1)]
    modules = {f"m{i}": (full(part),) for i, part in enumerate(parts) if part.numel()}
    expected = sorted(torch.tensor(values).abs().tolist())[-max(1, int(density * len(values)))]
    assert thresholds(modules, 1, density) == [expected]


def test_trim_keeps_at_least_one_entry() -> None:
    found = merged([torch.tensor([[1.0, -2.0, 0.5]])], (1.0,), method="ties", semantics="peft", density=0.01)
    assert found.tolist() == [[0.0, -2.0, 0.0]]


def test_dare_is_unbiased_and_keeps_the_stated_share() -> None:
    delta = randoms(1, (40, 50))[0]
    runs = torch.stack([merged([delta], (1.0,), method="dare", density=0.3, seed=seed, rank=40) for seed in range(16)])
    assert float((runs.abs() > 1e-4).float().mean()) == pytest.approx(0.3, abs=0.01)
    kept = runs[runs.abs() > 1e-4] / delta.expand_as(runs)[runs.abs() > 1e-4]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.3), rtol=1e-2, atol=1e-2)
    error = (runs.mean(0) - delta).norm() / delta.norm()
    assert error < 1.3 * (0.7 / 0.3 / 16) ** 0.5


def test_dare_masks_differ_between_parties_modules_and_seeds() -> None:
    delta = torch.ones(20, 20)
    parties = adapters([delta, delta], [delta, delta])
    a = merge(parties[:1], spec_of("dare", seed=1, rank=20)).modules
    b = merge(parties[1:], spec_of("dare", seed=1, rank=20)).modules
    c = merge(parties[:1], spec_of("dare", seed=2, rank=20)).modules
    masks = [item.delta() > 1 for item in (a["m0"], a["m1"], b["m0"], c["m0"])]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 0.4 < float((one == other).float().mean()) < 0.6


def test_dare_ties_elects_signs_after_dropping() -> None:
    deltas = randoms(3)
    sparse = [merged([delta], (1.0,), method="dare", density=0.5, seed=4) for delta in deltas[:1]]
    found = merged(deltas[:1], (1.0,), method="dare-ties", density=0.5, seed=4)
    torch.testing.assert_close(found, sparse[0], rtol=1e-4, atol=1e-5)
