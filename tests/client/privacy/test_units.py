"""A user as the unit of privacy: one clipped row each, against one user at a time through plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.privacy.noise import FastNoise
from dpmerge.client.privacy.sampling import PoissonSampler
from dpmerge.client.privacy.units import Users
from dpmerge.client.training.train import Classifier, PrivateData, train
from dpmerge.common.config.federation import LoraSettings, TrainingSettings
from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import attach_lora, load_base
from dpmerge.common.encoder.heads import head_module, zero_linear_head
from dpmerge.common.encoder.split_encoder import SplitEncoder
from dpmerge.common.privacy.mechanism import COMPANY_MARGIN, Mechanism

TEXTS = (
    "a fine and quiet book",
    "bad",
    "this was, in the end, a long and winding disappointment that nobody should have to sit through twice",
    "the best evening of the year, with friends",
    "no",
    "I would buy it again, without any doubt",
    "it broke after two days and the shop would not take it back, whatever I said or wrote to them",
    "good value",
    "never again",
    "a small wonder that works every single time",
)
LABELS = (1, 0, 0, 1, 0, 1, 0, 1, 0, 1)
USERS = (0, 1, 0, 0, 2, 0, 1, 0, 3, 0)  # one user with six records of four lengths, one with two, two with one
NUM_USERS = 4


@pytest.fixture(scope="module")
def parts():
    """A small real encoder with LoRA and a linear head, both trained."""
    base = load_base("minilm-l3")
    encoder = attach_lora(base, LoraSettings(rank=2, layers="last:1", targets=("query", "value")), seed=1)
    split = SplitEncoder(encoder, base.layers, 2)
    return base, split, Classifier(encoder, split, head_module(zero_linear_head(base, ("bad", "good"))), 10.0)


def data_of(parts, keep: Sequence[int]) -> PrivateData:
    """The records of the users in `keep`, renumbered."""
    base, split, _ = parts
    chosen = [record for record, user in enumerate(USERS) if user in keep]
    activations = Activations(base, split, [TEXTS[record] for record in chosen], max_length=32)
    labels = torch.tensor([LABELS[record] for record in chosen])
    return PrivateData(activations, labels, Users([keep.index(USERS[record]) for record in chosen]))


def clipped_sum(parts, data: PrivateData, clip: float, capacity: int) -> Tensor:
    """The sum [P] that one step of `train` descends by: every user is sampled, noise is next to none."""
    settings = TrainingSettings(optimizer="sgd", learning_rate=1.0, sharpness="none", num_steps=1)
    mechanism = Mechanism(
        noise_multiplier=1e-9,
        l2_clip_norm=clip,
        population=NUM_USERS,
        expected_batch_size=NUM_USERS,
        num_steps=1,
        target_delta=1e-5,
        noise="fast",
        privacy_unit="user",
    )
    with PerExampleGradients(parts[2], max_examples=capacity) as gradients:
        gradients.theta.zero_()
        train(parts[2], data, gradients, (), mechanism, settings, PoissonSampler(1.0, data.num_units), FastNoise(1))
        return -gradients.theta * NUM_USERS


def oracle(parts, data: PrivateData, clip: float, user_of_record: Sequence[int]) -> Tensor:
    """Clip each user's mean gradient, taken by plain autograd over the user's own records, and add up."""
    model = parts[2]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.zero_()
    total = torch.zeros(sum(parameter.numel() for parameter in trained))
    for user in sorted(set(user_of_record)):
        records = torch.tensor([record for record, owner in enumerate(user_of_record) if owner == user])
        losses = [
            nn.functional.cross_entropy(
                model(batch.hidden, batch.mask)[: len(batch.records)], data.labels[batch.records], reduction="sum"
            )
            for batch in data.activations.batches(records, 64)
        ]
        gradients = torch.autograd.grad(torch.stack(losses).sum() / len(records), trained)
        row = torch.cat([gradient.flatten() for gradient in gradients])
        total += row * min(1.0, clip * (1 - COMPANY_MARGIN) / float(row.norm()))
    return total


@pytest.mark.parametrize("capacity", [1, 2, 3, 64])
@pytest.mark.parametrize("clip", [1e-3, 0.5, 100.0])
def test_a_step_equals_one_user_at_a_time(parts, clip, capacity):
    data = data_of(parts, range(NUM_USERS))
    expected = oracle(parts, data, clip, USERS)
    found = clipped_sum(parts, data, clip, capacity)
    assert (found - expected).norm() <= 1e-6 * expected.norm() + 1e-6 * clip  # clipping keeps a margin of 2⁻²⁰


def test_a_user_split_over_physical_batches_is_clipped_once(parts):
    data = data_of(parts, [0])
    for capacity in (1, 2, 64):
        assert clipped_sum(parts, data, 1e-3, capacity).norm().item() == pytest.approx(
            1e-3 * (1 - COMPANY_MARGIN), rel=1e-5
        )


@pytest.mark.parametrize("user", range(NUM_USERS))
def test_without_a_user_the_sum_changes_by_at_most_the_clip_norm(parts, user):
    clip = 0.05
    others = [other for other in range(NUM_USERS) if other != user]
    with_user, without = (
        clipped_sum(parts, data_of(parts, keep), clip, 3) for keep in (list(range(NUM_USERS)), others)
    )
    assert (with_user - without).norm().item() == pytest.approx(
        clip * (1 - COMPANY_MARGIN), rel=1e-4
    )  # all four are longer, so clipped


def test_a_record_that_overflows_takes_out_its_own_user_only(parts, monkeypatch):
    expected = clipped_sum(parts, data_of(parts, [0, 2, 3]), 0.5, 3)
    original = Activations.batches

    def poisoned(self, records, capacity):
        for batch in original(self, records, capacity):
            batch.hidden[batch.filled == USERS.index(1)] = float("inf")
            yield batch

    monkeypatch.setattr(Activations, "batches", poisoned)
    found = clipped_sum(parts, data_of(parts, range(NUM_USERS)), 0.5, 3)
    assert (found - expected).norm() <= 2e-6 * expected.norm()


def test_data_of_another_unit_than_accounted_is_refused(parts):
    records = replace(data_of(parts, [0, 1]), users=None)
    with pytest.raises(ValueError, match="privacy_unit='user'"):
        clipped_sum(parts, records, 1.0, 4)


def test_nobody_sampled_gives_no_rows():
    users = Users([0, 0, 1])
    assert len(users) == 2
    assert list(users.rows(torch.empty(0, dtype=torch.long), 4, lambda _records: [])) == []
