"""The coordinates that are trained: all of θ, or a few directions of it, θ = θ_ref + Qᵀc.

Both kinds give the training loop the same things: rows to clip, a vector to step, and the way back to θ. Rows are
projected before they are clipped, so that clip norm and noise are those of k coordinates:

    rows [n, P] ─ (Qᵀ, then D⁻¹) ─▶ [n, k] ─ Privatiser ─▶ D·g̃ [k] ─ optimizer ─▶ c ─▶ θ = θ_ref + Qᵀc

Guarantees: Q and D are functions of public data, public seeds and earlier privatised gradients; with them fixed, one
unit changes the sum of projected, clipped rows by at most C, as in the full space.

References: projected DP-SGD, arXiv 2007.03813; DP-GRAPE, arXiv 2506.15588 (random projections).

Deviations: the projection comes before clipping, and the basis is taken from LoRA's coordinates at the shared start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.client.subspace.basis import Basis
from dpmerge.common.config.federation import SubspaceSettings
from dpmerge.common.errors import DpmergeError

SMALLEST_SCALE = 1e-2
"""Least entry of D before it is normalised, relative to the largest: no direction is left without noise of its own."""

_BLOCK = 4096
"""Columns of gradients that are gathered for one product, so that they stay in a processor's cache."""

_ROWS = 48
"""Gradients in one product: always as many, filled up with zeros, or a row's projection would depend on its company."""

MakeBasis = Callable[[int], Basis]
"""Makes the basis number 0, 1, … at the θ of the moment, from public data and seeds alone."""


@dataclass(frozen=True)
class SubspaceState:
    """What a checkpoint holds of a subspace.

    Attributes:
        coordinates: c [k].
        reference: θ_ref [P].
        history: Privatised gradients since the basis was made [steps, k].
        scales: D [k].
        basis_sha256: Hash of the basis in use.
    """

    coordinates: Tensor
    reference: Tensor
    history: Tensor
    scales: Tensor
    basis_sha256: str


class FullSpace:
    """Every coordinate of θ is trained."""

    def __init__(self, gradients: PerExampleGradients) -> None:
        self._gradients = gradients

    @property
    def vector(self) -> Tensor:
        """What the optimizer steps: θ [P] itself."""
        return self._gradients.theta

    @property
    def capacity(self) -> int:
        """The largest number of examples that `compute` takes at once."""
        return self._gradients.capacity

    def compute(self, losses: Callable[[], Tensor]) -> Tensor:
        """Return every example's gradient [n, P]."""
        return self._gradients.compute(losses)

    def rows(self, gradients: Iterable[Tensor]) -> Iterable[Tensor]:
        """Return what is clipped of each unit, from its gradient: the gradient."""
        return gradients

    def gradient(self, answer: Tensor) -> Tensor:
        """Return the gradient of `vector` that the mechanism's answer stands for."""
        return answer

    def lift(self, step: Tensor) -> Tensor:
        """Return a step of `vector` as a step of θ [P]."""
        return step

    def project(self, gradient: Tensor) -> Tensor:
        """Return a gradient [P] of θ as one of `vector`."""
        return gradient

    def place(self, gradient: Tensor) -> None:
        """Move θ to where the step along `gradient` took `vector`: it is there."""

    def check_storage(self, stepped: Iterable[Tensor]) -> None:
        """Refuse to go on if optimizer, θ and model no longer share one storage (DPM-503)."""
        self._gradients.check_storage(stepped)

    def refresh(self, step: int, noise_std: float) -> bool:
        """Take new directions if `step` (from 0) is due for them, and tell whether; never."""
        return False

    def state(self) -> SubspaceState | None:
        """Return what a checkpoint needs besides θ."""
        return None

    def restore(self, step: int, theta: Tensor, state: SubspaceState | None) -> None:
        """Go back to a checkpoint's θ [P], after `step` steps."""
        if state is not None:
            raise ValueError("Expected state=None: the checkpoint is of a subspace.")
        self._gradients.theta.copy_(theta)


