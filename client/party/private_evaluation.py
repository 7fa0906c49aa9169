"""Accuracy on private test data as a noisy count: a query like any other, charged to the data set's ledger first.

Each test record adds 1 to one of two counts, right or wrong, so adding or removing one record changes the pair by 1 in
norm, and both counts cost what one would. That spares declaring how many test records there are.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

import rfc8785
import torch

from dpmerge.client.budget.policy import Account
from dpmerge.client.privacy.noise import SecureNoise
from dpmerge.client.privacy.privatiser import Privatiser
from dpmerge.common.privacy.accounting import epsilon_pld
from dpmerge.common.privacy.calibration import calibrate

QUERY = "private evaluation"


@dataclass(frozen=True, kw_only=True)
class PrivateAccuracy:
    """What may be told of a model's accuracy on private records.

    Attributes:
        accuracy: In [0, 1]; None where the noisy counts say nothing (no record left under the noise).
        noise_standard_error: Of `accuracy`, from the noise alone; None likewise.
        num_right: Noisy count.
        num_wrong: Noisy count.
        count_noise_std: Standard deviation of the noise in each count, in records.
        epsilon: Spent, at `delta`, for any one record added or removed.
        delta: δ of that.
    """

    accuracy: float | None
    noise_standard_error: float | None
    num_right: float
    num_wrong: float
    count_noise_std: float
    epsilon: float
    delta: float


def private_accuracy(
    is_right: Sequence[bool], *, model_sha256: str, population: int, epsilon: float, delta: float, account: Account
) -> PrivateAccuracy:
    """Charge the query, then return the noisy accuracy. Asking again is another charge, even of the same model.

    Args:
        is_right: Per private test record, whether the model was right.
        model_sha256: Hash of the model that was evaluated; public.
        population: Declared, public number of records.
        epsilon: What the answer may cost.
        delta: δ of that.
        account: Where it is charged: that of the data set that the test records belong to.

    Raises:
        DpmergeError: DPM-506 if the cap leaves too little, DPM-501 if no noise meets the target. Nothing is drawn then.

    Guarantees:
        Unit: one test record. Neighbours: add or remove one. L2 sensitivity of the pair of counts: 1. One Gaussian
        query with q = 1, by the same privatiser and noise as training.
    """
    mechanism = calibrate(
        target_epsilon=epsilon,
        target_delta=delta,
        population=population,
        expected_batch_size=population,  # every record is asked: q = 1
        num_steps=1,
        l2_clip_norm=1.0,
        noise="secure",
        num_coordinates=2,
    )
    spent = epsilon_pld(mechanism)
    charge = {**asdict(mechanism), "epsilon": spent, "query": QUERY, "model_sha256": model_sha256}
    reservation = account.ledger.reserve(
        dataset=account.dataset, binding=sha256(model_sha256.encode()).hexdigest(), charge=charge, cap=account.cap
    )
    noise = SecureNoise()
    privatiser = Privatiser(mechanism, 2, noise)
    right = torch.tensor(list(is_right), dtype=torch.bool)
    privatiser.accumulate(torch.stack([right, ~right], dim=1).float())
    num_right, num_wrong = (population * privatiser.finish().double()).tolist()
    noise.erase()
    told = _told(num_right, num_wrong, mechanism.noise_multiplier, spent, delta)
    account.ledger.released(reservation, sha256(rfc8785.dumps(asdict(told))).hexdigest())
    return told


def _told(num_right: float, num_wrong: float, noise_std: float, epsilon: float, delta: float) -> PrivateAccuracy:
    """Turn noisy counts into a rate; the error is that of a ratio to first order, (r² + w²)^½ σ / n²."""
    total = num_right + num_wrong
    means_something = total > 2 * math.sqrt(2) * noise_std  # the total's noise has standard deviation √2·σ
    rate = min(1.0, max(0.0, num_right / total)) if means_something else None
    error = math.hypot(num_right, num_wrong) * noise_std / total**2 if means_something else None
    return PrivateAccuracy(
        accuracy=rate,
        noise_standard_error=error,
        num_right=num_right,
        num_wrong=num_wrong,
        count_noise_std=noise_std,
        epsilon=epsilon,
        delta=delta,
    )
