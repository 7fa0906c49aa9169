"""The model that one party trains, put together from its plan: for the training itself and for whoever foretells it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from dpmerge.client.training.train import Classifier
from dpmerge.common.config.federation import PartyPlan
from dpmerge.common.encoder.base_model import Base, adapted_layers, attach_lora
from dpmerge.common.encoder.heads import head_module
from dpmerge.common.encoder.split_check import Tokens, checked_split, public_batches
from dpmerge.common.encoder.split_encoder import SplitEncoder
from dpmerge.common.public.terms import label_descriptions, start_head
from dpmerge.common.release.format import PEFT_PREFIX, Head


@dataclass(frozen=True, eq=False)
class PartyModel:
    """A base model with LoRA attached, at the shared start.

    Attributes:
        base: The base model, whose encoder LoRA was attached to in place.
        head: The party's head at the start, made of public descriptions.
        encoder: The adapted encoder.
        split: Its halves: the frozen trunk, and the layers that are trained. On public texts it computes what the
            model does; where a split would not, it is the whole model.
        classifier: What is trained: the upper half with the head.
        max_examples: 1 where examples share the input of a trained layer, as DeBERTa's do their relative positions:
            one at a time, each has a gradient of its own there too. Else None.
        notes: What the party's log says of all this; empty where there is nothing to say.
    """

    base: Base
    head: Head
    encoder: PeftModel
    split: SplitEncoder
    classifier: Classifier
    max_examples: int | None = None
    notes: tuple[str, ...] = ()


def party_model(base: Base, plan: PartyPlan) -> PartyModel:
    """Attach the plan's LoRA to a freshly loaded base model, in place, and put the party's head on it.

    Raises:
        DpmergeError: If the model has no such layers or targets.
    """
    head = start_head(base, label_descriptions(plan.source), plan.training.head)
    encoder = attach_lora(base, plan.lora, seed=plan.seed)
    first, texts = adapted_layers(base, plan.lora.layers)[0], public_batches(base, plan.base.max_length)
    split, note = checked_split(base, encoder, first, texts)
    notes = [note] if note else []
    shared = _shared_inputs(encoder, split, texts[0])
    if shared:
        notes.append(f"physical batches hold one record: all records of a batch share what {shared[0]} sees")
    classifier = Classifier(encoder, split, head_module(head), head.feature_scale)
    return PartyModel(base, head, encoder, split, classifier, 1 if shared else None, tuple(notes))


@torch.no_grad()
def _shared_inputs(encoder: PeftModel, split: SplitEncoder, batch: Tokens) -> list[str]:
    """Return the names of the adapted layers that are given one input for all the examples of a batch."""
    shared: list[str] = []

    def note(name: str, _layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].shape[0] == 1 < len(batch.ids):
            shared.append(name)

    layers = [(name, layer) for name, layer in encoder.named_modules() if isinstance(layer, LoraLayer)]
    handles = [layer.register_forward_pre_hook(partial(note, name.removeprefix(PEFT_PREFIX))) for name, layer in layers]
    try:
        split.whole(batch.ids, batch.mask)
    finally:
        for handle in handles:
            handle.remove()
    return shared
