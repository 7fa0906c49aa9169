"""What is public about a party's data: class descriptions and the shared terms.

The training half of a source is read in `client/` only, a test half in `server/` only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import rfc8785

from dpmerge.common.config.federation import FileSource, PartyPlan, PrivacySettings, TaskSource
from dpmerge.common.data.tasks import TASKS
from dpmerge.common.encoder.base_model import Base
from dpmerge.common.encoder.heads import label_text_head, zero_linear_head
from dpmerge.common.public.corpus import public_name
from dpmerge.common.release.format import Head


def label_descriptions(source: TaskSource | FileSource) -> Mapping[str, str]:
    """Return class name → public one-line description, in class order."""
    return TASKS[source.task].labels if isinstance(source, TaskSource) else source.labels


def task_name(party: str, source: TaskSource | FileSource) -> str:
    """Return what a party's task is called in results and statements: as in the registry, or as the party itself.

    Args:
        party: The party's name.
        source: Where its records are.
    """
    return source.task if isinstance(source, TaskSource) else party


def terms_hash(plan: PartyPlan, base_sha256: str) -> str:
    """Return the SHA-256 of what all parties and the server must share: base model, LoRA layout and the seed of A."""
    whole = plan.to_dict()
    shared = {"base": whole["base"], "base_sha256": base_sha256, "lora": whole["lora"], "seed": plan.seed}
    return hashlib.sha256(rfc8785.dumps(shared)).hexdigest()  # type: ignore[arg-type]  # JSON-able by construction


def public_settings(plan: PartyPlan) -> dict[str, object]:
    """Return the settings that a statement publishes: with them the server can tell how far noise alone goes."""
    whole, training = plan.to_dict(), plan.training
    if training.subspace is not None:  # by name, as a path is the party's own affair
        named = replace(training.subspace, public=public_name(training.subspace))
        whole = replace(plan, training=replace(training, subspace=named)).to_dict()
    return {"training": whole["training"], "lora": whole["lora"], "max_length": plan.base.max_length, "seed": plan.seed}


def noise_origin(privacy: PrivacySettings) -> Literal["operating system", "test"]:
    """Return where a party's noise is seeded, in the words of a statement; the seed itself is never published."""
    return "operating system" if privacy.noise_seed is None else "test"


def start_head(base: Base, descriptions: Mapping[str, str], kind: Literal["label-text", "linear"]) -> Head:
    """Return the head with which a party starts.

    Args:
        base: The base model.
        descriptions: Class name → public one-line description.
        kind: "label-text" makes it of the descriptions, and it stays; "linear" starts at zero and is trained.
    """
    if kind == "linear":
        return zero_linear_head(base, tuple(descriptions))
    return label_text_head(base, descriptions)
