"""From per-example gradients to one privatised gradient: clip jointly, sum, add noise once, divide by the public B.

>>> from dpmerge.client.privacy.noise import FastNoise
>>> mechanism = Mechanism(noise_multiplier=1e-6, l2_clip_norm=1.0, population=4, expected_batch_size=2, num_steps=1,
...                       target_delta=1e-5, noise="fast")
>>> privatiser = Privatiser(mechanism, 2, FastNoise())
>>> privatiser.accumulate(torch.tensor([[30.0, 40.0], [0.1, 0.0], [float("nan"), 1.0]]))
>>> [round(value, 3) for value in privatiser.finish().tolist()]
[0.35, 0.4]
"""

from typing import Literal

import torch
from torch import Tensor

from dpmerge.client.privacy.noise import NoiseSource
from dpmerge.common.privacy.mechanism import COMPANY_MARGIN, Mechanism

Query = Literal["descent", "ascent"]

_ROUNDING = 2.0**-20  # of C: fp32's rounding of a scale and a product (2⁻²³ together), float64's of a norm
_SMALLEST_SCALE = 2.0**-100  # below it fp32 rounds scales coarsely; a row that needs one is treated as not finite


class Privatiser:
    """Answers one query per logical step, whatever the number of physical batches it arrives in.

    Guarantees:
        Unit and neighbours: the mechanism's; each row is one unit's gradient. L2 sensitivity of the sum before noise:
        at most `l2_clip_norm`, for every input, by margin; the unit's own row is at most (1 − `COMPANY_MARGIN`) of it.
        With secure noise the sum is of integers (each row scaled and truncated toward zero onto a grid of σ·C/2²⁰) and
        exact in int64, so that this holds for the computed sum too, and the split into physical batches cannot change a
        bit. Noise is added exactly once per `finish`, on empty batches too. A row that is not finite counts as zero,
        silently: any sign of it would tell of private data.

    Args:
        mechanism: The accounted mechanism.
        num_coordinates: P, length of the trainable vector.
        noise: A source of the mechanism's noise mode; None only if the mechanism is not private.
        query: "ascent" takes the mechanism's ascent noise ("sam" only).
        device: Where gradients live.

    Raises:
        ValueError: If the noise or the query is not what the mechanism was accounted with.

    Deviations:
        Rows whose norm exceeds about 2¹⁰⁰·C count as not finite.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        num_coordinates: int,
        noise: NoiseSource | None,
        *,
        query: Query = "descent",
        device: str | torch.device = "cpu",
    ) -> None:
        sigma = mechanism.noise_multiplier if query == "descent" else mechanism.ascent_noise_multiplier
        if sigma is None:
            raise ValueError(f"Expected sharpness={mechanism.sharpness!r} to be 'sam' for an ascent query.")
        mode = noise.mode if noise is not None else None
        if mechanism.private and mode != mechanism.noise:
            raise ValueError(f"Expected noise of mode {mechanism.noise!r}, as accounted, not {mode!r}.")
        self._secure = mechanism.private and mechanism.noise == "secure"
        if self._secure and num_coordinates > mechanism.num_coordinates:
            accounted = mechanism.num_coordinates
            raise ValueError(f"Expected num_coordinates={num_coordinates} to be at most {accounted}, as accounted.")
        self._noise = noise if mechanism.private else None
        self._clip = mechanism.l2_clip_norm
        self._batch_size = mechanism.expected_batch_size
        self._step = 1.0  # what one unit of the running total is worth
        self._noise_step = 0.0  # what one unit of the source's noise is worth
        if self._noise is not None and self._clip is not None:
            self._noise_step = sigma * self._clip / self._noise.steps_per_sigma
            self._step = self._noise_step if self._secure else 1.0
        self._total = torch.zeros(num_coordinates, dtype=torch.int64 if self._secure else torch.float64, device=device)

    def accumulate(self, grads: Tensor) -> None:
        """Add a physical batch's clipped gradients to the step's sum.

        Args:
            grads: Per-example gradients over all trainable coordinates, [n, P] fp32, n ≥ 0. May be overwritten.

        Raises:
            ValueError: If shape or dtype differ.
        """
        if grads.ndim != 2 or grads.shape[1] != len(self._total) or grads.dtype != torch.float32:
            raise ValueError(
                f"Expected fp32 grads of shape [n, {len(self._total)}], not {grads.dtype} {[*grads.shape]}."
            )
        if not len(grads):
            return
        scales = self._scales(grads)
        if self._secure:
            for row, scale in zip(grads, scales.tolist(), strict=True):
                if scale:
                    self._total += row.mul_(scale).to(torch.int32)  # the cast truncates toward zero; |value| ≤ 2²⁴
            return
        void = scales == 0
        if void.any():
            grads[void] = 0  # 0·inf is nan
        self._total += scales @ grads

    def finish(self) -> Tensor:
        """Return (clipped sum + noise)/B, [P] fp32, and start the next step."""
        total = self._total.clone()
        if self._noise is not None:
            noise = self._noise.sample(len(total)).to(total.device)
            total += noise if self._secure else noise * self._noise_step
        self._total.zero_()
        return (total.double() * (self._step / self._batch_size)).float()

    def _scales(self, grads: Tensor) -> Tensor:
        """Return what each row is multiplied by: 1/step if short enough, less if not, 0 if not finite ([n] fp32).

        Norms are float64 sums of fp32 squares: no finite row overflows, and their error is far inside the margin.
        Row by row they cost a sixth of one reduction with a cast, which torch does not vectorise.
        """
        norms = torch.stack([torch.linalg.vector_norm(row, dtype=torch.float64) for row in grads])
        scales = torch.full_like(norms, 1 / self._step)
        if self._clip is not None:
            scales = torch.minimum(scales, self._clip * (1 - COMPANY_MARGIN - _ROUNDING) / self._step / norms)
        return torch.where(norms.isfinite() & (scales >= _SMALLEST_SCALE), scales, 0.0).float()
