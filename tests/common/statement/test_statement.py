import json
import re
from functools import lru_cache

import pytest

from dpmerge.common.errors import DpmergeError
from dpmerge.common.privacy.accounting import cross_check, epsilon_pld
from dpmerge.common.privacy.mechanism import Mechanism
from dpmerge.common.statement.statement import (
    NOT_PROTECTED,
    READING,
    build_statement,
    check_statement,
    is_charge_of,
    mechanism_from_statement,
    sentence,
)

SETTINGS = {
    "noise_multiplier": 2.0,
    "l2_clip_norm": 1.0,
    "population": 2800,
    "expected_batch_size": 128,
    "num_steps": 40,
    "target_delta": 1e-5,
    "num_coordinates": 49152,
}


def write(mechanism, **changes):
    words = {
        "party": "library",
        "task": "trec6",
        "labels": ("place", "person"),
        "base_sha256": "0" * 64,
        "tuning_disclosure": "settings tuned on other, public tasks",
        "training": {"optimizer": "adam", "rho": 0.1},
    }
    return build_statement(mechanism, cross_check(mechanism), **{**words, **changes})


@lru_cache
def _as_json(private):
    changes = {} if private else {"noise_multiplier": 0.0, "private": False}
    return json.dumps(write(Mechanism(**{**SETTINGS, **changes})), allow_nan=False)


def read(private=True):
    """A statement after its trip through JSON."""
    return json.loads(_as_json(private))


def test_it_states_what_ran():
    statement = read()
    expected = {
        "schema": 1,
        "party": "library",
        "labels": ["place", "person"],
        "noise_multiplier": 2.0,
        "sampling_prob": 128 / 2800,
        "privacy_unit": "record",
        "neighboring_relation": "add_or_remove_one",
        "normalisation": "expected_batch_size",
        "sampling": "poisson",
        "noise": "secure",
        "noise_seed": "operating system",
        "private": True,
        "training": {"optimizer": "adam", "rho": 0.1},
    }
    assert {key: statement[key] for key in expected} == expected
    assert statement["accountant"].startswith("dp-accounting 0.6.0")
    cross = statement["cross_check"]
    assert cross["epsilon_optimistic"] <= statement["epsilon"] <= cross["epsilon_prv"] <= cross["epsilon_rdp"]
    assert 0 < statement["sampler_delta"] < 1e-12
    assert any("another party" in line for line in statement["not_protected"])


def test_the_mechanism_comes_back():
    assert mechanism_from_statement(read()) == check_statement(read()) == Mechanism(**SETTINGS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epsilon", 0.1),
        ("epsilon", None),
        ("epsilon", float("nan")),
        ("epsilon", True),
        ("epsilon", "1"),
        ("noise_multiplier", 1.9),
        ("noise_multiplier", 0.0),
        ("num_steps", 41),
        ("population", 2700),
        ("target_delta", 1e-6),
        ("target_delta", 1e-15),
        ("num_steps", 10**12),
        ("noise_multiplier", 1e-9),
        ("sampling_prob", 0.01),
        ("sampling", "shuffled"),
        ("normalisation", "batch_size"),
        ("company_margin", 0.0),
        ("neighboring_relation", "replace_one"),
        ("schema", 2),
        ("schema", True),
        ("private", False),
        ("noise_seed", "7"),
        ("tuning_disclosure", " "),
        ("base_sha256", 5),
        ("l2_clip_norm", [1.0]),
        ("epsilon", 10**400),
        ("epsilon", -(10**400)),
    ],
)
def test_a_forged_value_is_refused(key, value):
    with pytest.raises(DpmergeError, match="DPM-401"):
        check_statement({**read(), key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trust_model", "The server adds the noise."),
        ("not_protected", []),
        ("not_protected", [*NOT_PROTECTED, "Nothing else."]),
        ("accountant", "by hand"),
        ("accountant", "dp-accounting "),
        ("accountant", "dp-accounting 0.6.0\n"),
        ("accountant", "dp-accounting \x1b[2J"),
        ("accountant", "dp-accounting " + "x" * 51),
        ("accountant", None),
        ("cross_check", None),
        ("cross_check", {}),
        ("cross_check", {"epsilon_prv": 1.0, "epsilon_rdp": 1.0}),
        ("cross_check", {"epsilon_prv": 1.0, "epsilon_rdp": 1.0, "epsilon_optimistic": 1.0, "losses": [0.1]}),
        ("cross_check", {"epsilon_prv": 1.0, "epsilon_rdp": None, "epsilon_optimistic": 1.0}),
        ("cross_check", {"epsilon_prv": 1.0, "epsilon_rdp": 10**400, "epsilon_optimistic": 1.0}),
        ("cross_check", {"epsilon_prv": 1.0, "epsilon_rdp": "1", "epsilon_optimistic": 1.0}),
        ("sampler_delta", None),
        ("sampler_delta", -1e-20),
        ("sampler_delta", 1e-5),
        ("sampler_delta", float("nan")),
        ("sampler_delta", [0]),
    ],
)
def test_no_field_is_free(key, value):
    with pytest.raises(DpmergeError, match=f"DPM-401: {key}[. ]"):
        check_statement({**read(), key: value})


