"""Bases against torch's SVD of the whole matrix, and what no basis can be made of."""

import os

import pytest
import torch

from dpmerge.client.subspace import basis_cache
from dpmerge.client.subspace.basis import Basis, StreamingSvd, cholesky_qr, random_basis
from dpmerge.client.subspace.basis_cache import cache_path, cached_basis, load_basis, save_basis
from dpmerge.common.errors import DpmergeError


def gradients(n=40, width=90, rank=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.logspace(0, -2, rank)
    return (torch.randn(n, rank, generator=generator) * spectrum) @ torch.randn(rank, width, generator=generator)


def stream(rows, k, chunk=7, **options) -> Basis:
    svd = StreamingSvd(rows.shape[1], k, **options)
    for part in rows.split(chunk):
        svd.add(part.clone())
    return svd.finish()


def test_directions_are_the_right_singular_vectors():
    rows = gradients()
    basis = stream(rows, 8)
    _, singular, right = torch.linalg.svd(rows.double(), full_matrices=False)
    assert (basis.rows.double() @ basis.rows.double().T - torch.eye(8)).abs().max() < 1e-6
    overlap = (basis.rows.double() @ right[:8].T).abs()
    torch.testing.assert_close(overlap, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-4)
    torch.testing.assert_close(basis.energies, singular[:8].square() / len(rows), rtol=1e-5, atol=0)
    torch.testing.assert_close(basis.coordinates, rows.double() @ basis.rows.double().T, rtol=1e-3, atol=1e-4)
    assert (basis.rows.gather(1, basis.rows.abs().argmax(1, keepdim=True)) > 0).all()
    assert stream(rows, 8).sha256 == basis.sha256


def test_beyond_its_budget_it_still_finds_what_matters():
    """Rows past the budget are folded in; with a falling spectrum the kept half loses next to nothing."""
    rows = gradients(n=200)
    exact, folded = stream(rows, 4), stream(rows, 4, memory_budget_bytes=60 * 4 * rows.shape[1])
    assert torch.linalg.svdvals(exact.rows @ folded.rows.T).min() > 0.9999
    torch.testing.assert_close(folded.energies, exact.energies, rtol=1e-4, atol=0)
    torch.testing.assert_close(folded.coordinates, rows.double() @ folded.rows.double().T, rtol=1e-2, atol=1e-2)


def test_more_directions_than_the_gradients_span_are_refused():
    with pytest.raises(
        DpmergeError, match=r"DPM-505: subspace.k = 31 .* of 40 public gradients that span 30; .*most 30"
    ):
        stream(gradients(), 31)
    with pytest.raises(DpmergeError, match=r"DPM-505.*span 0; give other public texts"):
        stream(torch.zeros(5, 9), 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_public_gradient_that_is_not_finite_is_refused(value):
    rows = gradients()
    rows[20, 3] = value
    with pytest.raises(DpmergeError, match="DPM-505: a public gradient is not finite"):
        stream(rows, 4)


def test_random_directions_come_from_their_seed():
    first = random_basis(50, 10, "7|0")
    assert torch.equal(first.rows, random_basis(50, 10, "7|0").rows)
    assert not torch.equal(first.rows, random_basis(50, 10, "7|1").rows)
    torch.testing.assert_close(first.rows @ first.rows.T, torch.eye(10), rtol=0, atol=1e-6)
    assert random_basis(10, 10, "7").rows.shape == (10, 10)
    with pytest.raises(DpmergeError, match=r"DPM-505: subspace.k = 11 exceeds the 10 trainable coordinates"):
        random_basis(10, 11, "7")


def test_orthonormalising_keeps_the_order_of_directions():
    rows = gradients(n=3)
    result = cholesky_qr(rows)
    first = rows[0] / rows[0].norm()
    torch.testing.assert_close(result[0], first * first[first.abs().argmax()].sign(), rtol=1e-5, atol=1e-6)


IDENTITY = {"base model": "ab", "LoRA layout": "cd"}


def test_a_stored_basis_comes_back_and_is_held_to_what_it_was_made_of(tmp_path):
    basis, path = stream(gradients(), 4), tmp_path / "basis.safetensors"
    save_basis(path, basis, IDENTITY)
    loaded = load_basis(path, IDENTITY)
    assert torch.equal(loaded.rows, basis.rows)
    assert torch.equal(loaded.coordinates, basis.coordinates)
    assert loaded.rows.data_ptr() % 64 == 0  # else the same basis would train to other last bits
    for part in IDENTITY:
        with pytest.raises(DpmergeError, match=f"DPM-505: .* is of another {part}; remove") as refusal:
            load_basis(path, IDENTITY | {part: "ef"})
        assert str(tmp_path) not in str(refusal.value)  # it goes to the server
    data = path.read_bytes()
    for damaged, reason in ((data[:-1] + bytes([data[-1] ^ 1]), "is damaged"), (data[:-5], "cannot be read")):
        path.write_bytes(damaged)
        with pytest.raises(DpmergeError, match=f"DPM-505: .* {reason}; remove"):
            load_basis(path, IDENTITY)


def test_the_cache_makes_a_basis_once(tmp_path, monkeypatch):
    monkeypatch.setattr(basis_cache, "cache_root", lambda: tmp_path / "cache")
    made = []

    def make():
        made.append(stream(gradients(), 4))
        return made[-1]

    first, second = cached_basis(IDENTITY, make), cached_basis(IDENTITY, make)
    assert len(made) == 1
    assert torch.equal(first.rows, second.rows)
    cached_basis(IDENTITY | {"base model": "another"}, make)
    assert len(made) == 2


def test_the_cache_forgets_what_was_used_longest_ago(tmp_path, monkeypatch):
    monkeypatch.setattr(basis_cache, "cache_root", lambda: tmp_path)
    folder, made = tmp_path / "subspaces", []

    def take(name):
        def make():
            made.append(name)
            return stream(gradients(), 4)

        cached_basis(IDENTITY | {"base model": name}, make)
        return cache_path(IDENTITY | {"base model": name})

    files = [take(name) for name in "abc"]
    for age, file in enumerate(files):
        os.utime(file, (1000 + age, 1000 + age))
    take("a")  # found, and used last from now on
    size = files[0].stat().st_size
    monkeypatch.setattr(basis_cache, "MAX_BYTES", 3 * size)
    fourth = take("d")
    assert set(folder.iterdir()) == {files[0], files[2], fourth}
    monkeypatch.setattr(basis_cache, "MAX_BYTES", size - 1)
    assert set(folder.iterdir()) == {files[0], files[2], fourth}  # no basis was added
    assert take("e").exists()  # larger than all that is allowed, but in use
    assert len(list(folder.iterdir())) == 1
    take("a")
    assert made == ["a", "b", "c", "d", "e", "a"]


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where a folder would be")
    monkeypatch.setattr(basis_cache, "cache_root", lambda: tmp_path / "cache")
    assert cached_basis(IDENTITY, lambda: stream(gradients(), 4)).rows.shape == (4, 90)
