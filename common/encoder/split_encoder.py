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

from dpmerge.common.data.tabular.rows import max_characters
from dpmerge.common.encoder.architecture import num_positions
from dpmerge.common.encoder.base_model import Base
from dpmerge.common.errors import DpmergeError

INTERRUPTIONS = (KeyboardInterrupt, SystemExit, GeneratorExit)
LENGTHS = (12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Token counts are padded to one of these, beyond them to a multiple of the last.

Of each, at most four records have a multiple of 48 tokens (`activations.TILE_TOKENS`), so little fills up a batch.
"""
_STEP = 4

Forward = Callable[..., Any]


class _ReachedSplitError(Exception):
    """Leaves the model's forward at the split: the layers above need not run."""


class SplitEncoder:
    """An encoder run in two halves that meet at the input of the first adapted layer.

    Each half is the model's own forward, with every layer in its place. Masks, positions, the choice of a layer's
    kind by its index and the final norm are therefore the model's own. The lower half is left at the split. In the
    upper half the layers below hand on what they are given, and the first one above is given the hidden states.

    A split at index 0 leaves nothing to cache: its lower half returns the token ids, and its upper half is the whole
    model, whatever its architecture.
    """

    def __init__(self, encoder: nn.Module, layers: str, first: int) -> None:
        """Split `encoder`, bare or wrapped by PEFT, at index `first` of the layer stack of that dotted name."""
        inner = encoder.get_base_model() if isinstance(encoder, PeftModel) else encoder
        self._encoder = cast(nn.Module, inner)
        stack = list(cast(nn.ModuleList, self._encoder.get_submodule(layers)))
        if not 0 <= first < len(stack):
            raise ValueError(f"Expected first={first} to be the index of one of {len(stack)} layers.")
        self._below, self._resumed = stack[:first], stack[first]
        self._tuple_sizes: dict[nn.Module, int | None] = {}
        self.first = first

    def whole(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Run the model's own forward: token ids [n, length] → last hidden state [n, length, width]."""
        output = self._encoder(input_ids=input_ids, attention_mask=attention_mask)
        return cast(Tensor, output.last_hidden_state)

    @torch.no_grad()
    def trunk(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Run the layers below the split: token ids [n, length] → hidden states [n, length, width].

        At index 0 it is token ids → token ids.
        """
        if self.first == 0:
            return input_ids
        reached: list[Tensor] = []

        def leave(*args: Any, **kwargs: Any) -> None:
            reached.append(args[0] if args else kwargs["hidden_states"])
            raise _ReachedSplitError

        replaced: dict[nn.Module, Forward] = {layer: self._noting(layer) for layer in self._below}
        with _forwards(replaced | {self._resumed: leave}):
            try:
                self.whole(input_ids, attention_mask)
            except _ReachedSplitError:
                return reached[0]
        raise RuntimeError("The model's forward never reached the layer at the split.")

    def top(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Run the split's upper half: what `trunk` returned → last hidden state [n, length, width]."""
        if self.first == 0:
            return self.whole(hidden, attention_mask)
        placeholder = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        if not self._tuple_sizes:
            self.trunk(placeholder[:1], attention_mask[:1])
        replaced = {layer: _hand_on(self._tuple_sizes[layer]) for layer in self._below}
        with _forwards(replaced | {self._resumed: _given(hidden, self._resumed.forward)}):
            return self.whole(placeholder, attention_mask)

    def _noting(self, layer: nn.Module) -> Forward:
        """Return the layer's forward, which also notes whether it returns a tensor or a tuple of how many."""
        own = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            self._tuple_sizes[layer] = len(output) if isinstance(output, tuple) else None
            return output

        return forward


def _hand_on(tuple_size: int | None) -> Forward:
    """Return a layer's forward that does nothing, in the form in which that layer returns hidden states."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if tuple_size is None else (hidden, *[None] * (tuple_size - 1))

    return forward


def _given(hidden: Tensor, own: Forward) -> Forward:
    """Return a layer's forward that is given `hidden` at its first call; a shared layer is called more often."""
    waiting = [hidden]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not waiting:
            return own(*args, **kwargs)
        if args:
            return own(waiting.pop(), *args[1:], **kwargs)
        return own(**kwargs | {"hidden_states": waiting.pop()})

    return forward


@contextmanager
def _forwards(replaced: dict[nn.Module, Forward]) -> Iterator[None]:
    """Exchange modules' forwards for a while. They stay the same modules, with all that a model reads off them."""
    earlier = {module: module.__dict__.get("forward") for module in replaced}
    for module, forward in replaced.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, own in earlier.items():
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


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

    >>> padded_length(9, 32), padded_length(12, 32), padded_length(25, 32), padded_length(21, 20)
    (12, 12, 32, 20)
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
    positions = num_positions(base.encoder)
    if positions is not None and padded_length(max_length, max_length) > positions:
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