def test_missing_and_unknown_keys_are_named():
    statement = read()
    del statement["tuning_disclosure"]
    with pytest.raises(DpmergeError, match="lacks tuning_disclosure"):
        check_statement(statement)
    with pytest.raises(DpmergeError, match="unknown keys: 'accuracy'"):
        check_statement({**read(), "accuracy": 1.0})


def test_a_tuning_disclosure_is_required():
    with pytest.raises(DpmergeError, match="tuning_disclosure"):
        write(Mechanism(**SETTINGS), tuning_disclosure="")


def test_another_mechanisms_accounting_is_refused():
    mechanism = Mechanism(**SETTINGS)
    other = cross_check(Mechanism(**{**SETTINGS, "noise_multiplier": 4.0}))
    with pytest.raises(DpmergeError, match="its own numbers give"):
        build_statement(
            mechanism, other, party="a", task="b", labels=[], base_sha256="c" * 64, tuning_disclosure="d", training={}
        )


def test_the_sentence_says_the_claim_and_its_limits():
    text = f"{sentence(read())} {READING}"
    for part in ("any one record", "ε = 0.6", "δ = 1e-05", "population 2800", "secure noise", "another party", "PLD"):
        assert part in text
    rounded = float(text.split("ε = ")[1].split(",")[0])
    assert read()["epsilon"] <= rounded <= read()["epsilon"] + 1e-3


def test_the_sentence_of_a_test_seed_says_so():
    seeded = write(Mechanism(**SETTINGS), noise_seed="test")
    assert "TEST SEED" in sentence(seeded)


def test_no_privacy_is_stated_plainly():
    statement = read(private=False)
    assert statement["epsilon"] is None
    assert not check_statement(statement).private
    assert "WITHOUT privacy" in sentence(statement)
    with pytest.raises(DpmergeError, match="claimed without privacy"):
        check_statement({**statement, "epsilon": 1.0})
    assert set(statement["cross_check"].values()) == {None}
    with pytest.raises(DpmergeError, match="cross_check"):
        check_statement({**statement, "cross_check": read()["cross_check"]})


TOLD = {"k": 64, "public": "sms", "refresh_every_steps": 0, "allocation": "uniform", "clip": "fixed"}
TRAINED = TOLD | {"text": "text", "num_public": 1000}
TOLD |= {
    "texts_sha256": "0" * 64,
    "num_public": 400,
    "seed": 7,
    "basis_sha256": "1" * 64,
    "scales": [1.0, 1.0],
    "clip_quantile": None,
}


def in_subspace(training=TRAINED, **changes):
    """The statement of a training in 64 directions, with some of what it tells of them changed."""
    told = {key: value for key, value in (TOLD | changes).items() if value != "left out"}
    settings = {"training": {"subspace": training}, "seed": 7}
    return read() | {"num_coordinates": 64, "subspace": told, "training": settings}


def test_a_subspace_is_stated_with_its_public_texts():
    statement = write(
        Mechanism(**{**SETTINGS, "num_coordinates": 64}),
        subspace=TOLD,
        training={"training": {"subspace": TRAINED}},
    )
    assert check_statement(json.loads(json.dumps(statement))).num_coordinates == 64
    assert "64 directions from the public texts sms (000000000000)" in sentence(statement)
    unlisted = {**statement, "subspace": TOLD | {"texts_sha256": None, "basis_sha256": None}}
    assert check_statement(unlisted).num_coordinates == 64
    assert "the public texts sms (no hash: on nobody's list)" in sentence(unlisted)
    random = TOLD | {"public": None, "texts_sha256": None, "num_public": 0}
    training = {"training": {"subspace": {**TRAINED, "public": "none"}}}
    statement = {**read(), "num_coordinates": 64, "training": training, "subspace": random}
    assert "64 random directions" in sentence(statement)
    check_statement(statement)
    for changes in ({"texts_sha256": "0" * 64}, {"basis_sha256": None}):
        with pytest.raises(DpmergeError, match="do not fit random directions"):
            check_statement({**statement, "subspace": random | changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"k": 65}, "subspace.k = 65 is not num_coordinates = 64"),
        ({"k": True}, "subspace.k = True"),
        ({"seed": "left out"}, "subspace does not consist of"),
        ({"losses": [0.1]}, "subspace does not consist of"),
        ({"basis_sha256": "ab"}, "subspace.basis_sha256"),
        ({"public": "mail"}, "subspace.public differs from the training settings"),
        ({"public": "\x1b[2J"}, "subspace.public"),
        ({"public": None}, "do not fit each other"),
        ({"num_public": 0}, "do not fit each other"),
        ({"texts_sha256": None}, "do not fit each other"),
        ({"basis_sha256": None}, "do not fit each other"),
        ({"scales": [2.0, 1.0]}, "subspace.scales"),
        ({"scales": [0.0, 1.0]}, "subspace.scales"),
        ({"allocation": "private"}, "subspace.allocation"),
        ({"allocation": "public"}, "subspace.allocation differs"),
        ({"clip_quantile": 0.9}, "subspace.clip_quantile"),
        ({"clip_quantile": 0.5}, "subspace.clip_quantile differs"),
        ({"scales": [0.5, 2.0]}, "subspace.scales differs"),
        ({"seed": 8}, "subspace.seed differs"),
        ({"num_public": 1001}, "subspace.num_public differs"),
        ({"training": None}, "the training settings name none"),
    ],
)
def test_no_field_of_a_subspace_is_free(changes, problem):
    with pytest.raises(DpmergeError, match=f"DPM-401: .*{re.escape(problem)}"):
        check_statement(in_subspace(**changes))


