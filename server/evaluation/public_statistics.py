"""What RegMean and Fisher merging need to know about a party's model, measured on public texts.

Private records never enter: the texts are the caller's, and public. A party's adapter acts through hooks on the base
model's linears, which are left as they were.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpmerge.common.encoder.base_model import Base
from dpmerge.common.encoder.heads import logits
from dpmerge.common.encoder.split_encoder import pad, padded_length, pool, tokenize
from dpmerge.common.errors import DpmergeError
from dpmerge.server.merging.adapters.deltas import Adapter, LowRankDelta

Kind = Literal["gram", "fisher"]
BATCH = 16


def public_statistics(
    base: Base,
    adapters: Sequence[Adapter],
    texts: Mapping[str, Sequence[str]],
    *,
    kind: Kind,
    max_length: int,
) -> dict[str, dict[str, Tensor]]:
    """Measure every party's model on public texts of its task.

    Args:
        base: The model that the adapters were trained on.
        adapters: As given to `merge`.
        texts: Party → public texts, at least one.
        kind: "gram" for `regmean`: mean of x xᵀ over tokens, [in, in] per module; "fisher" for `fisher`: mean over
            texts, and over classes as the party's model believes in them, of squared gradients, [out, in].
        max_length: Tokens kept per text.

    Returns:
        Party → module → statistic, for every module that any adapter changes: `MergeSpec.statistics`.

    Raises:
        DpmergeError: DPM-103 for a party without texts; DPM-402 for one without the head that "fisher" needs, or with
            LoRA on embeddings.
    """
    names = sorted({name for adapter in adapters for name in adapter.modules})
    found = {}
    for adapter in adapters:
        if adapter.embeddings:
            problem = f"{adapter.party} adapts embeddings, whose inputs are tokens and have no {kind} statistics"
            raise DpmergeError("DPM-402", problem, "choose a method that needs no statistics, such as average")
        if not texts.get(adapter.party):
            raise DpmergeError("DPM-103", f"{adapter.party} has no public texts", "give at least one text per party")
        probe = _Probe(kind, _head(adapter) if kind == "fisher" else None)
        with _adapted(base.encoder, adapter, names, probe):
            for tokens, mask in _batches(base, texts[adapter.party], max_length):
                probe.see(base.encoder, tokens, mask)
        found[adapter.party] = {name: probe.sums[name] / probe.count for name in names}
    return found


def _batches(base: Base, texts: Sequence[str], max_length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and mask of a few texts at a time."""
    ids = tokenize(base, texts, max_length)
    for start in range(0, len(ids), BATCH):
        rows = ids[start : start + BATCH]
        yield pad(rows, int(base.tokenizer.pad_token_id), padded_length(max(map(len, rows)), max_length))


@dataclass
class _Probe:
    """Sums of one party's statistic, filled batch by batch.

    Attributes:
        kind: What is summed.
        head: The party's classes, for gradients.
        sums: Module → sum so far.
        count: Tokens ("gram") or texts ("fisher") so far.
        calls: Module → its inputs and outputs in the current batch.
    """

    kind: Kind
    head: Any
    sums: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0
    calls: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def see(self, encoder: nn.Module, tokens: Tensor, mask: Tensor) -> None:
        """Run one batch, and add what it tells.

        Args:
            encoder: The party's model.
            tokens: [batch, length].
            mask: 1 for a text's own tokens, [batch, length].
        """
        self.calls.clear()
        with torch.set_grad_enabled(self.kind == "fisher"):
            hidden = encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        own = mask.bool()
        if self.kind == "gram":
            self.count += int(own.sum())
            for name, (inputs, _) in self.calls.items():
                rows = inputs[own]
                self._add(name, rows.T @ rows)
        else:
            self.count += len(tokens)
            self._add_gradients(torch.log_softmax(logits(pool(hidden, mask), self.head), -1))
        self.calls.clear()

    def _add_gradients(self, log_beliefs: Tensor) -> None:
        """Add Σ_y p(y|x) (∂ log p(y|x) / ∂W)² of every text x; a text's loss reaches no other text's rows."""
        outputs = [output for _, output in self.calls.values()]
        for label in range(log_beliefs.shape[1]):
            gradients = torch.autograd.grad(
                log_beliefs[:, label].sum(), outputs, retain_graph=True, materialize_grads=True
            )
            for (name, (inputs, _)), gradient in zip(self.calls.items(), gradients, strict=True):
                for belief, left, right in zip(log_beliefs[:, label].detach().exp(), gradient, inputs, strict=True):
                    self._add(name, belief * (left.T @ right).square())

    def _add(self, name: str, term: Tensor) -> None:
        self.sums[name] = self.sums[name].add_(term) if name in self.sums else term


@contextmanager
def _adapted(encoder: nn.Module, adapter: Adapter, names: Sequence[str], probe: _Probe) -> Iterator[None]:
    """Let an adapter act on the encoder, and show the probe what passes through the named modules."""

    def hook_of(name: str, factors: LowRankDelta | None) -> Any:
        change = None if factors is None else (factors.a.float().T, factors.b.float().T * factors.scaling)  # read once

        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if change is not None:
                output = output + inputs[0] @ change[0] @ change[1]
            if torch.is_grad_enabled() and not output.requires_grad:
                output = output.detach().requires_grad_()
            probe.calls[name] = inputs[0].detach(), output
            return output

        return hook

    handles = [
        encoder.get_submodule(name).register_forward_hook(hook_of(name, adapter.modules.get(name))) for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _head(adapter: Adapter) -> Any:
    if adapter.party not in adapter.heads:
        problem = f"{adapter.party} has no head, and Fisher information is about its answers"
        raise DpmergeError("DPM-402", problem, "give releases, which carry heads, or merge with regmean")
    return adapter.heads[adapter.party]
