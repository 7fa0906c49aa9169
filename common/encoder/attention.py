"""Attention that takes the same path for every batch.

`transformers` leaves the mask out of a batch in which no token is padding. Whether a record is computed with a mask
would then depend on the other records of its batch. Here the mask is always applied.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ALWAYS_MASKED = "sdpa_always_masked"


def _mask(*args: Any, **options: Any) -> Any:
    return sdpa_mask(*args, **{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register(ALWAYS_MASKED, sdpa_attention_forward)
AttentionMaskInterface.register(ALWAYS_MASKED, _mask)


def always_mask(encoder: nn.Module) -> None:
    """Make a `transformers` model apply its mask to every batch, if its attention is torch's own; in place."""
    config: Any = encoder.config
    if config._attn_implementation == "sdpa":
        encoder.set_attn_implementation(ALWAYS_MASKED)  # type: ignore[operator]
