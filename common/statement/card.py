"""The model card of a release: what it is, what its privacy claim says and does not say, and how to check it.

The order follows NIST SP 800-226: what is promised to whom, by which mechanism and parameters, in which trust model,
and what is not protected. The table is enough to recompute the claim (tier 3 of OpenDP's registry of deployments).
"""

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from dpmerge.common.printable import code
from dpmerge.common.printable import markdown as escaped
from dpmerge.common.release.format import README
from dpmerge.common.release.manifest import Manifest
from dpmerge.common.statement.statement import READING, sentence

CANNOT_BE_CHECKED = (
    "Nobody can tell from a release whether the stated noise was really added: that rests on the party, its code and "
    "its source of randomness."
)


def release_card(statement: Mapping[str, Any], manifest: Manifest, *, base_model: str | None = None) -> str:
    """Return the text of README.md for one party's release; the same arguments give the same text.

    Args:
        statement: A checked privacy statement.
        manifest: Of the release, with or without a card.
        base_model: Name of the base model, where a hub would look for it.
    """
    private = statement["private"]
    data = ModelCardData(
        base_model=base_model,
        base_model_relation="adapter",
        library_name="peft",
        tags=["lora", "dpmerge", *(["differential-privacy"] if private else [])],
    )
    sections = [
        f"# LoRA adapter of {escaped(manifest.party)} for {escaped(statement['task'])}",
        _what(statement, manifest, base_model),
        "## Privacy",
        escaped(sentence(statement)),
        *([READING] if private else []),
        "| what | value |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in _facts(statement)),
        "### What is not protected",
        "\n".join(f"- {line}" for line in statement["not_protected"]),
        "### Whom to trust",
        f"{statement['trust_model']} {CANNOT_BE_CHECKED}",
        "## Origin",
        _origin(manifest),
        "## Check it",
        "```\ndpmerge verify FOLDER --allow KEYS.toml\n```",
        "recomputes ε from the statement with two accountants and holds every file to the signed manifest, offline.",
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"))


def _what(statement: Mapping[str, Any], manifest: Manifest, base_model: str | None) -> str:
    labels = ", ".join(map(escaped, statement["labels"]))
    base = "the base model" if base_model is None else code(base_model)
    return (
        f"A LoRA adapter on {base} (SHA-256 `{manifest.base_sha256}`), with a head for {len(statement['labels'])} "
        f"classes: {labels}. Released once, to be merged with the adapters of other parties.\n\n"
        '```python\nfrom peft import PeftModel\nmodel = PeftModel.from_pretrained(base, "FOLDER")\n```'
    )


def _facts(statement: Mapping[str, Any]) -> list[tuple[str, str]]:
    told = {name: value for name, value in statement.items() if value is not None}
    rows = {
        "protected unit": "privacy_unit",
        "neighbours": "neighboring_relation",
        "ε": "epsilon",
        "δ": "target_delta",
        "declared population": "population",
        "sampling": "sampling",
        "sampling probability q": "sampling_prob",
        "expected batch B": "expected_batch_size",
        "sum divided by": "normalisation",
        "steps T": "num_steps",
        "clip norm C": "l2_clip_norm",
        "queries for the clip norm": "num_clip_queries",
        "noise multiplier σ": "noise_multiplier",
        "ascent noise multiplier": "ascent_noise_multiplier",
        "noised coordinates": "num_coordinates",
        "sharpness": "sharpness",
        "noise": "noise",
        "noise seeded by": "noise_seed",
        "part of δ for the sampler": "sampler_delta",
        "accountant": "accountant",
        "settings chosen on": "tuning_disclosure",
    }
    facts = [(words, _cell(told[key])) for words, key in rows.items() if key in told]
    witnesses = {name: value for name, value in statement["cross_check"].items() if value is not None}
    facts += [(name.replace("epsilon_", "ε by "), _cell(value)) for name, value in sorted(witnesses.items())]
    subspace = statement.get("subspace", {"": "all coordinates were trained"})
    return [*facts, ("subspace", "; ".join(f"{key} {_cell(value)}".strip() for key, value in subspace.items()))]


def _origin(manifest: Manifest) -> str:
    files = [f"| {name} | `{digest}` |" for name, digest in sorted(manifest.files.items()) if name != README]
    return (
        f"Party **{escaped(manifest.party)}**, federation `{manifest.federation}`, on top of ledger "
        f"`{manifest.ledger_head}`.\n\n| file | SHA-256 |\n|---|---|\n" + "\n".join(files)
    )


def _cell(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else escaped(str(value))
