"""The account of a merge is measured in fp32, and says what float64 on the full matrices says."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging import diagnostics
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.low_rank import algebra
from dpmerge.server.merging.low_rank.algebra import gram, squared_norm
from dpmerge.server.merging.merge import merge
from dpmerge.server.merging.spec.spec import spec_of

SHAPES = {"layer.0.query": (40, 30), "layer.0.output": (30, 50)}


def adapters(count: int = 3, scale: float = 1.0, *, shared: bool = False) -> list[Adapter]:
    found = []
    for t in range(count):
        generator = torch.Generator().manual_seed(t)
        modules = {}
        for name, (out, width) in SHAPES.items():
            a = torch.randn(3 + t % 2, width, generator=torch.Generator().manual_seed(8) if shared else generator)
            modules[name] = LowRankDelta(scale * a, scale * torch.randn(out, len(a), generator=generator), 0.3 + t)
        found.append(Adapter(f"p{t}", modules, {"base_model_name_or_path": "tiny"}, f"{t}"))
    return found


def whole(modules: Any) -> Tensor:
    """All numbers of a change, in float64."""
    return torch.cat(
        [(item.scaling * item.b.double() @ item.a.double()).flatten() for _, item in sorted(modules.items())]
    )


OPTIONS: list[dict[str, Any]] = [
    {}, {"core": True}, {"robust": "clip"}, {"denoise": True}, {"layer_scales": {"query": -3.0}}, {"rank": 2},
    {"weights": {"p0": 1.0, "p1": 0.25, "p2": 3.0}},
]  # fmt: skip
CASES = [
    (method, options)
    for method in ("average", "concat", "geometry", "karcher", "tsv")
    for options in OPTIONS
    if (method, options) != ("geometry", {"denoise": True})  # it uses the noise itself
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("method", "options"), CASES, ids=str)
def test_norms_and_overlaps_are_those_of_the_full_matrices(method: str, options: dict[str, Any], shared: bool) -> None:
    inputs = adapters(shared=shared)
    merged = merge(inputs, spec_of(method, **options))
    changes = torch.stack([whole(item.modules) for item in inputs])
    lengths = changes.norm(dim=1)
    assert merged.info["norm"] == pytest.approx(float(whole(merged.modules).norm()), rel=2e-6)
    assert merged.info["norms"] == pytest.approx(lengths.tolist(), rel=2e-6)
    expected = changes @ changes.T / torch.outer(lengths, lengths)
    torch.testing.assert_close(torch.tensor(merged.info["overlap"], dtype=torch.float64), expected, rtol=0, atol=1e-6)


def test_the_geometric_medians_weights_are_those_of_the_norm() -> None:
    inputs = adapters()
    merged = merge(inputs, spec_of("average", robust="median"))
    assert merged.info["norm"] == pytest.approx(float(whole(merged.modules).norm()), rel=2e-6)


@pytest.mark.parametrize("rest", [0.0, 1e-5, 1e-2])
def test_a_sum_that_all_but_cancels_has_the_norm_that_is_left(rest: float) -> None:
    first = adapters(1)[0]
    second = Adapter("q", first.modules, first.config, "q")
    merged = merge([first, second], spec_of("concat", weights={"p0": 1.0, "q": rest - 1}))
    left = rest * merged.info["norms"][0]
    assert merged.info["norm"] == pytest.approx(left, rel=1e-2, abs=1e-6 * merged.info["norms"][0])


def test_many_parties_have_no_norm_that_costs_more_than_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    many = adapters(diagnostics.MAX_OVERLAP_PARTIES + 1)
    measured = merge(many, spec_of("concat"))
    assert measured.info["norm"] == pytest.approx(float(whole(measured.modules).norm()), rel=2e-6)
    monkeypatch.setattr(algebra, "BLOCK", 4)
    info = merge(many, spec_of("concat")).info
    assert (info["norm"], info["truncation_error"]) == (None, 0.0)
    assert info["norms"] == pytest.approx(measured.info["norms"], rel=2e-6)
    cut = merge(many, spec_of("concat", rank=29))  # the error needs it
    assert cut.info["norm"] == pytest.approx(float(whole(cut.modules).norm()), rel=2e-6)
    assert merge(many, spec_of("average")).info["norm"] > 0  # a matrix beside the identity
    many[0].modules["layer.0.query"].source_b.mul_(1e30)
    many[1].modules["layer.0.query"].source_a.mul_(1e30)
    with pytest.raises(DpmergeError, match="the merged change is too large for fp32"):
        merge(many, spec_of("concat", coefficient=1e8))


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e7])
def test_very_small_and_very_large_changes_are_measured_too(scale: float) -> None:
    info, plain = (merge(adapters(scale=s), spec_of("average")).info for s in (scale, 1.0))
    assert info["norms"] == pytest.approx([scale**2 * norm for norm in plain["norms"]], rel=1e-5)
    assert info["norm"] == pytest.approx(scale**2 * plain["norm"], rel=1e-5)
    for row, expected in zip(info["overlap"], plain["overlap"], strict=True):
        assert row == pytest.approx(expected, abs=1e-6)


def test_products_are_fp32_only_where_fp32_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def spy(factors: Any, dtype: torch.dtype) -> Tensor:
        seen.append(dtype)
        return gram(factors, dtype)

    monkeypatch.setattr(diagnostics, "gram", spy)
    merge(adapters(), spec_of("average"))
    assert set(seen) == {torch.float32}
    seen.clear()
    merge(adapters(scale=1e-25), spec_of("average"))
    assert set(seen) == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inner_products_of_ragged_ranks_in_blocks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ranks = (3, 0, 7, 1, 5, 9)
    factors = [
        LowRankDelta(torch.randn(r, 20, generator=generator), torch.randn(30, r, generator=generator), 0.1 + r)
        for r in ranks
    ]
    changes = torch.stack([(item.scaling * item.b.double() @ item.a.double()).flatten() for item in factors])
    expected = changes @ changes.T
    monkeypatch.setattr(algebra, "BLOCK", 8)
    relative = (gram(factors, dtype) - expected).abs().max() / expected.max()
    assert relative < (1e-14 if dtype == torch.float64 else 1e-6)
    assert math.isclose(squared_norm(factors[2], dtype), float(expected[2, 2]), rel_tol=1e-6)
