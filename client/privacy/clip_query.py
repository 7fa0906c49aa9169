"""The clip norm from the private gradients' own lengths: one noisy histogram, asked before the first step.

    rows D⁻¹Qg [n, k] of one Poisson sample ─ one 1 in the bin of ‖D⁻¹Qg‖, times C₀ ─▶ [n, bins] ─ Privatiser ─▶ C

>>> from dpmerge.client.privacy.noise import FastNoise
>>> mechanism = Mechanism(noise_multiplier=1e-6, l2_clip_norm=1.0, population=4, expected_batch_size=3, num_steps=1,
...                       target_delta=1e-5, num_coordinates=4, noise="fast", num_clip_queries=1)
>>> rows = torch.tensor([[0.3, 0.0, 0.0, 0.4], [0.0, 0.6, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
>>> round(with_private_clip_norm(mechanism, FastNoise(), [rows]).l2_clip_norm, 4)
0.7071

References:
    Differentially private quantiles of update norms: Andrew et al. 2019, arXiv 1905.03871.

Deviations:
    There each step spends a noisy bit, whether a norm is below the C of the moment, and C follows by gradient descent.
    Here one query before training spends as much as one step, and C stays: one charge that is easy to state, one grid
    of integers for secure noise, no statistic besides the gradient in any step. It does not follow norms that shrink.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpmerge.client.privacy.noise import NoiseSource
from dpmerge.client.privacy.privatiser import Privatiser
from dpmerge.common.privacy.clip_grid import ClipGrid
from dpmerge.common.privacy.mechanism import COMPANY_MARGIN, Mechanism
from dpmerge.common.statement.subspace_part import SUBSPACE_CLIP_QUANTILE


def with_private_clip_norm(mechanism: Mechanism, noise: NoiseSource, rows: Iterable[Tensor]) -> Mechanism:
    """Ask the mechanism's clip query, and return the mechanism with the clip norm that it names.

    Args:
        mechanism: With a clip query; its clip norm C₀ is the middle of the grid.
        noise: The training's.
        rows: What the steps will clip, of the units of one Poisson sample: [·, k] fp32.

    Raises:
        ValueError: If the mechanism has no such query.

    Guarantees:
        Unit and neighbours: the mechanism's. A unit adds at most C₀ to one bin, or nothing if its row is not finite, so
        the histogram's L2 sensitivity is C₀; noise and sampling are those of a step, whose privatiser this is. The clip
        norm is a function of the answer and of public numbers.
    """
    middle = mechanism.l2_clip_norm
    if not mechanism.num_clip_queries or middle is None:
        raise ValueError("Expected num_clip_queries=1 in a private mechanism.")
    grid = ClipGrid.around(middle, mechanism.num_coordinates)
    privatiser = Privatiser(mechanism, len(grid.edges), noise)
    height = middle * (1 - COMPANY_MARGIN)  # what the privatiser leaves of a longer row: a unit counts as one
    for some in rows:
        privatiser.accumulate(one_hot(some, grid.edges, height))
    counts = privatiser.finish().double() * (mechanism.expected_batch_size / height)
    noise_std = mechanism.noise_multiplier * middle / height
    found = grid.quantile(counts.tolist(), noise_std=noise_std, share=SUBSPACE_CLIP_QUANTILE)
    return replace(mechanism, l2_clip_norm=found)


def one_hot(rows: Tensor, edges: tuple[float, ...], height: float) -> Tensor:
    """Return `height` in the bin of each row's norm, else 0, [n, bins] fp32; nothing but 0 where a row is not finite.

    >>> one_hot(torch.tensor([[0.3, 0.3], [9.0, 0.0], [float("nan"), 0.0]]), (0.5, 1.0), 3.0)
    tensor([[3., 0.],
            [0., 3.],
            [0., 0.]])
    """
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    bins = torch.bucketize(norms, torch.tensor(edges, dtype=torch.float64, device=rows.device))
    hot = nn.functional.one_hot(bins.clamp_max(len(edges) - 1), len(edges))
    return hot * torch.where(norms.isfinite(), height, 0.0).float()[:, None]
