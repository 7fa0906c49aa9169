"""Core-space methods against dense float64 oracles, and the closed form of WUDI against its own objective."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.low_rank.algebra import gram, weighted_sum
from dpmerge.server.merging.low_rank.cores import core_of
from dpmerge.server.merging.merge import merge
from dpmerge.server.merging.methods.singular import joint_svd, polar_factor
from dpmerge.server.merging.spec.spec import spec_of

OUT, IN, RANK, PARTIES = 20, 16, 3, 3


def parties(*, shared: bool = False) -> list[LowRankDelta]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(RANK, IN, generator=generator)
    made = []
    for scaling in (2.0, 0.3, 1.0):
        own = a if shared else torch.randn(RANK, IN, generator=generator)
        made.append(LowRankDelta(own, torch.randn(OUT, RANK, generator=generator), scaling))
    return made


def dense(factors: Sequence[LowRankDelta]) -> list[Tensor]:
    return [item.scaling * item.b.double() @ item.a.double() for item in factors]


def run(factors: Sequence[LowRankDelta], **options: Any) -> Tensor:
    config = {"base_model_name_or_path": "tiny"}
    adapters = [Adapter(f"p{t}", {"m": item}, config, f"{t}") for t, item in enumerate(factors)]
    return merge(adapters, spec_of(**options)).modules["m"].delta()


@pytest.mark.parametrize("shared", [False, True])
def test_the_core_is_exact(shared: bool) -> None:
    factors = parties(shared=shared)
    core = core_of(factors, [1.0] * PARTIES)
    for left, right, delta in zip(core.lefts, core.rights, dense(factors), strict=True):
        assert (core.q_b @ left @ right.T @ core.q_a.T - delta).norm() < 1e-12 * delta.norm()
    assert (core.q_b.T @ core.q_b - torch.eye(core.q_b.shape[1])).norm() < 1e-12
    assert core.q_a.shape[1] == (RANK if shared else RANK * PARTIES)


@pytest.mark.parametrize("shared", [False, True])
def test_the_joint_svd_of_knots_is_that_of_the_full_matrices(shared: bool) -> None:
    factors = parties(shared=shared)
    deltas = dense(factors)
    left, values, thin = joint_svd(factors)
    rights = [item.b @ item.a for item in thin]
    full = torch.linalg.svdvals(torch.cat(deltas, 1))
    assert (values - full[: len(values)]).norm() < 1e-10 * full[0]
    assert full[len(values) :].norm() < 1e-10 * full[0]
    for right, delta in zip(rights, deltas, strict=True):
        assert (left * values @ right - delta).norm() < 1e-10 * delta.norm()
    stacked = torch.cat(rights, 1)
    assert (stacked @ stacked.T - torch.eye(len(stacked))).norm() < 1e-10
    assert (left.T @ left - torch.eye(left.shape[1])).norm() < 1e-10


def test_gram_and_sum_are_exact() -> None:
    factors = parties()
    deltas = dense(factors)
    expected = torch.stack([torch.stack([(x * y).sum() for y in deltas]) for x in deltas])
    torch.testing.assert_close(gram(factors), expected, rtol=1e-6, atol=1e-6)
    total = weighted_sum(factors, [0.3, -1.0, 2.0])
    expected = 0.3 * deltas[0] - deltas[1] + 2 * deltas[2]
    assert (total.delta().double() - expected).norm() < 1e-6 * expected.norm()


def dense_iso_c(deltas: list[Tensor]) -> Tensor:
    u, s, vh = torch.linalg.svd(sum(deltas[1:], deltas[0]))
    rank = RANK * PARTIES
    return s[:rank].mean() * u[:, :rank] @ vh[:rank]


def dense_iso_cts(deltas: list[Tensor]) -> Tensor:
    u, s, vh = torch.linalg.svd(sum(deltas[1:], deltas[0]))
    common, own = 6, 1  # of 9 directions, 2/3 are common; 3 are left for 3 parties
    lefts, values, rights = [u[:, :common]], [s[:common]], [vh[:common]]
    for delta in deltas:
        left, value, right = torch.linalg.svd(delta - lefts[0] @ lefts[0].T @ delta)
        lefts.append(left[:, :own])
        values.append(value[:own])
        rights.append(right[:own])
    return torch.cat(values).mean() * polar_factor(torch.cat(lefts, 1)) @ polar_factor(torch.cat(rights).T).T


def dense_tsv(deltas: list[Tensor]) -> Tensor:
    pieces = [torch.linalg.svd(delta) for delta in deltas]
    u = torch.cat([piece[0][:, :RANK] for piece in pieces], 1)
    s = torch.cat([piece[1][:RANK] for piece in pieces])
    v = torch.cat([piece[2][:RANK] for piece in pieces]).T
    polar = [x @ _inverse_root(x) for x in (u, v)]  # the nearest orthonormal columns, by another road than the SVD
    return polar[0] * s @ polar[1].T


def _inverse_root(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(x.T @ x)
    return vectors @ torch.diag(values.rsqrt()) @ vectors.T


def dense_wudi(deltas: list[Tensor]) -> Tensor:
    grams = [delta.T @ delta / delta.square().sum() for delta in deltas]
    left = sum((delta @ g for delta, g in zip(deltas, grams, strict=True)), torch.zeros(OUT, IN, dtype=torch.float64))
    return left @ torch.linalg.pinv(sum(grams[1:], grams[0]), rtol=1e-10)


def dense_knots(deltas: list[Tensor]) -> Tensor:
    u, s, vh = torch.linalg.svd(torch.cat(deltas, 1), full_matrices=False)
    rank = RANK * PARTIES
    parts = []
    for part in vh[:rank].split(IN, 1):
        kept = part.abs().flatten().sort().values[-int(0.4 * part.numel())]
        parts.append(torch.where(part.abs() >= kept, part, 0.0))
    stack = torch.stack(parts)
    agrees = torch.sign(stack) == torch.sign(stack.sum(0))
    mean = (stack * agrees).sum(0) / (agrees & (stack != 0)).sum(0).clamp(min=1)
    return u[:, :rank] * s[:rank] @ mean


ORACLES: dict[str, tuple[Callable[[list[Tensor]], Tensor], dict[str, Any]]] = {
    "iso-c": (dense_iso_c, {}),
    "iso-cts": (dense_iso_cts, {"common_share": 2 / 3}),
    "tsv": (dense_tsv, {}),
    "wudi": (dense_wudi, {}),
    "knots-ties": (dense_knots, {"density": 0.4}),
}


@pytest.mark.parametrize("method", ORACLES)
def test_cores_give_what_full_matrices_give(method: str) -> None:
    factors = parties()
    oracle, options = ORACLES[method]
    expected = oracle(dense(factors))
    found = run(factors, method=method, coefficient=0.7, **options).double()
    assert (found - 0.7 * expected).norm() < 2e-6 * expected.norm()


def objective(merged: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    return torch.stack([((merged - d) @ d.T).square().sum() / d.square().sum() for d in deltas]).sum()


def test_wudi_beats_three_hundred_adam_steps_at_its_own_objective() -> None:
    factors = parties(shared=True)
    deltas = dense(factors)
    found = run(factors, method="wudi").double()
    theta = sum(deltas[1:], deltas[0]).clone().requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=1e-5)  # the published step size
    for _ in range(300):
        optimizer.zero_grad()
        objective(theta, deltas).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    best, reached = float(objective(found, deltas)), float(objective(theta.detach(), deltas))
    assert best < reached
    for direction in torch.randn(5, OUT, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):
        assert float(objective(found + 1e-3 * direction, deltas)) > best * (1 - 1e-9)


def test_wudi_of_orthogonal_row_spaces_is_the_sum() -> None:
    rows = torch.linalg.qr(torch.randn(IN, RANK * PARTIES, generator=torch.Generator().manual_seed(2))).Q.T
    spaces = rows.split(RANK)
    factors = [LowRankDelta(a, item.b, item.scaling) for a, item in zip(spaces, parties(), strict=True)]
    torch.testing.assert_close(run(factors, method="wudi").double(), sum(dense(factors)), rtol=1e-4, atol=1e-4)


def test_a_large_ridge_shrinks_wudi() -> None:
    factors = parties(shared=True)
    plain, ridged = (run(factors, method="wudi", ridge=ridge).norm() for ridge in (0.0, 1.0))
    assert ridged < 0.9 * plain


def test_iso_c_has_a_flat_spectrum_over_the_support_only() -> None:
    singular = torch.linalg.svdvals(run(parties(), method="iso-c").double())
    assert singular[: RANK * PARTIES].std() < 1e-5 * singular[0]
    assert singular[RANK * PARTIES] < 1e-5 * singular[0]


def test_ties_in_core_space_with_full_density_of_one_sign_is_the_mean() -> None:
    factors = parties(shared=True)
    same = [LowRankDelta(factors[0].a, k * factors[0].b) for k in (1.0, 2.0, 3.0)]
    expected = 2 * factors[0].b.double() @ factors[0].a.double()
    found = run(same, method="ties", core=True, density=1.0).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_ties_in_core_space_is_ties_on_the_coordinates() -> None:
    factors = parties()
    core = core_of(factors, [1.0] * PARTIES)
    small = [LowRankDelta(right.T.float(), left.float()) for left, right in zip(core.lefts, core.rights, strict=True)]
    expected = core.q_b @ run(small, method="ties", density=0.3).double() @ core.q_a.T
    found = run(factors, method="ties", density=0.3, core=True).double()
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert (found - run(factors, method="ties", density=0.3)).norm() > 0.1 * expected.norm()
