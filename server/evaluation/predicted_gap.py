"""How much a party's loss grows from its own model to the merged one, predicted from near its own, on public data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from dpmerge.common.encoder.activations import Activations
from dpmerge.common.encoder.base_model import Base
from dpmerge.common.encoder.heads import logits
from dpmerge.common.encoder.split_check import checked_split, public_batches
from dpmerge.common.encoder.split_encoder import SplitEncoder, pool
from dpmerge.common.release.format import Head
from dpmerge.server.evaluation.evaluate import EVALUATION_BATCH, PublicTask

STEP = 0.25  # of the way from the own model to the merged one: short enough to be near, long enough for fp32
NODES = (-STEP, 0.0, STEP, 2 * STEP)

_log = logging.getLogger("flwr")  # Flower's log is the server's


@dataclass(frozen=True, kw_only=True)
class PredictedGap:
    """The mean loss at the merged model minus that at the party's own, in nats per record.

    Attributes:
        slope: ⟨∇L_t(w_t), Δ_t⟩, the part of first order, Δ_t = w̄ − w_t.
        curvature: The part of second order, ½ Δ_tᵀ H Δ_t.
        third_order: The part of third order.
        measured: The gap itself, to hold the prediction against.
    """

    slope: float
    curvature: float
    third_order: float
    measured: float

    @property
    def predicted(self) -> float:
        """The sum of the three parts."""
        return self.slope + self.curvature + self.third_order


def predicted_gaps(
    base: Base,
    first_layer: int,
    tasks: Mapping[str, PublicTask],
    own: Mapping[str, Path],
    merged: Path,
    *,
    max_length: int,
) -> dict[str, PredictedGap]:
    """Expand every party's loss around its own model, along the way to the merged one.

    Args:
        base: The base model, freshly loaded; adapters are added to it.
        first_layer: Index of the lowest layer that any adapter changes.
        tasks: Party → public records and head.
        own: Party → the folder of its own adapter; parties without one are left out.
        merged: The merged adapter's folder.
        max_length: Tokens kept per text.

    References: arXiv 2608.26655 bounds the gap by ‖∇L_t‖ ‖Δ_t‖ + β_t/2 ‖Δ_t‖² + M_t/6 ‖Δ_t‖³.
    Deviations: the derivatives are those along Δ_t itself in place of the worst direction's, by finite differences.
    """
    model = PeftModel.from_pretrained(cast(Any, base.encoder), str(merged), adapter_name="merged")
    texts = public_batches(base, max_length)
    gaps = {}
    for party in sorted(tasks.keys() & own.keys()):
        name = f"own-{party}"
        model.load_adapter(str(own[party]), adapter_name=name)
        model.base_model.set_adapter([name, "merged"])
        model.eval()
        at = partial(_at, model, name)
        split, note = checked_split(base, model, first_layer, texts, [partial(at, 0.0), partial(at, 1.0)])
        if note:
            _log.warning("prediction of %s: %s", party, note)
        data = Activations(base, split, tasks[party].records.texts, max_length=max_length)
        gaps[party] = _gap(at, split, data, tasks[party])
    return gaps


def _gap(
    at: Callable[[float], AbstractContextManager[None]], split: SplitEncoder, data: Activations, task: PublicTask
) -> PredictedGap:
    """Take the loss at the nodes of the expansion and at the merged model."""
    labels = torch.tensor(task.records.labels)
    losses = []
    for place in (*NODES, 1.0):
        with at(place):
            losses.append(_loss(split, data, labels, task.head))
    slope, curvature, third_order = expansion(losses[:4])
    measured = losses[4] - losses[1]
    return PredictedGap(slope=slope, curvature=curvature, third_order=third_order, measured=measured)


@contextmanager
def _at(model: PeftModel, own: str, place: float) -> Iterator[None]:
    """Put the model at 0 (its own adapter), 1 (the merged one), or in between or beyond."""
    for layer in (module for module in model.modules() if isinstance(module, LoraLayer)):
        layer.set_scale(own, 1 - place)
        layer.set_scale("merged", place)
    yield


def expansion(losses: list[float]) -> tuple[float, float, float]:
    """Return f'(0), f''(0)/2 and f'''(0)/6 of the cubic through a loss at the four `NODES`.

    >>> [round(part, 9) for part in expansion([2 + s + 3 * s**2 - s**3 for s in NODES])]
    [1.0, 3.0, -1.0]
    """
    before, here, after, further = losses
    slope = (-2 * before - 3 * here + 6 * after - further) / (6 * STEP)
    curvature = (after - 2 * here + before) / (2 * STEP**2)
    third_order = (further - 3 * after + 3 * here - before) / (6 * STEP**3)
    return slope, curvature, third_order


@torch.no_grad()
def _loss(split: SplitEncoder, data: Activations, labels: Tensor, head: Head) -> float:
    total = 0.0
    for batch in data.batches(torch.arange(len(data)), EVALUATION_BATCH):
        scores = logits(pool(split.top(batch.hidden, batch.mask), batch.mask), head)[: len(batch.records)]
        total += float(torch.nn.functional.cross_entropy(scores, labels[batch.records], reduction="sum"))
    return total / len(data)
