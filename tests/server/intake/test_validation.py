"""The reject matrix: every way in which a release can be wrong, its reason, and that others are not touched."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpmerge.common.privacy.accounting import cross_check
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.release.format import ADAPTER, CONFIG, HEAD, STATEMENT, Head, Release, to_files
from dpmerge.common.statement.statement import build_statement
from dpmerge.common.untrusted.parsing import REASONS, ReleaseRefused
from dpmerge.server.intake.spool import Spool
from dpmerge.server.intake.validation import PartyTerms, ReleaseSpec, validate
from tests.release_changes import Files, edit, put, scaled, tensors

STEM = "base_model.model.layer.0.query"
A, B = f"{STEM}.lora_A.weight", f"{STEM}.lora_B.weight"
AGREED = {"population": 2800, "expected_batch_size": 128, "num_steps": 40, "l2_clip_norm": 1.0, "target_delta": 1e-5}
AGREED |= {"sharpness": "sat", "noise": "fast", "private": True}
NUM_TRAINED = 4 * 2 + 2 * 5 + 2  # B, and the linear head's weight and bias
AGREED_NOISE_SEED = {"noise_seed": "operating system"}
BASE = "ab" * 32
CONFIG_FIELDS = {
    "peft_type": "LORA",
    "base_model_name_or_path": "minilm-l6",
    "r": 2,
    "lora_alpha": 4,
    "bias": "none",
    "use_rslora": False,
    "target_modules": ["query"],
}


def release(party: str, *, private: bool = True, num_coordinates: int = NUM_TRAINED) -> Release:
    sigma = 1.3 if private else 0.0
    settings: dict[str, Any] = AGREED | {"private": private, "num_coordinates": num_coordinates}
    mechanism = Mechanism(noise_multiplier=sigma, **settings)
    statement = build_statement(
        mechanism,
        cross_check(mechanism),
        party=party,
        task="trec6",
        labels=("bad", "good"),
        base_sha256=BASE,
        tuning_disclosure="on public tasks",
        training={},
    )
    generator = torch.Generator().manual_seed(1)
    adapter = {A: shared_a(), B: torch.randn(4, 2, generator=generator)}
    config = CONFIG_FIELDS | {"peft_version": "0.21", "rank_pattern": {}, "layers_to_transform": None}
    return Release(party, adapter, config, {party: head()}, statement)


def shared_a() -> torch.Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(0))


def head(kind: str = "linear") -> Head:
    weight = torch.linspace(0, 1, 10).reshape(2, 5)
    return Head(kind, ("bad", "good"), weight, torch.ones(2) if kind == "linear" else None, 8.0)


@pytest.fixture(scope="module")
def good() -> Files:
    return to_files(release("shop"))


@pytest.fixture(scope="module")
def release_spec() -> ReleaseSpec:
    start = Head("linear", ("bad", "good"), torch.zeros(2, 5), torch.zeros(2), 8.0)
    terms = PartyTerms(head=start, mechanism=AGREED | AGREED_NOISE_SEED, epsilon=2.0)
    return ReleaseSpec(
        parties={"shop": terms, "bank": terms},
        base_sha256=BASE,
        adapter_config=CONFIG_FIELDS,
        shapes={A: (2, 5), B: (4, 2)},
        shared_a={A: shared_a()},
        max_bytes=1 << 20,
        max_delta_norm=50.0,
    )


HOSTILE: dict[str, tuple[str, Callable[[Files], Files]]] = {
    "too many bytes": ("size", lambda files: files | {"README.md": bytes(2 << 20)}),
    "too many files": ("size", lambda files: files | {f"{i}.json": b"{}" for i in range(9)}),
    "endless model card": ("size", lambda files: files | {"README.md": b"#" * (1 << 17)}),
    "picture": ("unknown-file", lambda files: files | {"explain.svg": b"<svg/>"}),
    "merge record": ("unknown-file", lambda files: files | {"merge.json": b"{}"}),
    "traversal": ("path", lambda files: files | {"../../x.json": b"{}"}),
    "pickle": ("pickle", lambda files: files | {"adapter_model.bin": b"\x80\x04."}),
    "cut off": ("truncated", lambda files: files | {ADAPTER: files[ADAPTER][:-1]}),
    "header bomb": ("header-too-large", lambda files: files | {ADAPTER: (100 << 20).to_bytes(8, "little") + b"{"}),
    "NaN": ("non-finite", put(B, torch.full((4, 2), math.nan))),
    "infinity": ("non-finite", put(B, torch.full((4, 2), math.inf))),
    "wrong rank": ("shape", put(B, torch.zeros(4, 3))),
    "broadcastable": ("shape", put(B, torch.zeros(1, 2))),
    "another dimension": ("shape", put(B, torch.zeros(4, 2, 1))),
    "half precision": ("dtype", put(B, torch.zeros(4, 2, dtype=torch.bfloat16))),
    "integers": ("dtype", put(B, torch.zeros(4, 2, dtype=torch.int32))),
    "another tensor": ("unknown-key", put("base_model.model.pooler.lora_A.weight", torch.zeros(2, 5))),
    "a tensor less": ("missing-key", tensors(lambda found: found.pop(B))),
    "own A": ("shared-a", scaled(A, 1.0000001)),
    "a hundred times the norm": ("norm", scaled(B, 100)),
    "huge": ("norm", scaled(B, 1e30)),
    "other rank": ("config", edit(CONFIG, r=4)),
    "other alpha": ("config", edit(CONFIG, lora_alpha=400)),
    "other targets": ("config", edit(CONFIG, target_modules=["query", "pooler"])),
    "rslora": ("config", edit(CONFIG, use_rslora=True)),
    "a pattern": ("config", edit(CONFIG, alpha_pattern={"query": 400})),
    "dora": ("config", edit(CONFIG, use_dora=True)),
    "saved modules": ("config", edit(CONFIG, modules_to_save=["pooler"])),
    "base by another name": ("config", edit(CONFIG, base_model_name_or_path="bert")),
    "another base": ("base-mismatch", edit(STATEMENT, base_sha256="cd" * 32)),
    "another party's release": ("party-mismatch", lambda _: to_files(release("bank"))),
    "other labels": ("head", lambda files: {k: v.replace(b"good", b"fine") for k, v in files.items()}),
    "head of another width": ("head", put("shop.weight", torch.zeros(2, 4), HEAD)),
    "head a hundred times": ("norm", scaled("shop.weight", 1000, HEAD)),
    "head NaN": ("non-finite", put("shop.bias", torch.tensor([0.0, math.nan]), HEAD)),
    "head of a third party": ("unknown-key", put("bank.weight", torch.zeros(2, 5), HEAD)),
    "forged epsilon": ("statement-inconsistent", edit(STATEMENT, epsilon=0.1)),
    "epsilon as a string": ("statement-inconsistent", edit(STATEMENT, epsilon="1")),
    "epsilon missing": ("epsilon-above-plan", edit(STATEMENT, epsilon=None)),
    "epsilon above the plan": ("epsilon-above-plan", edit(STATEMENT, epsilon=2.5)),
    "less noise": ("statement-inconsistent", edit(STATEMENT, noise_multiplier=0.9)),
    "more steps": ("statement-terms", edit(STATEMENT, num_steps=41)),
    "smaller population": ("statement-terms", edit(STATEMENT, population=1000)),
    "larger clip": ("statement-terms", edit(STATEMENT, l2_clip_norm=2.0)),
    "larger delta": ("statement-terms", edit(STATEMENT, target_delta=1e-3)),
    "other noise": ("statement-terms", edit(STATEMENT, noise="secure", num_coordinates=8)),
    "fewer coordinates": ("statement-terms", edit(STATEMENT, num_coordinates=NUM_TRAINED - 1)),
    "no coordinates": ("statement-terms", edit(STATEMENT, num_coordinates=0)),
    "an epsilon that is no float": ("json", edit(STATEMENT, epsilon=-(10**400))),
    "a claim in other words": ("statement-inconsistent", edit(STATEMENT, trust_model="Trust the server.")),
    "half a surrogate pair": ("json", edit(STATEMENT, tuning_disclosure="\ud800")),
    "noise from a test seed": ("statement-terms", edit(STATEMENT, noise_seed="test")),
    "rank of another kind": ("config", edit(CONFIG, r=2.0)),
    "an unknown setting that is empty": ("config", edit(CONFIG, cls=0)),
    "an unknown setting that is null": ("config", edit(CONFIG, cls=None)),
    "rslora of another kind": ("config", edit(CONFIG, use_rslora=0)),
    "a start that changes the base": ("config", edit(CONFIG, init_lora_weights="pissa")),
    "a known setting that is on": ("config", edit(CONFIG, kasa_config={"beta": 1.0})),
    "a target twice": ("config", edit(CONFIG, target_modules=["query", "query"])),
    "a version that is none": ("config", edit(CONFIG, peft_version=[1])),
    "not private": (
        "statement-terms",
        lambda files: files | {STATEMENT: to_files(release("shop", private=False))[STATEMENT]},
    ),
    "statement with a hole": ("statement-inconsistent", lambda files: files | {STATEMENT: without(files, "sampling")}),
    "statement with nonsense": ("statement-inconsistent", edit(STATEMENT, num_steps=-1)),
}


def without(files: Files, key: str) -> bytes:
    statement = json.loads(files[STATEMENT])
    del statement[key]
    return json.dumps(statement).encode()


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_releases_are_refused(good: Files, release_spec: ReleaseSpec, case: str) -> None:
    reason, change = HOSTILE[case]
    files = change(copy.copy(good))
    assert files != good
    with pytest.raises(ReleaseRefused) as caught:
        validate("shop", files, release_spec)
    assert caught.value.reason == reason, str(caught.value)
    assert "shop" in str(caught.value)


def test_a_good_release_is_accepted(good: Files, release_spec: ReleaseSpec) -> None:
    accepted = validate("shop", good, release_spec)
    assert to_files(accepted) == good


def test_refusals_name_the_tensor(good: Files, release_spec: ReleaseSpec) -> None:
    for case in ("NaN", "wrong rank", "own A", "half precision"):
        with pytest.raises(
            ReleaseRefused, match=r"shop: adapter_model\.safetensors: base_model\.model\.layer\.0\.query"
        ):
            validate("shop", HOSTILE[case][1](good), release_spec)


def test_a_stranger_is_refused(good: Files, release_spec: ReleaseSpec) -> None:
    with pytest.raises(ReleaseRefused, match="unknown-party"):
        validate("stranger", good, release_spec)


def test_a_label_text_head_must_be_the_label_texts(release_spec: ReleaseSpec) -> None:
    terms = replace(release_spec.parties["shop"], head=head("label-text"))
    agreed = replace(release_spec, parties={"shop": terms})
    files = to_files(replace(release("shop", num_coordinates=8), heads={"shop": head("label-text")}))
    validate("shop", files, agreed)
    validate("shop", scaled("shop.weight", 1.00001, HEAD)(files), agreed)
    with pytest.raises(ReleaseRefused, match="embeddings"):
        validate("shop", scaled("shop.weight", 1.1, HEAD)(files), agreed)
    with pytest.raises(ReleaseRefused, match="kind"):
        validate("shop", to_files(release("shop")), agreed)


def test_without_privacy_only_where_agreed(good: Files, release_spec: ReleaseSpec) -> None:
    terms = PartyTerms(head=release_spec.parties["shop"].head, mechanism=AGREED | {"private": False}, epsilon=None)
    agreed = replace(release_spec, parties={"shop": terms})
    validate("shop", to_files(release("shop", private=False)), agreed)
    with pytest.raises(ReleaseRefused, match="statement-terms"):
        validate("shop", good, agreed)


def test_a_trained_a_is_bound_by_shape_only(good: Files, release_spec: ReleaseSpec) -> None:
    files, agreed = scaled(A, 1.5)(good), replace(release_spec, shared_a={})
    trained = NUM_TRAINED + 2 * 5
    charged = json.loads(files[STATEMENT])["sampler_delta"] * trained / NUM_TRAINED  # per noised value
    validate("shop", edit(STATEMENT, num_coordinates=trained, sampler_delta=charged)(files), agreed)
    with pytest.raises(ReleaseRefused, match="num_coordinates = 20 is not 30"):
        validate("shop", files, agreed)


def test_a_refused_release_leaves_the_spool_as_it_was(tmp_path: Path, good: Files, release_spec: ReleaseSpec) -> None:
    spool = Spool(tmp_path)
    spool.accept("bank", good)
    with pytest.raises(ReleaseRefused):
        spool.accept("shop", to_files(validate("shop", HOSTILE["NaN"][1](good), release_spec)))
    assert spool.releases() == {"bank": good}


def test_every_reason_is_explained() -> None:
    assert {reason for reason, _ in HOSTILE.values()} <= REASONS.keys()
