"""`dpmerge audit mechanism`: what it prints, and exit codes that tell the truth."""

import json
from functools import partial

import pytest

from dpmerge.client.audit import membership_game as audit
from dpmerge.client.audit.membership_game import AuditResult


@pytest.fixture
def dpmerge(dpmerge):
    return partial(dpmerge, "audit", "mechanism")


def test_sound_mechanism_exits_0(dpmerge):
    code, out, _ = dpmerge("--num-trials", "4096", "--epsilon", "2", "--format", "json")
    answer = json.loads(out)
    assert code == 0
    assert answer["schema"] == 1
    assert answer["audit"]["holds"] is True
    assert answer["audit"]["epsilon_lower"] < answer["audit"]["epsilon_claimed"] <= 2
    assert (answer["mechanism"]["num_steps"], answer["mechanism"]["noise"]) == (16, "secure")


def test_refuted_claim_exits_1_and_says_so(dpmerge, monkeypatch):
    def refuted(_mechanism, *, num_trials, max_seconds):
        return AuditResult(
            epsilon_lower=1.5,
            epsilon_claimed=1.0,
            target_delta=0.01,
            confidence=0.999,
            num_trials=num_trials,
            seconds=max_seconds,
        )

    monkeypatch.setattr(audit, "audit_mechanism", refuted)
    code, out, _ = dpmerge()
    assert code == 1
    assert "ε ≥ 1.500" in out
    assert "REFUTED" in out
    assert "99.9%" in out


@pytest.mark.parametrize("option", [("--epsilon", "0"), ("--delta", "1"), ("--sharpness", "flat")])
def test_bad_input_exits_2_with_one_line(dpmerge, option):
    code, out, err = dpmerge(*option)
    assert (code, out) == (2, "")
    assert err.startswith("DPM-103")
    assert err.count("\n") == 1


def test_help_has_an_example(dpmerge):
    code, out, _ = dpmerge("--help")
    assert code == 0
    assert "Example: dpmerge audit mechanism" in " ".join(out.split())


@pytest.mark.slow
def test_default_audit_takes_less_than_a_minute_and_is_tight(dpmerge):
    code, out, _ = dpmerge("--format", "json")
    found = json.loads(out)["audit"]
    assert code == 0
    assert found["seconds"] < 60
    assert found["epsilon_lower"] > 0.6 * found["epsilon_claimed"]