class Subspace:
    """k directions of θ are trained; see the module.

    Args:
        gradients: Per-example gradients of the model, and θ at the start.
        settings: Refresh and allocation.
        make_basis: Called with 0 at once, which tells k, and with 1, 2, … at each refresh.

    Raises:
        DpmergeError: DPM-505 if the basis cannot be made.
    """

    def __init__(self, gradients: PerExampleGradients, settings: SubspaceSettings, make_basis: MakeBasis) -> None:
        self._gradients, self._settings, self._make_basis = gradients, settings, make_basis
        self._reference = gradients.theta.clone()
        basis = make_basis(0)
        k = len(basis.rows)
        self.vector = torch.zeros(k, dtype=gradients.theta.dtype, device=gradients.theta.device)
        self._history = self.vector.new_empty(0, k)
        energies = basis.energies if settings.allocation == "public" else None
        self._take(basis, noise_scales(k, energies))

    @property
    def capacity(self) -> int:
        """The largest number of examples that `compute` takes at once."""
        return self._gradients.capacity

    @property
    def basis(self) -> Basis:
        """The directions in use."""
        return self._basis

    @property
    def scales(self) -> Tensor:
        """D: how noise is spread over the directions [k], Σd² = k."""
        return self._scales

    def compute(self, losses: Callable[[], Tensor]) -> Tensor:
        """Return every example's gradient [n, P]."""
        return self._gradients.compute(losses)

    def rows(self, gradients: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield what is clipped of each unit, D⁻¹Qg [n, k], from its gradients [n, P].

        Many are projected at once: Q, which no cache holds, is read once for all of them.
        """
        most = min(_ROWS, self.capacity)
        waiting: list[Tensor] = []
        for some in gradients:
            rest = some
            while len(rest):
                missing = most - sum(map(len, waiting))
                waiting.append(rest[:missing])
                rest = rest[missing:]
                if sum(map(len, waiting)) == most:
                    yield self._projected(waiting)
                    waiting.clear()
        if waiting:
            yield self._projected(waiting)

    def gradient(self, answer: Tensor) -> Tensor:
        """Return the gradient [k] of c that the mechanism's answer stands for: D times it."""
        return self._scales * answer

    def lift(self, step: Tensor) -> Tensor:
        """Return a step [k] of c as a step of θ [P], of the same length."""
        return step @ self._basis.rows

    def project(self, gradient: Tensor) -> Tensor:
        """Return a gradient [P] of θ as one of c [k]."""
        return self._basis.rows @ gradient

    def place(self, gradient: Tensor) -> None:
        """Move θ to θ_ref + Qᵀc, where the step along the privatised `gradient` [k] took c."""
        self._gradients.theta.copy_(self._reference + self.lift(self.vector))
        if self._settings.allocation == "history":
            self._history = torch.cat([self._history, gradient[None]])

    def check_storage(self, stepped: Iterable[Tensor]) -> None:
        """Refuse to go on if the optimizer does not step c, or the model does not share θ's storage (DPM-503)."""
        if not any(one is self.vector for one in stepped):
            raise DpmergeError(
                "DPM-503",
                "the optimizer does not step the subspace's coordinates",
                "build the optimizer over [coordinates.vector]",
            )
        self._gradients.check_storage([self._gradients.theta])

    def clip_norm(self, quantile: float) -> float:
        """Return a quantile of ‖D⁻¹Qg‖ over the public gradients, to four digits: a clip norm that costs nothing."""
        norms = (self._basis.coordinates / self._scales.cpu()).norm(dim=1)
        return float(f"{float(norms.quantile(quantile)):.4g}")

    def refresh(self, step: int, noise_std: float) -> bool:
        """Take new directions if `step` (from 0) is due for them, and tell whether: c is 0 then, and θ where it was.

        Args:
            step: The step to come.
            noise_std: Standard deviation of the noise in each coordinate of the mechanism's answers.
        """
        every = self._settings.refresh_every_steps
        if every == 0 or step == 0 or step % every:
            return False
        old, old_scales = self._basis, self._scales
        basis = self._make_basis(step // every)
        energies = None
        if self._settings.allocation == "public":
            energies = basis.energies
        elif self._settings.allocation == "history":
            turn = old.rows @ basis.rows.T  # from the old coordinates to the new
            noise = (turn * (noise_std * old_scales)[:, None]).square().sum(0)
            # Σd² = k, so noise_std² is a direction's noise on average, and what a mean of its squares strays by is the
            # least that can be known: below, D⁻¹ would blow up what nothing is known of, and clipping take the rest
            least = noise_std**2 * math.sqrt(2 / len(self._history))
            energies = ((self._history @ turn).square().mean(0) - noise).clamp_min(least)
        self._reference = self._gradients.theta.clone()
        self.vector = torch.zeros_like(self.vector)
        self._history = self._history[:0]
        self._take(basis, noise_scales(len(self.vector), energies))
        return True

    def state(self) -> SubspaceState | None:
        """Return what a checkpoint needs besides θ."""
        return SubspaceState(
            self.vector.clone(),
            self._reference.clone(),
            self._history.clone(),
            self._scales.clone(),
            self._basis.sha256,
        )

    def restore(self, step: int, theta: Tensor, state: SubspaceState | None) -> None:
        """Go back to a checkpoint's θ [P], after `step` steps; the basis is made again and compared.

        Raises:
            DpmergeError: DPM-302 if it is another one.
        """
        every = self._settings.refresh_every_steps
        num_refreshes = max(0, step - 1) // every if every else 0
        if state is not None and num_refreshes:
            self._gradients.theta.copy_(state.reference)
            self._basis = self._make_basis(num_refreshes)
        if state is None or self._basis.sha256 != state.basis_sha256:
            raise DpmergeError(
                "DPM-302",
                "the checkpoint was trained in another subspace than this machine makes of the public data",
                "go on with the public data and package versions it was made with, or start anew, as a second charge",
            )
        self._gradients.theta.copy_(theta)
        self._reference, self._history = state.reference.clone(), state.history.clone()
        self.vector = state.coordinates.clone()
        self._take(self._basis, state.scales.clone())

    def _projected(self, gradients: list[Tensor]) -> Tensor:
        """Return D⁻¹Qg [n, k] of gradients [·, P] in several pieces, which are put together for some columns only."""
        num_units = sum(map(len, gradients))
        result = self.vector.new_zeros(_ROWS, len(self.vector))
        for start in range(0, len(self._projection), _BLOCK):
            projection = self._projection[start : start + _BLOCK]
            filling = projection.new_zeros(_ROWS - num_units, len(projection))
            columns = [some[:, start : start + _BLOCK] for some in gradients]
            result.addmm_(torch.cat([*columns, filling]), projection)
        return result[:num_units]

    def _take(self, basis: Basis, scales: Tensor) -> None:
        self._basis = basis
        self._scales = scales.to(self.vector)
        self._projection = (basis.rows / self._scales[:, None]).T


Coordinates = FullSpace | Subspace


def noise_scales(k: int, energies: Tensor | None) -> Tensor:
    """Return D [k] float64, Σd² = k, for mean squares e of the gradient along each direction; None is uniform.

    d_i ∝ e_i^¼ has the least total noise σ²C²Σd² among all D with the same E‖D⁻¹g‖² = Σ e_i/d_i², hence the same
    clipping: setting the derivative of Σd² + μ Σ e/d² to zero gives d⁴ = μe.

    >>> noise_scales(2, torch.tensor([16.0, 1.0])).square()
    tensor([1.6000, 0.4000], dtype=torch.float64)
    """
    if energies is None or not energies.max() > 0:
        return torch.ones(k, dtype=torch.float64)
    scales = (energies.double() / energies.max()).clamp_min(0.0) ** 0.25
    scales = scales.clamp_min(SMALLEST_SCALE)
    return scales * (k / scales.square().sum()) ** 0.5
