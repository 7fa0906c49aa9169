"""Every size of a batch is tried with the model's own widths, and a machine on which rows differ is told apart."""

import pytest
import torch
from torch import nn

from dpmerge.common.encoder import row_bits
from dpmerge.common.encoder.activations import MOST_TOKENS
from dpmerge.common.encoder.row_bits import rows_are_alike, widths_of


@pytest.fixture(autouse=True)
def _fresh():
    rows_are_alike.cache_clear()
    yield
    rows_are_alike.cache_clear()


def test_widths_are_those_of_all_linears_and_at_least_four():
    model = nn.Sequential(nn.Linear(16, 2), nn.Sequential(nn.Linear(2, 24)), nn.LayerNorm(24))
    assert widths_of(model) == {(4, 16), (24, 4)}


@pytest.mark.parametrize("odd", [96, 336, MOST_TOKENS])
def test_one_size_that_differs_is_found(monkeypatch, odd):
    multiply = torch.Tensor.__matmul__

    def product(rows, matrix):
        result = multiply(rows, matrix)
        return result * (1 + 2.0**-22) if len(rows) == odd else result

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert not rows_are_alike(frozenset({(8, 16)}), 1)


def test_a_row_that_depends_on_its_place_is_found(monkeypatch):
    multiply = torch.Tensor.__matmul__

    def product(rows, matrix):
        result = multiply(rows, matrix)
        result[3] *= 1 + 2.0**-22
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert not rows_are_alike(frozenset({(8, 16)}), 1)


def test_sizes_are_tried_up_to_the_largest_batch(monkeypatch):
    sizes = set()
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda rows, matrix: sizes.add(len(rows)) or multiply(rows, matrix))
    if rows_are_alike(frozenset({(8, 16)}), 1):
        assert sizes == set(range(row_bits.LEAST_TOKENS, MOST_TOKENS + 1, 48))
