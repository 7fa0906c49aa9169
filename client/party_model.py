"""The model that one party trains, put together from its plan: for the training itself and for whoever foretells it."""

from __future__ import annotations

from dataclasses import dataclass

from peft import PeftModel

from dpmerge.client.train import Classifier
from dpmerge.common.config import PartyPlan
from dpmerge.common.heads import head_module
from dpmerge.common.model import Base, adapted_layers, attach_lora
from dpmerge.common.release import Head
from dpmerge.common.sources import start_head
from dpmerge.common.split_encoder import SplitEncoder


@dataclass(frozen=True, eq=False)
class PartyModel:
    """A base model with LoRA attached, at the shared start.

    Attributes:
        base: The base model, whose encoder LoRA was attached to in place.
        head: The party's head at the start, made of public descriptions.
        encoder: The adapted encoder.
        split: Its halves: the frozen trunk, and the layers that are trained.
        classifier: What is trained: the upper half with the head.
    """

    base: Base
    head: Head
    encoder: PeftModel
    split: SplitEncoder
    classifier: Classifier


def party_model(base: Base, plan: PartyPlan) -> PartyModel:
    """Attach the plan's LoRA to a freshly loaded base model, in place, and put the party's head on it.

    Raises:
        DpmergeError: If the model has no such layers or targets.
    """
    head = start_head(base, plan)
    encoder = attach_lora(base, plan.lora, seed=plan.seed)
    split = SplitEncoder(encoder, base.layers, adapted_layers(base, plan.lora.layers)[0])
    return PartyModel(base, head, encoder, split, Classifier(encoder, split, head_module(head), head.feature_scale))
