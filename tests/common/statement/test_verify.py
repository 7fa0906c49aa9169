import doctest
import json
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache

import pytest
import torch
from huggingface_hub import ModelCard

from dpmerge.common.release.format import ADAPTER, README, SIGNATURE, STATEMENT, Head, to_files
from dpmerge.common.release.key_list import KeyList
from dpmerge.common.release.manifest import make_manifest
from dpmerge.common.statement import card, verify
from dpmerge.common.statement.card import release_card
from dpmerge.common.statement.statement import READING, sentence
from dpmerge.common.statement.verify import Trust, check_privacy, check_release, verdict
from tests.signed_releases import FEDERATION, HEAD, KEY, KEYS, STRANGER, release, signed_files, statement

NOW = datetime(2026, 3, 1, tzinfo=UTC)
LISTED = Trust(NOW, key_list=KEYS)


def statuses(checks):
    return {check.name: check.status for check in checks}


def told(**changes):
    return json.loads(json.dumps(statement())) | changes


def failing(**changes):
    checks = check_privacy(release(told(**changes)))
    return {check.name for check in checks if check.status == "FAIL"}


def test_docstring_examples():
    assert doctest.testmod(verify).failed == doctest.testmod(card).failed == 0


def test_a_signed_release_passes_every_check():
    checks = check_release(signed_files(), LISTED)
    assert verdict(checks) == "PASS", checks
    assert list(statuses(checks)) == [
        *("signature", "files", "format", "manifest", "epsilon by PLD", "epsilon by PRV", "statement"),
        *("coordinates", "noise", "delta", "tuning"),
    ]


def test_an_unsigned_release_is_said_to_be_and_fails_where_keys_are_known():
    files = to_files(release())
    unknown, known = check_release(files, Trust(NOW)), check_release(files, LISTED)
    assert (unknown[0].status, verdict(unknown)) == ("WARN", "WARN")
    assert unknown[0].detail.startswith("unsigned")
    assert verdict(known) == "FAIL"


def test_signatures_are_held_to_what_the_verifier_knows():
    files = signed_files()
    assert statuses(check_release(files, Trust(NOW)))["signature"] == "WARN"
    assert statuses(check_release(files, Trust(NOW, keys=(KEY.public,))))["signature"] == "PASS"
    for trust in (
        Trust(NOW, keys=(STRANGER.public,)),
        Trust(NOW, key_list=KeyList({"shop": (STRANGER.public,)})),
        Trust(NOW, key_list=KeyList(KEYS.keys, {KEY.public.id: NOW})),
    ):
        assert statuses(check_release(files, trust)) == {"signature": "FAIL"}


@pytest.mark.parametrize("name", [ADAPTER, STATEMENT, README])
def test_a_changed_file_fails_and_is_not_read(name):
    files = signed_files()
    checks = check_release(files | {name: files[name] + b" "}, LISTED)
    assert statuses(checks) == {"signature": "PASS", "files": "FAIL"}
    assert name in checks[-1].detail


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({"epsilon": 0.01}, {"epsilon by PLD", "epsilon by PRV", "statement"}),
        ({"epsilon": 0.5}, {"epsilon by PLD", "epsilon by PRV", "statement"}),
        ({"epsilon": None}, {"epsilon by PLD", "statement"}),
        ({"noise_multiplier": 4.0}, {"epsilon by PLD", "epsilon by PRV", "statement"}),
        ({"noise_multiplier": 0.05}, {"statement"}),
        ({"sampling_prob": 0.5}, {"statement"}),
        ({"population": 5600}, {"epsilon by PLD", "epsilon by PRV", "statement"}),
        ({"num_steps": 5}, {"epsilon by PLD", "epsilon by PRV", "statement"}),
        ({"num_coordinates": 15}, {"coordinates", "statement"}),
        ({"noise_seed": "test"}, {"noise"}),
        ({"tuning_disclosure": " "}, {"statement"}),
        ({"not_protected": []}, {"statement"}),
        ({"subspace": {"k": 16}}, {"statement"}),
        ({"training": [1]}, {"statement"}),
        ({"extra": 1}, {"statement"}),
    ],
)
def test_what_does_not_fit_together_fails(changes, fails):
    assert failing(**changes) == fails


def test_what_weakens_a_claim_without_refuting_it_is_a_warning():
    warned = {
        check.name
        for check in check_privacy(release(told(tuning_disclosure="not disclosed", noise="fast", training={})))
        if check.status == "WARN"
    }
    assert warned == {"noise", "tuning", "coordinates"}


def test_a_head_that_was_trained_counts_as_noised_coordinates():
    with_head = replace(release(), heads={"shop": Head("linear", ("good", "bad"), torch.ones(2, 4), torch.ones(2))})
    found = next(check for check in check_privacy(with_head) if check.name == "coordinates")
    assert (found.status, found.detail) == ("FAIL", "16 noised, 26 trained")


def test_manifest_and_statement_must_be_of_one_party():
    files = signed_files(told=statement("cinema"), key=STRANGER)
    assert verdict(check_release(files, LISTED)) == "PASS"
    assert statuses(check_release(files, Trust(NOW, keys=(KEY.public,)))) == {"signature": "FAIL"}


@lru_cache
def _card():
    return signed_files()[README].decode()


def test_the_card_carries_the_claim_and_opens_as_a_model_card():
    opened = ModelCard(_card())
    assert opened.data.to_dict()["base_model"] == "minilm-l6"
    assert "differential-privacy" in opened.data.tags
    assert opened.data.library_name == "peft"
    for words in (READING, FEDERATION, HEAD, "| neighbours |", "| noise multiplier σ |", *statement()["not_protected"]):
        assert words in opened.text
    assert sentence(statement()).partition(" (")[0] in opened.text
    assert SIGNATURE not in opened.text


def test_the_card_of_a_release_without_privacy_says_so_and_names_are_not_markdown():
    changed = told(private=False, task="<b>|x", noise_multiplier=0.0, epsilon=None)
    files = to_files(release())
    text = release_card(changed, make_manifest(files, federation=FEDERATION, ledger_head=HEAD))
    assert "WITHOUT privacy" in text
    assert "differential-privacy" not in text
    assert "<b>" not in text.replace("\\<b\\>", "")
