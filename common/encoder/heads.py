"""Classification heads on the pooled, unit-norm features of the shared encoder.

`label-text` is the analogue of a vision-language model's text head: each class is the base encoder's own embedding of
a public, one-line description. It is frozen, costs no privacy, and anybody with the base model can make it again.
`linear` is trained by its party under the same mechanism as the adapter, and travels with the release.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dpmerge.common.encoder.base_model import Base
from dpmerge.common.encoder.split_encoder import SplitEncoder, pad, padded_length, pool, tokenize
from dpmerge.common.release.format import Head

FEATURE_SCALE = 8.0
"""Norm of the features that a head sees."""
LABEL_TEXT_NORM = 2.5
"""Norm of each class's vector in a label-text head: logits are 20 · cosine."""
DESCRIPTION_TOKENS = 64
"""Tokens kept of a class description."""


@torch.no_grad()
def label_text_head(base: Base, descriptions: Mapping[str, str]) -> Head:
    """Return the frozen head whose class vectors are the base encoder's embeddings of the class descriptions.

    Args:
        base: The base model, before or after LoRA with B = 0 is attached (the two are the same function).
        descriptions: Class name → one-line public description, in class order.
    """
    whole = SplitEncoder(base.encoder, base.layers, 0)
    rows = []
    for ids in tokenize(base, list(descriptions.values()), max_length=DESCRIPTION_TOKENS):
        batch, mask = pad([ids], int(base.tokenizer.pad_token_id), padded_length(len(ids), DESCRIPTION_TOKENS))
        rows.append(pool(whole.top(whole.trunk(batch, mask), mask), mask))
    return Head(
        kind="label-text",
        labels=tuple(descriptions),
        weight=LABEL_TEXT_NORM * torch.cat(rows),
        bias=None,
        feature_scale=FEATURE_SCALE,
    )


def zero_linear_head(base: Base, labels: tuple[str, ...]) -> Head:
    """Return the start of a trained head: all zero, the same at every party."""
    return Head(
        kind="linear",
        labels=labels,
        weight=torch.zeros(len(labels), base.width),
        bias=torch.zeros(len(labels)),
        feature_scale=FEATURE_SCALE,
    )


def head_module(head: Head) -> nn.Linear:
    """Return the head as a linear layer [width → classes], trainable only if it is a linear head."""
    num_classes, width = head.weight.shape
    module = nn.Linear(width, num_classes, bias=head.bias is not None)
    module.weight.data.copy_(head.weight)
    if head.bias is not None:
        module.bias.data.copy_(head.bias)
    return module.requires_grad_(head.kind == "linear")


def logits(features: Tensor, head: Head) -> Tensor:
    """Return class scores [n, classes] of unit-norm features [n, width]."""
    return nn.functional.linear(head.feature_scale * features, head.weight, head.bias)
