"""Per-example gradients on public, unlabelled texts, under labels that the model and a public seed make up.

Nothing here reads a private record: inputs are the model, public texts and a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dpmerge.client.gradients.per_example import PerExampleGradients
from dpmerge.common.encoder.activations import Activations

UNIFORM_SHARE = 0.5
PSEUDO_LABELS = f"1: predicted, {UNIFORM_SHARE} uniform"
"""What stored bases record of `pseudo_labels`: change it with the function."""


def pseudo_labels(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a label for each row of class scores [n, classes]: int64 [n].

    Half from the model's own prediction, whose gradients tell what it would sharpen, and half uniformly, whose
    gradients tell how to correct it.

    >>> pseudo_labels(torch.tensor([[0.0, 99.0]] * 4), torch.Generator().manual_seed(1))
    tensor([0, 1, 1, 1])
    """
    chances = (1 - UNIFORM_SHARE) * scores.softmax(1) + UNIFORM_SHARE / scores.shape[1]
    return torch.multinomial(chances.cpu(), 1, generator=generator)[:, 0].to(scores.device)


def public_gradients(
    model: Callable[[Tensor, Tensor], Tensor], gradients: PerExampleGradients, activations: Activations, seed: int
) -> Iterator[Tensor]:
    """Yield per-example gradients [n, P] at the current θ, batch by batch.

    Args:
        model: Hidden states [n, length, width] and mask [n, length] → class scores [n, classes].
        gradients: Per-example gradients of that model.
        activations: The public texts at the split.
        seed: Of the pseudo-labels.
    """
    generator = torch.Generator().manual_seed(seed)
    for batch in activations.batches(torch.arange(len(activations)), gradients.capacity):

        def losses(hidden: Tensor = batch.hidden, mask: Tensor = batch.mask) -> Tensor:
            scores = model(hidden, mask)
            return nn.functional.cross_entropy(scores, pseudo_labels(scores.detach(), generator), reduction="none")

        yield gradients.compute(losses)[: len(batch.records)]
