"""The block Krylov iteration against a full SVD, on spectra with and without an edge, and where it is used."""

import math

import pytest
import torch
from torch import Tensor

from dpmerge.server.merging.low_rank import algebra, krylov
from dpmerge.server.merging.low_rank.algebra import factorise

ROWS, COLUMNS, RANK = 320, 500, 10


def noise(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def spectrum(values: Tensor) -> Tensor:
    left, right = torch.linalg.qr(noise(ROWS, ROWS))[0], torch.linalg.qr(noise(COLUMNS, ROWS).double())[0]
    return ((left.double() * values) @ right.T).float()


MATRICES = {
    "flat": noise(),
    "sparse": noise() * (noise().abs() > 1.5),
    "steep": spectrum(0.5 ** torch.arange(ROWS)),
    "edge": noise() + 40 * spectrum((torch.arange(ROWS) < 4).float()),
    "equal values": spectrum(torch.ones(ROWS)),
    "lower rank": spectrum((torch.arange(ROWS) < 3).float()),
    "a long column": noise() + 1e4 * (torch.arange(COLUMNS) == 7),
    "zero": torch.zeros(ROWS, COLUMNS),
    "tiny": 1e-28 * noise(),
    "huge": 1e30 * noise(),
}


@pytest.fixture(autouse=True)
def small_matrices_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(krylov, "LARGE", 100)
    monkeypatch.setattr(algebra, "_singular_subspace", None)  # no test may fall back to it


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", MATRICES)
def test_it_holds_nearly_what_the_best_subspace_holds(case: str, transposed: bool) -> None:
    matrix = MATRICES[case].T.contiguous() if transposed else MATRICES[case]
    item, lost = factorise(matrix, RANK)
    values = torch.linalg.svdvals(matrix.double())
    whole, best = float(values.norm()), float(values[RANK:].norm())
    assert (item.rank, item.shape) == (RANK, tuple(matrix.shape))
    if not whole:
        assert (lost, item.delta().count_nonzero()) == (0.0, 0)
        return
    left_out = float((matrix.double() - item.b.double() @ item.a.double()).norm())
    assert lost / whole == pytest.approx(left_out / whole, rel=1e-4, abs=2e-7)
    assert left_out**2 <= best**2 + 1e-4 * whole**2
    orthonormal = (item.a if transposed else item.b.T).double()
    wanted = torch.eye(RANK).double() if case != "lower rank" else torch.diag((torch.arange(RANK) < 3).double())
    if case == "steep":  # directions below fp32's rounding may be left out
        wanted = torch.diag((orthonormal @ orthonormal.T).diagonal().round())
    torch.testing.assert_close(orthonormal @ orthonormal.T, wanted, rtol=0, atol=1e-6)


def test_the_same_matrix_gives_the_same_bits() -> None:
    (one, lost), (other, again) = factorise(noise(), RANK), factorise(noise(), RANK)
    assert torch.equal(one.a, other.a)
    assert torch.equal(one.b, other.b)
    assert lost == again


def test_directions_come_largest_first() -> None:
    matrix = MATRICES["edge"]
    lengths = (krylov.leading_subspace(matrix, RANK).T @ matrix.double()).norm(dim=1)
    assert bool((lengths.diff() <= 1e-4 * lengths[0]).all())


@pytest.mark.parametrize(("large", "rank"), [(1024, 8), (100, 200)])
def test_small_matrices_and_many_directions_are_decomposed_exactly(
    large: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(krylov, "LARGE", large)
    monkeypatch.setattr(algebra, "leading_subspace", None)
    matrix = noise()
    _, lost = factorise(matrix, rank)
    assert lost == pytest.approx(math.hypot(*torch.linalg.svdvals(matrix.double())[rank:].tolist()), rel=1e-6)
