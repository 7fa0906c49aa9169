"""From the agreed plans to what every release must look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpmerge.common.config.federation import PartyPlan
from dpmerge.common.encoder.base_model import Base, adapter_config, lora_shapes, shared_a
from dpmerge.common.privacy.clip_grid import MAX_BINS, ClipGrid
from dpmerge.common.privacy.sizing import candidates
from dpmerge.common.public.terms import label_descriptions, noise_origin, public_settings, start_head, task_name
from dpmerge.common.release.format import adapter_key
from dpmerge.server.intake.validation import PartyTerms, ReleaseSpec


def release_spec_of(base: Base, plans: Sequence[PartyPlan]) -> ReleaseSpec:
    """Return what `validate` checks releases of these plans against.

    Args:
        base: The base model, before LoRA is attached.
        plans: One per party; base, LoRA and seed are the same in all of them.
    """
    lora, seed = plans[0].lora, plans[0].seed
    shapes: dict[str, tuple[int, ...]] = {}
    frozen_a = {}
    for module, (width_out, width_in) in lora_shapes(base, lora).items():
        shapes[adapter_key(module, "lora_A")] = (lora.rank, width_in)
        shapes[adapter_key(module, "lora_B")] = (width_out, lora.rank)
        if not lora.train_a:
            frozen_a[adapter_key(module, "lora_A")] = shared_a(seed, module, (lora.rank, width_in))
    return ReleaseSpec(
        parties={
            plan.party: PartyTerms(
                head=start_head(base, label_descriptions(plan.source), plan.training.head),
                mechanism=_terms(plan),
                epsilon=plan.privacy.epsilon,
            )
            for plan in plans
        },
        base_sha256=base.sha256,
        adapter_config=adapter_config(base, lora),
        shapes=shapes,
        shared_a=frozen_a,
    )


def _terms(plan: PartyPlan) -> dict[str, Any]:
    privacy, training = plan.privacy, plan.training
    terms: dict[str, Any] = {
        "private": privacy.private,
        "population": privacy.population,
        "expected_batch_size": training.expected_batch_size,
        "num_steps": training.num_steps,
        "target_delta": privacy.delta,
        "sharpness": training.sharpness,
        "ascent_sampling": training.ascent_sampling,
        "privacy_unit": privacy.unit,
        "task": task_name(plan.party, plan.source),
        "labels": list(label_descriptions(plan.source)),
        "training": public_settings(plan),
        "noise_seed": noise_origin(plan.privacy),
    }
    subspace = training.subspace
    if subspace is not None:  # what else its description must say follows from the training settings
        chosen = subspace.k if isinstance(subspace.k, int) else candidates(subspace.num_public)
        terms["num_coordinates"] = chosen
    if privacy.private:
        terms["noise"] = privacy.noise
        if subspace is None or subspace.clip == "fixed":
            terms["l2_clip_norm"] = privacy.l2_clip_norm
        elif subspace.clip == "quantile":  # else it is of public gradients, which the server did not see
            terms["num_clip_queries"] = 1
            terms["l2_clip_norm"] = ClipGrid(privacy.l2_clip_norm, MAX_BINS).edges
    return terms
