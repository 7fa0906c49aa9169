"""Bounds on one party's influence, and factors per layer, around any method."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpmerge.common.config.federation import MergeSettings
from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.merge import Merged, merge
from dpmerge.server.merging.registry import METHODS
from dpmerge.server.merging.spec.federation import checked_settings
from dpmerge.server.merging.spec.spec import spec_of
from dpmerge.server.merging.wrappers import median_weights

NAMES = ("layer.0.query", "layer.0.key", "layer.1.query")
LINEAR = [name for name, row in METHODS.items() if row.family == "linear"]
FREE = [name for name, row in METHODS.items() if not row.statistics and row.most is None]


def adapters(seeds: Sequence[int], scales: Sequence[float]) -> list[Adapter]:
    made = []
    for seed, scale in zip(seeds, scales, strict=True):
        generator = torch.Generator().manual_seed(seed)
        modules = {
            name: LowRankDelta(
                torch.randn(2, 6, generator=generator), scale * torch.randn(7, 2, generator=generator), 0.5
            )
            for name in NAMES
        }
        made.append(Adapter(f"p{len(made)}", modules, {"base_model_name_or_path": "tiny"}, f"{seed}"))
    return made


def run(items: Sequence[Adapter], method: str, **options: Any) -> Merged:
    if method == "task-arithmetic":
        options = {"coefficient": 1.0} | options
    return merge(items, spec_of(method, **options))


def flat(merged: Merged) -> Tensor:
    return torch.cat([merged.modules[name].delta().double().flatten() for name in NAMES])


@pytest.mark.parametrize("method", FREE)
def test_clipping_bounds_what_one_party_can_do(method: str) -> None:
    honest, loud = adapters((1, 2, 3), (1, 1, 1)), adapters((1, 2, 3), (1, 1, 1e6))
    calm, bounded = (flat(run(items, method, robust="clip")) for items in (honest, loud))
    longest = max(run(honest, method).info["norms"])
    assert float((bounded - calm).norm()) < 10 * len(NAMES) * longest
    if method not in ("model-stock", "geometry"):  # of themselves they let no length drown the others
        assert float(flat(run(loud, method)).norm()) > 1e4 * longest


def test_clipping_says_what_it_did() -> None:
    info = run(adapters((1, 2, 3), (1, 1, 50)), "average", robust="clip").info
    norms = info["norms"]
    assert info["robust"]["bound"] == pytest.approx(sorted(norms)[1])
    assert info["robust"]["factors"] == pytest.approx([min(1, sorted(norms)[1] / norm) for norm in norms])
    assert info["parameters"]["robust"] == "clip"
    assert run(adapters((1, 2), (1, 1)), "average").info["robust"] is None


def test_clipping_counts_only_parties_that_moved() -> None:
    info = run(adapters((1, 2, 3), (0, 0, 1)), "average", robust="clip").info
    assert info["robust"]["factors"] == [1.0, 1.0, 1.0]
    assert info["norm"] == pytest.approx(info["norms"][2] / 3, rel=1e-5)


def test_of_two_parties_the_longer_becomes_as_long_as_the_shorter() -> None:
    info = run(adapters((1, 2), (1, 1e6)), "average", robust="clip").info
    assert info["robust"]["bound"] == pytest.approx(info["norms"][0])


@pytest.mark.parametrize("method", LINEAR)
@pytest.mark.parametrize("scale", [1e6, 1e12])
def test_the_median_hardly_moves_with_one_party(method: str, scale: float) -> None:
    calm = flat(run(adapters((1, 2, 3), (1, 1, 1)), method, robust="median"))
    merged = run(adapters((1, 2, 3), (1, 1, scale)), method, robust="median")
    longest = max(run(adapters((1, 2), (1, 1)), method).info["norms"])
    assert float((flat(merged) - calm).norm()) < 10 * longest
    assert merged.info["weights"] == [1.0, 1.0, 1.0]
    assert sum(merged.info["robust"]["weights"]) == pytest.approx(3)
    assert merged.info["robust"]["weights"][2] < 1e-5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 7), st.integers(1, 4))
def test_no_point_nearby_is_nearer_to_all_than_the_median(seed: int, parties: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(parties, width, dtype=torch.float64, generator=generator)
    given_weights = torch.rand(parties, dtype=torch.float64, generator=generator) + 0.2

    def cost(point: Tensor) -> float:
        return float(given_weights @ (points - point).norm(dim=1))

    weights = torch.tensor(median_weights(points @ points.T, given_weights.tolist()), dtype=torch.float64)
    assert float(weights.sum()) == pytest.approx(1)
    median = weights @ points
    for step in torch.randn(20, width, dtype=torch.float64, generator=generator):
        assert cost(median) <= cost(median + 0.01 * step) + 1e-4


def test_the_median_in_limiting_cases() -> None:
    assert median_weights(torch.zeros(3, 3, dtype=torch.float64), [1, 1, 1]) == pytest.approx([1 / 3] * 3)
    assert median_weights(torch.ones(1, 1, dtype=torch.float64), [2]) == [1.0]
    same = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    assert median_weights(same, [1, 1, 1])[2] == pytest.approx(0, abs=1e-6)


def test_layer_scales_match_as_peft_patterns_do() -> None:
    items = adapters((1, 2), (1, 1))
    whole, scaled = (run(items, "ties", layer_scales=s) for s in (None, {"1.query": -2.0, "query": 0.5}))
    expected = {"layer.0.query": 0.5, "layer.0.key": 1.0, "layer.1.query": -2.0}
    for name, factor in expected.items():
        torch.testing.assert_close(scaled.modules[name].delta(), factor * whole.modules[name].delta())
    assert scaled.info["parameters"]["layer_scales"] == {"1.query": -2.0, "query": 0.5}


def test_what_the_rank_loses_is_scaled_with_its_layer() -> None:
    items = adapters((1, 2), (1, 1))
    halved, whole = (run(items, "average", rank=1, layer_scales={"layer.*": s}) for s in (0.5, 1.0))
    assert halved.info["truncation_error"] == pytest.approx(whole.info["truncation_error"])


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("average", {"robust": "mean"}, "merge.robust = 'mean' is unknown; choose one of clip, median"),
        ("ties", {"robust": "median"}, "which ties is not; choose clip, or one of average, task-arithmetic, concat"),
        ("average", {"robust": "median", "weights": {"p0": 1, "p1": -1}}, "no shares of an average"),
        ("average", {"layer_scales": {"value": 0.5}}, "layer_scales.value = 0.5 matches no merged module"),
        ("average", {"layer_scales": {"query": math.inf}}, "is not finite"),
        ("average", {"layer_scales": {"(": 0.5}}, r"layer_scales: '\(' is none of the forms"),
        ("fisher", {}, "merge.statistics = None is missing, and fisher needs it; .*public_statistics"),
        ("average", {"statistics": {"p0": {}}}, "merge.statistics is no parameter of average"),
        ("regmean", {"statistics": {"p0": {}}, "core": True}, "merge.core = True is no choice for regmean"),
    ],
)
def test_bad_wrappers_are_refused(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DpmergeError, match=message):
        run(adapters((1, 2), (1, 1)), method, **options)


def test_a_configuration_offers_the_wrappers_too() -> None:
    chosen = MergeSettings(method="ties", core=True, robust="clip", layer_scales={"query": 1})
    assert chosen.layer_scales == {"query": 1.0}
    with pytest.raises(DpmergeError, match=r"median.*is no choice for ties.*average, task-arithmetic, concat"):
        checked_settings(MergeSettings(method="ties", robust="median"))
    with pytest.raises(DpmergeError, match=r"layer_scales = \{ query = 0\.5 \}"):
        MergeSettings(method="ties", layer_scales={"query": "half"})  # type: ignore[dict-item]


@pytest.mark.parametrize("method", [method for method in FREE if not METHODS[method].noise])
def test_a_partys_factors_per_layer_act_on_its_change_before_the_method(method: str) -> None:
    items = adapters((1, 2, 3), (1, 1, 1))
    scales = {"p1": {"0.query": 0.5, "query": 2.0}, "p2": {"layer.0.key": -1.0}}
    factors = {("p1", NAMES[0]): 0.5, ("p1", NAMES[2]): 2.0, ("p2", NAMES[1]): -1.0}
    changed = [
        replace(
            item,
            modules={
                name: replace(f, scaling=f.scaling * factors.get((item.party, name), 1.0))
                for name, f in item.modules.items()
            },
        )
        for item in items
    ]
    found = run(items, method, party_layer_scales=scales)
    assert torch.equal(flat(found), flat(run(changed, method)))
    assert not torch.equal(flat(found), flat(run(items, method)))
    assert found.info["parameters"]["party_layer_scales"] == scales


@pytest.mark.parametrize("options", [{"method": "geometry"}, {"method": "average", "denoise": True}])
def test_factors_per_party_do_not_go_with_what_asks_for_noise(options: dict[str, Any]) -> None:
    with pytest.raises(DpmergeError, match="party_layer_scales is no choice for"):
        merge(adapters((1, 2), (1, 1)), spec_of(party_layer_scales={"p0": {"query": 2.0}}, **options))


def test_a_mean_with_factors_per_party_and_layer_is_the_dense_one() -> None:
    items = adapters((1, 2), (1, 1))
    scales = {"p0": {"key": 3.0}}
    merged = run(items, "average", weights={"p0": 1, "p1": 3}, party_layer_scales=scales)
    for name in NAMES:
        p0, p1 = (
            item.modules[name].b.double() @ item.modules[name].a.double() * item.modules[name].scaling for item in items
        )
        expected = (p0 * (3.0 if name.endswith("key") else 1.0) + 3 * p1) / 4
        error = torch.linalg.vector_norm(merged.modules[name].delta().double() - expected)
        assert float(error / torch.linalg.vector_norm(expected)) < 1e-6


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"stranger": {"query": 1.0}}, "party_layer_scales names stranger, but the parties are p0, p1"),
        ({"p0": {"value": 1.0}}, "party_layer_scales.p0.value = 1.0 matches no merged module"),
        ({"p0": {"query": math.inf}}, "party_layer_scales.p0.query = inf is not finite"),
        ({"p0": {"(?=a)": 1.0}}, "none of the forms"),
    ],
)
def test_factors_per_party_that_mean_nothing_are_refused(scales: dict[str, dict[str, float]], words: str) -> None:
    with pytest.raises(DpmergeError) as caught:
        run(adapters((1, 2), (1, 1)), "average", party_layer_scales=scales)
    assert caught.value.code == "DPM-103"
    assert words in str(caught.value)
