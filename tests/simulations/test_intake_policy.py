"""Quorum, deadline, late releases and withdrawal in a whole run, with calls in place of Flower."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from dpmerge.common.config.federation import Federation, IntakeSettings, MergeSettings, load_federation
from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import release_files
from dpmerge.server.intake.spool import Spool
from dpmerge.server.merging.spec.federation import checked
from dpmerge.simulations import federation as federation_module
from dpmerge.simulations.progress import Progress
from dpmerge.simulations.reporting.results import load_results
from tests.deployment.small_federation import collect_directly, write_small_federation

AFTER = {"deadline_minutes": 60.0}
"""A deadline that an hour-old founding has passed."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Federation:
    return load_federation(write_small_federation(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def half(federation, tmp_path_factory):
    """A run in which only the shop was there: its release is in, the library has not begun."""
    out = tmp_path_factory.mktemp("half") / "run"
    with pytest.MonkeyPatch.context() as patch:
        run(patch, federation, out, silent=["library"])
    return out


@pytest.fixture
def out(half, tmp_path):
    """A copy of that run, founded two hours ago."""
    out = shutil.copytree(half, tmp_path / "run")
    (out / "keys" / "founded").write_text((datetime.now(UTC) - timedelta(hours=2)).isoformat())
    shutil.rmtree(out / "merged")
    return out


def run(patch, federation, out, *, silent=(), **intake):
    """Run or resume under these settings; return who was started, and the results as they were stored."""
    started = []

    def collect(plans, terms, reception, *rest, **options):
        present = [plan for plan in plans if plan.party not in silent]
        started.extend(plan.party for plan in present)
        return collect_directly(present, terms, reception, *rest, **options)

    patch.setattr(federation_module, "collect", collect)
    settings = replace(federation, intake=IntakeSettings(**intake))
    mode = "resume" if out.exists() else "new"
    if out.exists():
        (out / "run.json").write_text(json.dumps(checked(settings).to_dict()))  # as if it had been started with them
    results = federation_module.run(settings, out, mode=mode, num_cpus=1, progress=Progress("silent"))
    assert load_results(out) == results
    return started, results


def test_a_merge_that_no_method_takes_is_refused_before_anybody_trains(monkeypatch, federation, tmp_path):
    started = []
    monkeypatch.setattr(federation_module, "collect", lambda *_, **__: started.append("a party"))
    monkeypatch.setattr(federation_module, "load_base", lambda *_: started.append("the base model"))
    bad = federation.with_merge(MergeSettings(method="ties", parameters={"outliers": 0.1}))
    with pytest.raises(DpmergeError, match=r"DPM-103: merge\.outliers = 0\.1 is no parameter of ties"):
        federation_module.run(bad, tmp_path / "run", mode="new", num_cpus=1, progress=Progress("silent"))
    assert started == []
    assert list(tmp_path.iterdir()) == []


def rows(results):
    return {row.party: (row.status, row.reason) for row in results.parties}


def ledger(out, party):
    path = out / "parties" / party / "ledger.jsonl"
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.exists() else []


def test_below_the_quorum_nothing_is_merged_and_a_resume_goes_on(monkeypatch, federation, out):
    _, results = run(monkeypatch, federation, out, silent=["library"], min_parties=2)
    assert results.not_merged == "1 of 2 releases are here, and intake.min_parties is 2"
    assert (results.complete, results.merge, (out / "merged").exists()) == (False, {}, False)
    assert rows(results) == {"shop": ("finished", None), "library": ("failed", "DPM-599: no reply came")}
    shop = results.parties[0]
    assert (shop.epsilon, shop.accuracy.own) == (pytest.approx(4.0, rel=0.01), None)
    assert shop.sentence
    assert "Nothing was merged" in (out / "report.html").read_text()
    assert list(Spool(out / "spool").hashes()) == ["shop"]
    _, results = run(monkeypatch, federation, out, min_parties=2)
    assert (results.complete, results.not_merged) == (True, "")
    assert results.merge["parties"] == ["library", "shop"]


def test_after_the_deadline_a_resume_trains_the_late_party_to_the_end(monkeypatch, federation, out):
    started, results = run(monkeypatch, federation, out, **AFTER)
    assert started == ["shop", "library"]
    assert results.complete
    assert ledger(out, "library") == ["reserve", "released", "receipt"]


def test_a_federation_that_takes_nothing_late_lets_nobody_train_in_vain(monkeypatch, federation, out):
    (out / "parties" / "shop" / "receipt.json").unlink()
    receipt = (out / "receipts" / "shop.json").read_bytes()
    started, results = run(monkeypatch, federation, out, late="refuse", **AFTER)
    assert started == ["shop"]
    assert (out / "parties" / "shop" / "receipt.json").read_bytes() == receipt
    assert ledger(out, "library") == []
    status, reason = rows(results)["library"]
    assert status == "late"
    assert reason.startswith("no release by the deadline, 20")
    assert reason.endswith("this federation takes no more releases")
    assert results.merge["parties"] == ["shop"]
    assert not results.complete


def test_a_release_that_arrives_late_is_refused_to_its_party_too(monkeypatch, federation, out):
    for place in ("spool/parties", "receipts"):
        shutil.rmtree(out / place)  # as if the server had never seen it
    started, results = run(monkeypatch, federation, out, late="refuse", **AFTER)
    assert started == ["shop"]
    status, reason = rows(results)["shop"]
    assert (status, "[late]" in reason) == ("failed", True)
    assert "[late]" in (out / "parties" / "shop" / "party.log").read_text()
    assert results.not_merged.startswith("0 of 2 releases")


def test_a_withdrawn_release_counts_for_nothing_and_is_told(monkeypatch, federation, out):
    run(monkeypatch, federation, out)
    merged = release_files(out / "merged")
    Spool(out / "spool").withdraw("shop")
    _, results = run(monkeypatch, federation, out)
    assert results.merge["parties"] == ["library"]
    assert rows(results)["shop"] == ("withdrawn", "its release was withdrawn and is in no merge")
    assert results.complete  # as wished
    assert release_files(out / "merged") != merged
    _, results = run(monkeypatch, federation, out, min_parties=2)
    assert results.not_merged.startswith("1 of 2 releases")
    assert not results.complete
