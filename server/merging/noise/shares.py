"""How much of every adapter is noise: from its statement where there is one, else from its spectrum."""

import math
from collections.abc import Mapping

from dpmerge.common.config.rules import build
from dpmerge.common.config.sections import TrainingSettings
from dpmerge.common.errors import DpmergeError
from dpmerge.common.statement.statement import mechanism_from_statement
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta
from dpmerge.server.merging.low_rank.algebra import singular_values
from dpmerge.server.merging.noise.from_statement import noise_share
from dpmerge.server.merging.noise.noise import Noise

MAX_REPLAY = 1 << 28
"""Coordinates times steps that are replayed for a statement; a step by itself counts as 10,000 coordinates."""
RELATIVE_ZERO = 1e-6  # of the largest singular value; factors are fp32


def noise_of(adapter: Adapter) -> Noise:
    """Return what is known of an adapter's noise.

    A statement gives σ, C, B, T and the optimizer, which is replayed on noise alone (`noise_share`); one of a training
    without privacy gives 0. Without a statement, with one of another version, or with one whose replay would take
    longer than `MAX_REPLAY` allows, it is `estimated`.
    """
    public = adapter.statement.get("training")
    settings = public.get("training") if isinstance(public, Mapping) else None
    if settings is None:
        return estimated(adapter.modules)
    try:
        mechanism = mechanism_from_statement(adapter.statement)
        if mechanism.num_steps * (10_000 + _num_values(adapter)) > MAX_REPLAY:
            return estimated(adapter.modules)
        share = noise_share(mechanism, build(TrainingSettings, settings, "training"), adapter.modules)
    except DpmergeError:  # what another version's statement does not say is estimated, and no reason not to merge
        return estimated(adapter.modules)
    return Noise(share or 0.0, mechanism.num_coordinates, "stated")


def _num_values(adapter: Adapter) -> int:
    return sum(math.prod(item.source_b.shape) for item in adapter.modules.values())


def estimated(modules: Mapping[str, LowRankDelta]) -> Noise:
    """Estimate the noise from the flatness of the spectra: a share of Σ r · median(s)² / Σ ‖τ‖², at most 1.

    The singular values of a tall matrix of independent noise are nearly equal, so that the median one tells all of
    them, while a signal of low rank stands out above it. Flat signal is taken for noise: the estimate is an upper one.
    Ranks that are filled with zeros do not count.

    >>> import torch
    >>> flat, peaked = torch.eye(3), torch.diag(torch.tensor([1.0, 0.1, 0.1]))
    >>> [round(estimated({"q": LowRankDelta(torch.eye(3), b)}).share, 3) for b in (flat, peaked)]
    [1.0, 0.029]
    """
    noise, total, num_coordinates = 0.0, 0.0, 0
    for item in modules.values():
        values = singular_values(item)
        values = values[values > RELATIVE_ZERO * values[:1]]
        if len(values):
            noise += len(values) * float(values.median().square())
            total += float(values.square().sum())
            num_coordinates += len(values) * len(item.b)
    return Noise(min(1.0, noise / total) if total else 0.0, num_coordinates, "estimated")
