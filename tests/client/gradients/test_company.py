"""A record's row, alone and in company: rows come in one shape, none of the rows that fill it is summed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.subspace.basis import random_basis
from dpmerge.client.subspace.coordinates import Coordinates, FullSpace, Subspace
from dpmerge.client.training.train import Classifier, PrivateData, _private_rows
from dpmerge.common.config.federation import LoraSettings, SubspaceSettings
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import attach_lora, load_base
from dpmerge.common.encoder.heads import head_module, zero_linear_head
from dpmerge.common.encoder.split_encoder import SplitEncoder
from dpmerge.common.privacy.mechanism import COMPANY_MARGIN

TEXTS = [" ".join(["good", "bad", "so", "and", "so"][: 1 + n % 5] * (1 + n % 6)) + f" {n}" for n in range(24)]
CAPACITY = 12


@pytest.fixture(scope="module")
def parts():
    base = load_base("minilm-l3")
    encoder = attach_lora(base, LoraSettings(rank=2, layers="last:1"), seed=1)
    split = SplitEncoder(encoder, base.layers, 2)
    model = Classifier(encoder, split, head_module(zero_linear_head(base, ("bad", "good"))), 8.0)
    gradients = PerExampleGradients(model, max_examples=CAPACITY)
    gradients.theta.add_(0.05 * torch.randn(gradients.theta.shape, generator=torch.Generator().manual_seed(1)))
    directions = Subspace(
        gradients,
        SubspaceSettings(k=5, public="none"),
        lambda number: random_basis(gradients.theta.numel(), 5, str(number)),
    )
    return base, split, model, FullSpace(gradients), directions


def rows_of(parts, space: Coordinates, kept: list[int], cached: bool = True) -> dict[int, Tensor]:
    base, split, model, *_ = parts
    encoded = Activations(base, split, [TEXTS[n] for n in kept], max_length=32, cached=cached)
    data = PrivateData(encoded, torch.tensor([n % 2 for n in kept]))
    everybody = torch.arange(len(kept))
    rows = torch.cat(list(_private_rows(everybody, model, data, space)))
    order = torch.cat([batch.records for batch in encoded.batches(everybody, space.capacity)])
    assert len(rows) == len(order) == len(kept)  # one row a record: those that fill a shape are not among them
    return dict(zip([kept[n] for n in order.tolist()], rows, strict=True))


@pytest.mark.parametrize(("place", "cached"), [(3, True), (4, False)])
def test_rows_of_bystanders_stay_within_what_the_margin_covers(parts, place, cached):
    space = parts[place]
    everybody = rows_of(parts, space, list(range(len(TEXTS))), cached)
    for absent in (0, 17):
        others = rows_of(parts, space, [n for n in range(len(TEXTS)) if n != absent], cached)
        for record, row in others.items():
            assert (row - everybody[record]).norm() <= COMPANY_MARGIN / (2 * len(TEXTS)) * row.norm()
