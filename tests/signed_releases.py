"""Small signed releases that no training was needed for: what they say fits, their weights mean nothing."""

from functools import lru_cache

import torch

from dpmerge.client.party.signed_release import sign_release
from dpmerge.common.privacy.accounting import cross_check
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.release.format import Head, Release, to_files
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.signing import SigningKey
from dpmerge.common.statement.statement import build_statement

FEDERATION = "reviews-2026-5f0c"
HEAD = "ab" * 32
ADAPTER_CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "minilm-l6",
    "r": 2,
    "lora_alpha": 4,
    "bias": "none",
    "target_modules": ["query"],
}
KEY, SERVER_KEY, STRANGER = (SigningKey(bytes([number]) * 32) for number in (1, 2, 3))
KEYS = KeyList({"shop": (KEY.public,), "cinema": (STRANGER.public,), "server": (SERVER_KEY.public,)})


@lru_cache
def statement(party="shop", **changes):
    mechanism = Mechanism(
        noise_multiplier=2.0,
        l2_clip_norm=1.0,
        population=2800,
        expected_batch_size=128,
        num_steps=10,
        target_delta=1e-5,
        num_coordinates=16,
    )
    return build_statement(
        mechanism,
        cross_check(mechanism),
        party=party,
        task="product",
        labels=("good", "bad"),
        base_sha256="c" * 64,
        tuning_disclosure="on other, public tasks",
        training={"lora": {"train_a": False}},
        **changes,
    )


def release(told=None):
    told = told or statement()
    party = told["party"]
    return Release(
        party=party,
        adapter={
            "base_model.model.query.lora_A.weight": torch.full((2, 4), 0.5),
            "base_model.model.query.lora_B.weight": torch.arange(16.0).reshape(8, 2),
        },
        adapter_config=dict(ADAPTER_CONFIG),
        heads={party: Head("label-text", ("good", "bad"), torch.ones(2, 4))},
        statement=told,
    )


def signed_files(*, told=None, federation=FEDERATION, key=KEY, ledger_head=HEAD):
    return sign_release(to_files(release(told)), federation=federation, ledger_head=ledger_head, key=key)
