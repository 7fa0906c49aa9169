"""From what was seen to queries: what each should have summed, clipped anew in float64, and what came out."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from .observe import Noise, Observed, Rows, Step

Kind = Literal["clip", "ascent", "descent"]


@dataclass(frozen=True, kw_only=True)
class Query:
    """One question put to the records, and its answer as far as it shows.

    Attributes:
        kind: What is asked.
        step: In which step, from 0.
        records: Whom it was put to, in the order in which their rows were computed.
        rows: What should be clipped of them [n, k], or lists of it per physical batch.
        clipped: Their sum after clipping to C, float64 [k].
        excess: What clipping should take away, float64 [k].
        points: Each θ [P] at which a row was computed.
        noise: The noise that was drawn meanwhile, in standard deviations, if its draws are as many as expected.
        sigma: The query's noise multiplier, as charged.
        clip: C.
        answer: The noisy sum: B times the gradient that was stepped with (descent only).
        direction: Where to the gradient was then moved, of any length (ascent only).
    """

    kind: Kind
    step: int
    records: Tensor
    rows: tuple[Tensor, ...]
    clipped: Tensor
    excess: Tensor
    points: tuple[Tensor, ...]
    noise: Tensor | None
    sigma: float
    clip: float
    answer: Tensor | None = None
    direction: Tensor | None = None

    @property
    def scale(self) -> float:
        """Standard deviation of the noise that is due."""
        return self.sigma * self.clip

    @cached_property
    def standard(self) -> Tensor | None:
        """What the answer holds beside the clipped sum [k], in standard deviations: N(0, 1) in a sound query.

        Of an ascent only the direction shows, so what is orthogonal to the clipped sum, whatever its length.
        """
        if self.answer is not None:
            return (self.answer - self.clipped) / self.scale
        if self.direction is None:
            return None
        across = self.direction - self._along * self._towards
        return across * (math.sqrt(len(across) - 1) / across.norm())

    @property
    def excess_of_length(self) -> float:
        """N(0, 1) if an ascent's noise is as strong as charged: how much longer its part along the sum is than due.

        Across the sum lies only noise, whose length is known to 1/√(2k) of itself: that tells the length of all.
        """
        assert_direction(self)
        length, along = self.clipped.norm(), self._along
        across = (self.direction - along * self._towards).norm()  # type: ignore[operator]
        freedom = len(self.clipped) - 1
        wanted = along * (self.scale * math.sqrt(freedom) / across)
        return float((wanted - length) / math.hypot(self.scale, float(length) / math.sqrt(2 * freedom)))

    @property
    def _towards(self) -> Tensor:
        return self.clipped / self.clipped.norm().clamp_min(1e-300)

    @property
    def _along(self) -> Tensor:
        return (self.direction * self._towards).sum()  # type: ignore[operator]


def assert_direction(query: Query) -> None:
    """Refuse a query whose direction did not show."""
    if query.direction is None:
        raise ValueError(f"Expected the direction of step {query.step} to be seen.")


@dataclass(frozen=True)
class Loop:
    """One training as a list of queries.

    Attributes:
        seen: What it is made of.
        queries: In order.
        steps: The optimizer's.
        num_draws: Draws of noise.
        num_values: Values of noise, all draws together.
        clip_norm: C of the steps.
    """

    seen: Observed
    queries: tuple[Query, ...]
    steps: tuple[Step, ...]
    num_draws: int
    num_values: int
    clip_norm: float

    def of(self, kind: Kind) -> list[Query]:
        """Return the queries of one kind."""
        return [query for query in self.queries if query.kind == kind]

    @property
    def samples(self) -> list[Query]:
        """Return one query for each Poisson sample: an ascent that shares the descent's is left out."""
        shared = self.seen.charged.ascent_sampling == "paired"
        return [query for query in self.queries if not (shared and query.kind == "ascent")]


def loop_of(seen: Observed) -> Loop:
    """Put what was seen in order: each step's rows at θ are its ascent's ("sam"), those elsewhere its descent's."""
    charged, clip_norm = seen.charged, float(json.loads(seen.release["statement.json"])["l2_clip_norm"])
    queries: list[Query] = []
    steps: list[Step] = []
    rows: list[Rows] = []
    noise: list[Noise] = []
    for event in seen.events:
        if isinstance(event, Rows):
            rows.append(event)
            continue
        if isinstance(event, Noise):
            noise.append(event)
            if charged.num_clip_queries and not queries:
                queries.append(_query("clip", 0, rows, noise, charged.noise_multiplier, float(charged.l2_clip_norm)))
                rows, noise = [], []
            continue
        number, answer = len(steps), _answer(seen, event)
        if charged.ascent_noise_multiplier is not None:
            ascending = [some for some in rows if torch.equal(some.theta, event.vector)]
            rows = [some for some in rows if not torch.equal(some.theta, event.vector)]
            climbed = (rows[0].theta.double() - event.vector.double()) if rows else None
            sigma = charged.ascent_noise_multiplier
            drawn = noise[:1] if len(noise) == 2 else []
            queries.append(
                _query("ascent", number, ascending, drawn, sigma, clip_norm, width=len(answer), direction=climbed)
            )
            noise = noise[1:]
        queries.append(
            _query(
                "descent", number, rows, noise, charged.noise_multiplier, clip_norm, width=len(answer), answer=answer
            )
        )
        steps.append(event)
        rows, noise = [], []
    draws = [event for event in seen.events if isinstance(event, Noise)]
    return Loop(seen, tuple(queries), tuple(steps), len(draws), sum(len(one.values) for one in draws), clip_norm)


def _answer(seen: Observed, step: Step) -> Tensor:
    answer = step.gradient.double() * seen.charged.expected_batch_size
    return answer if seen.scales is None else answer / seen.scales


def _query(
    kind: Kind,
    step: int,
    rows: list[Rows],
    noise: list[Noise],
    sigma: float,
    clip: float,
    *,
    width: int = 0,
    answer: Tensor | None = None,
    direction: Tensor | None = None,
) -> Query:
    total = torch.zeros(width, dtype=torch.float64)
    clipped = total.clone()
    projected = []
    for some in rows:
        gradients = some.gradients.double()
        projected.append(gradients if some.projection is None else gradients @ some.projection)
        if kind != "clip":
            factors = (clip / projected[-1].norm(dim=1)).clamp_max(1.0)
            clipped += factors @ projected[-1]
            total += projected[-1].sum(0)
    is_known = len(noise) == 1 and (kind == "clip" or len(noise[0].values) == width)
    return Query(
        kind=kind,
        step=step,
        records=torch.cat([some.records for some in rows]) if rows else torch.empty(0, dtype=torch.long),
        rows=tuple(projected) if kind == "clip" else (),
        clipped=clipped,
        excess=total - clipped,
        points=tuple(some.theta for some in rows),
        noise=noise[0].values if is_known else None,
        sigma=sigma,
        clip=clip,
        answer=answer,
        direction=direction,
    )