def by_rule(**changes):
    return in_subspace(training=TRAINED | {"k": "auto"}, **({"k_origin": "rule"} | changes))


def test_a_k_that_the_rule_chose_is_said_to_be():
    assert check_statement(by_rule()).num_coordinates == 64


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        (lambda: by_rule(k_origin="left out"), "subspace.k_origin is missing"),
        (lambda: by_rule(k_origin="private data"), "subspace.k_origin = 'private data' is not of its kind"),
        (lambda: in_subspace(k_origin="rule"), "subspace.k_origin is stated although the training settings state k"),
        (lambda: by_rule(num_public=100), "subspace.k = 64 is none of the rule's choices (8, 16, 32)"),
        (lambda: by_rule() | {"num_coordinates": 128}, "subspace.k = 64 is not num_coordinates = 128"),
    ],
)
def test_the_rule_chooses_from_what_the_public_texts_allow(statement, problem):
    with pytest.raises(DpmergeError, match=f"DPM-401: {re.escape(problem)}"):
        check_statement(statement())


def asked(private=True, changes=None, **told):
    """The statement of a training whose clip norm one noisy query named."""
    told = {"clip": "quantile", "clip_quantile": 0.5, "clip_middle": 2.0, "clip_bins": 32} | told
    statement = in_subspace(training=TRAINED | {"clip": "quantile"}, **told)
    if not private:
        return read(private=False) | {key: statement[key] for key in ("num_coordinates", "subspace", "training")}
    return (
        statement
        | {"l2_clip_norm": 1.0, "num_clip_queries": 1, "epsilon": epsilon_with_a_clip_query()}
        | (changes or {})
    )


@lru_cache
def epsilon_with_a_clip_query():
    return epsilon_pld(Mechanism(**{**SETTINGS, "num_coordinates": 64, "num_clip_queries": 1}))


def test_a_query_for_the_clip_norm_is_stated_and_counted():
    mechanism = check_statement(asked())
    assert mechanism.queries == ((2.0, 41),)
    assert "one query more for the clip norm" in sentence(asked())
    more_steps = Mechanism(**{**SETTINGS, "num_coordinates": 64, "num_steps": 41})
    assert epsilon_with_a_clip_query() == epsilon_pld(more_steps) > read()["epsilon"] + 1e-3
    assert check_statement(asked(private=False)).num_clip_queries == 0  # nothing is clipped


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        (
            lambda: asked(changes={"num_clip_queries": 0}),
            "num_clip_queries = 0 does not fit subspace.clip = 'quantile'",
        ),
        (lambda: asked(changes={"num_clip_queries": 2}), "num_clip_queries = 2"),
        (lambda: asked(changes={"epsilon": read()["epsilon"]}), "is claimed, but its own numbers give"),
        (lambda: asked(changes={"l2_clip_norm": 1.1}), "l2_clip_norm = 1.1 is no edge"),
        (lambda: asked(clip_bins=31), "subspace.clip_bins = 31 should be 32"),
        (lambda: asked(clip_middle=0.0), "subspace.clip_middle = 0.0 is not of its kind"),
        (lambda: asked(clip_middle="left out"), "clip_middle and clip_bins belong to clip"),
        (lambda: asked(clip_quantile=None), "subspace.clip_quantile differs"),
        (lambda: in_subspace(clip_middle=1.0, clip_bins=32), "clip_middle and clip_bins belong to clip"),
        (lambda: in_subspace() | {"num_clip_queries": 1}, "num_clip_queries = 1 does not fit subspace.clip = 'fixed'"),
        (lambda: read() | {"num_clip_queries": 1}, "num_clip_queries is stated although all coordinates were trained"),
    ],
)
def test_no_field_of_a_clip_query_is_free(statement, problem):
    with pytest.raises(DpmergeError, match=f"DPM-401: .*{re.escape(problem)}"):
        check_statement(statement())


def test_a_charge_is_the_statements_but_for_a_clip_norm_that_was_asked_for_later():
    assert is_charge_of(read(), read())
    assert not is_charge_of(read() | {"l2_clip_norm": 3.0}, read())
    assert is_charge_of(asked(changes={"l2_clip_norm": 2.0}), asked())
    assert not is_charge_of(asked(changes={"num_steps": 39}), asked())


def test_a_subspace_of_the_settings_must_be_stated():
    statement = in_subspace()
    del statement["subspace"]
    with pytest.raises(DpmergeError, match="subspace is missing"):
        check_statement(statement)
