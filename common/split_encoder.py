"""Texts to tokens to features, through an encoder that is cut below the first adapted layer.

The cut rests on one fact: with adapters in the top layers only, whatever lies below is the same function of a record
before, during and after training. A record is therefore encoded once up to the first adapted layer, and training and
evaluation go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn

from dpmerge.common.errors import DpmergeError
from dpmerge.common.model import Base
from dpmerge.common.tabular.rows import max_characters

INTERRUPTIONS = (KeyboardInterrupt, SystemExit, GeneratorExit)
LENGTHS = (12, 16, 20, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Token counts are padded to one of these, beyond them to a multiple of the last: few of them fill their batches best.

All are multiples of 4, so that a multiple of 12 records has a multiple of 48 tokens (`activations.ROWS_UNIT`).
"""
_STEP = 4


class _Replace(nn.Module):
    """Stands where the trunk was: returns the given hidden states whatever comes in."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return self.hidden


class _Record(nn.Module):
    """Stands above the trunk: keeps the hidden states that come in."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        self.hidden = hidden_states
        return hidden_states


class SplitEncoder:
    """An encoder run in two halves that meet at the input of the first adapted layer.

    Masks, positions and the final norm stay the model's own: each half runs the model's own forward with the other
    half's layers exchanged for a stand-in.
    """

    def __init__(self, encoder: nn.Module, layers: str, first: int) -> None:
        """Split `encoder`, bare or wrapped by PEFT, at index `first` of the layer stack of that dotted name."""
        inner = encoder.get_base_model() if isinstance(encoder, PeftModel) else encoder
        parent, _, self._attribute = layers.rpartition(".")
        self._encoder = cast(nn.Module, inner)
        self._parent = self._encoder.get_submodule(parent)
        self._stack = cast(nn.ModuleList, getattr(self._parent, self._attribute))
        self.first = first

    @contextmanager
    def _layers(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        setattr(self._parent, self._attribute, nn.ModuleList(layers))
        try:
            yield
        finally:
            setattr(self._parent, self._attribute, self._stack)

    @torch.no_grad()
    def trunk(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Run the layers below the split: token ids [n, length] → hidden states [n, length, width]."""
        record = _Record()
        with self._layers([*self._stack[: self.first], record]):
            self._encoder(input_ids=input_ids, attention_mask=attention_mask)
        return cast(Tensor, record.hidden)

    def top(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Run the split's upper half: hidden states [n, length, width] → last hidden state [n, length, width]."""
        placeholder = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        with self._layers([_Replace(hidden), *self._stack[self.first :]]):
            output = self._encoder(input_ids=placeholder, attention_mask=attention_mask)
        return cast(Tensor, output.last_hidden_state)


def pool(last_hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Mean over a record's own tokens, scaled to unit norm: [n, length, width], [n, length] → [n, width]."""
    weights = attention_mask.unsqueeze(-1).to(last_hidden.dtype)
    mean = (last_hidden * weights).sum(1) / weights.sum(1).clamp_min(1.0)
    return nn.functional.normalize(mean, dim=-1)


def tokenize(base: Base, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Return each text's token ids, at most `max_length` of them, special tokens included, unpadded.

    A text is cut at `max_characters(max_length)` first, so that none takes longer than that many. One on which the
    tokenizer stops has no tokens, and does not stop the others.
    """
    cut = [text[: max_characters(max_length)] for text in texts]
    if not cut:
        return []  # which tokenizers do not take
    try:
        return _token_ids(base, cut, max_length)
    except BaseException as error:  # a panic in the tokenizer's own code is no Exception
        if isinstance(error, INTERRUPTIONS):
            raise
    if len(cut) == 1:
        return [[]]
    return [tokenize(base, [text], max_length)[0] for text in cut]


def _token_ids(base: Base, texts: list[str], max_length: int) -> list[list[int]]:
    ids: list[list[int]] = base.tokenizer(texts, truncation=True, max_length=max_length, padding=False)["input_ids"]
    return ids


def padded_length(num_tokens: int, max_length: int) -> int:
    """Return the length of `LENGTHS` that a record of so many tokens is padded to: a function of that record alone.

    No record is padded beyond `max_length`, rounded up to a multiple of 4.

    >>> padded_length(9, 32), padded_length(12, 32), padded_length(21, 32), padded_length(21, 22)
    (12, 12, 32, 24)
    """
    ladder = next((length for length in LENGTHS if num_tokens <= length), -(-num_tokens // LENGTHS[-1]) * LENGTHS[-1])
    return min(ladder, -(-max_length // _STEP) * _STEP)


def pad(rows: list[list[int]], pad_token_id: int, length: int) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, both [n, length] int64, padded on the right.

    >>> pad([[5, 6], [7]], 0, 3)[1].tolist()
    [[1, 1, 0], [1, 0, 0]]
    """
    ids = torch.full((len(rows), length), pad_token_id, dtype=torch.long)
    mask = torch.zeros((len(rows), length), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask[index, : len(row)] = 1
    return ids, mask


def check_length(base: Base, max_length: int) -> None:
    """Refuse token counts that the model has no positions for: else a single long record would stop its party.

    Raises:
        DpmergeError: DPM-103 with the number of positions.
    """
    positions = getattr(base.encoder.config, "max_position_embeddings", None)
    if isinstance(positions, int) and padded_length(max_length, max_length) > positions:
        raise DpmergeError(
            "DPM-103",
            f"base.max_length = {max_length} is more than the {positions} positions of {base.name}",
            f"choose at most {positions - positions % _STEP}",
        )


def highest_token_id(base: Base) -> int:
    """Return the largest id that the tokenizer can give, added tokens included."""
    return max(len(base.tokenizer) - 1, *map(int, base.tokenizer.get_vocab().values()))


def check_vocabulary(base: Base) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for: else one record with such a token would stop it.

    Raises:
        DpmergeError: DPM-204 with both numbers.
    """
    rows, highest = int(base.encoder.get_input_embeddings().weight.shape[0]), highest_token_id(base)  # type: ignore[operator]  # transformers has no stubs
    if highest >= rows:
        raise DpmergeError(
            "DPM-204",
            f"the tokenizer of base model {base.name} gives ids up to {highest}, and its embedding has {rows} rows",
            "use the tokenizer that belongs to the model, or resize the model's embedding and store both",
        )


def check_reach(base: Base, run: Callable[[Tensor, Tensor], object], max_length: int) -> None:
    """Run the model on made-up texts of the shortest and the longest length, with its highest token id.

    Whatever a record can ask of the model in these two ways is asked here, so that no record can be the first to fail.

    Args:
        base: The model.
        run: Takes token ids and attention mask, both int64 [1, length].
        max_length: Tokens kept per text.

    Raises:
        DpmergeError: DPM-204 if it fails.
    """
    for length in sorted({padded_length(1, max_length), padded_length(max_length, max_length)}):
        for token in sorted({highest_token_id(base), int(base.tokenizer.pad_token_id)}):
            ids, mask = pad([[token] * min(length, max_length)], int(base.tokenizer.pad_token_id), length)
            try:
                run(ids, mask)
            except (RuntimeError, IndexError, ValueError) as error:
                problem = f"base model {base.name} stops ({type(error).__name__}) at {length} tokens with id {token}"
                raise DpmergeError("DPM-204", problem, "lower base.max_length, or use another model") from error
