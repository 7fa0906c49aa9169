"""Does a split encoder compute what its model computes? Asked of public texts, before any record is read.

Where it does not, the whole model runs for every record: slower, and right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dpmerge.common.encoder.base_model import Base
from dpmerge.common.encoder.split_encoder import SplitEncoder, pad, padded_length, tokenize

SPLIT_TOLERANCE = 1e-5
"""Largest relative L2 difference over the tokens of a batch. Both sides do the same arithmetic in the same order."""

PUBLIC_TEXTS = (
    "Yes.",
    "The library opens at nine and closes at six.",
    "Who wrote the first novel that was printed in this town, and where can a copy of it be read today?",
)
"""Sentences of several lengths, padded to one: what is right without padding can be wrong with it."""


class Tokens(NamedTuple):
    """A batch of token ids and its attention mask, both int64 [n, length]."""

    ids: Tensor
    mask: Tensor


class CheckedSplit(NamedTuple):
    """A split encoder that computes what its model does.

    Attributes:
        split: At the layer that was asked for, or at 0, which is the whole model.
        note: What the log is to say; empty where the split is the one that was asked for.
    """

    split: SplitEncoder
    note: str


def public_batches(base: Base, max_length: int, texts: Sequence[str] = PUBLIC_TEXTS) -> list[Tokens]:
    """Return public texts in one padded batch, a batch of the shortest length, and one of the longest.

    Args:
        base: Gives tokenizer, padding token and vocabulary.
        max_length: Tokens kept per text: windows, masks and positions can differ at the last of them only.
        texts: Public texts.
    """
    filler = int(base.tokenizer.pad_token_id)
    rows = tokenize(base, texts, max_length)
    generator = torch.Generator().manual_seed(0)
    num_words = int(cast(Any, base.encoder).get_input_embeddings().num_embeddings)
    batches = [Tokens(*pad(rows, filler, padded_length(max(map(len, rows)), max_length)))]
    for num_rows, length in ((2, padded_length(1, max_length)), (1, padded_length(max_length, max_length))):
        ids = torch.randint(num_words, (num_rows, length), generator=generator)
        batches.append(Tokens(ids, torch.ones_like(ids)))
    return batches


@torch.no_grad()
def split_error(
    split: SplitEncoder,
    batches: Sequence[Tokens],
    variants: Sequence[Callable[[], AbstractContextManager[Any]]] = (nullcontext,),
) -> float:
    """Return the largest relative L2 error of the split's last hidden states over the batches; infinite if it fails.

    Args:
        split: The split encoder.
        batches: Public token ids.
        variants: Contexts in which the upper half is asked, such as one adapter each. The lower half is run outside
            of them: it must be the same for all.
    """
    worst = 0.0
    for ids, mask in batches:
        try:
            hidden = split.trunk(ids, mask)
        except Exception:  # a model's own forward fails in as many ways as there are models: the whole one runs then
            return math.inf
        for variant in variants:
            with variant():
                whole = split.whole(ids, mask)
                try:
                    halves = split.top(hidden, mask)
                except Exception:  # the same
                    return math.inf
            difference = torch.linalg.vector_norm((halves - whole)[mask > 0])
            error = float(difference / torch.linalg.vector_norm(whole[mask > 0]))
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def checked_split(
    base: Base,
    encoder: nn.Module,
    first: int,
    batches: Sequence[Tokens],
    variants: Sequence[Callable[[], AbstractContextManager[Any]]] = (nullcontext,),
) -> CheckedSplit:
    """Split `encoder` at layer `first`, or not at all if the split computes anything else than the model."""
    split = SplitEncoder(encoder, base.layers, first)
    if first == 0:
        return CheckedSplit(split, "")
    error = split_error(split, batches, variants)
    if error <= SPLIT_TOLERANCE:
        return CheckedSplit(split, "")
    note = (
        f"{base.name} cannot be split at layer {first} (relative error {error:.1e} on public texts, where "
        f"{SPLIT_TOLERANCE:.0e} is allowed): nothing is cached, and the whole model runs for every record"
    )
    return CheckedSplit(SplitEncoder(encoder, base.layers, 0), note)
