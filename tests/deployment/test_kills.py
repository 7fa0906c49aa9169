"""SIGKILL at named points of a whole run, then a second run in the same folder.

The run is the product's (`simulations/federation.py:run`); only Flower's transport is replaced by calls, so that a
point costs seconds and every process of the run dies at once. What a killed Flower and Ray leave behind,
test_flower_kills.py looks at. The product has no hook for this: a forked child patches a function that kills it.
"""

import importlib
import json
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dpmerge.client.party import party as party_module
from dpmerge.client.party.calibration import make_mechanism
from dpmerge.common.config.federation import Federation, load_federation, party_plan
from dpmerge.common.privacy.accounting import cross_check
from dpmerge.common.release.format import release_files
from dpmerge.common.statement.statement import check_statement
from dpmerge.simulations import federation as federation_module
from dpmerge.simulations.progress import Progress
from dpmerge.simulations.reporting.results import load_results
from tests.deployment.small_federation import collect_directly, write_small_federation

pytestmark = pytest.mark.slow

WHOLE = ["reserve", "released", "receipt"]


@dataclass(frozen=True)
class Point:
    """Die at the nth call of a function, before or after it; the first party is the one at work until the merge.

    Attributes:
        target: Module and attribute.
        after: Whether the call still happens.
        nth: Counted in the killed run.
        entries: What the first party's ledger says then.
        trains_again: Whether the second run trains the first party further; never from the outbox onward.
        lost: Whether the state is gone, so that only another folder and a second charge help.
    """

    target: str
    after: bool = False
    nth: int = 1
    entries: int = 3
    trains_again: bool = False
    lost: bool = False


POINTS = {
    "before the charge": Point("client.budget.ledger:Ledger.reserve", entries=0, trains_again=True),
    "after the charge": Point(
        "client.budget.ledger:Ledger.reserve", after=True, entries=1, trains_again=True, lost=True
    ),
    "after the first checkpoint": Point("client.party.party:save_checkpoint", after=True, entries=1, trains_again=True),
    "in training": Point("client.party.party:save_checkpoint", after=True, nth=3, entries=1, trains_again=True),
    "after training": Point("client.party.party:put", entries=1, trains_again=True),
    "while the outbox is written": Point("client.party.outbox:sign_release", after=True, entries=1, trains_again=True),
    "release in the outbox": Point("client.budget.ledger:Ledger.released", entries=1),
    "release in the outbox, checkpoint still there": Point("client.party.party:erase", entries=1),
    "release in the ledger": Point("client.budget.ledger:Ledger.released", after=True, entries=2),
    "before the upload arrives": Point("server.intake.reception:Reception.receive", entries=2),
    "before the spool": Point("server.intake.spool:Spool.accept", entries=2),
    "release in the spool, entry not": Point("server.intake.spool:replace_file", entries=2),
    "after the spool, before the receipt": Point("server.intake.receipts:Receipts.issue", entries=2),
    "receipt written, not sent": Point("server.intake.reception:Reception.receive", after=True, entries=2),
    "receipt arrived": Point("client.party.outbox:replace_file", entries=2),
    "receipt stored, ledger open": Point("client.party.outbox:record_receipt", entries=2),
    "receipt in the ledger": Point("client.party.outbox:record_receipt", after=True),
    "before the merge": Point("simulations.federation:merge"),
    "while the merged model is written": Point("simulations.federation:replace_folder", nth=3),
    "in the evaluation": Point("simulations.federation:evaluate"),
    "before the results": Point("simulations.federation:write_results"),
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Federation:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return load_federation(write_small_federation(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def undisturbed(federation, tmp_path_factory) -> dict[str, bytes]:
    """The merged model of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert in_child(lambda: run(federation, out, "new"), out) == 0
    for party in federation.parties:  # what the accountant has computed here, every later child finds computed
        statement = json.loads((out / "releases" / party.name / "statement.json").read_text())
        plan = party_plan(federation, party.name)
        cross_check(make_mechanism(plan.privacy, plan.training, statement["num_coordinates"]))
        check_statement(statement)
    return release_files(out / "merged")


@pytest.mark.parametrize("name", POINTS)
def test_a_killed_run_is_gone_on_with(name, federation, undisturbed, tmp_path):
    point, out = POINTS[name], tmp_path / "run"
    assert in_child(lambda: run(federation, out, "new", point), out) == -signal.SIGKILL
    assert kinds(out, "shop") == WHOLE[: point.entries]
    assert in_child(lambda: run(federation, out, "resume"), out) == 0
    assert kinds(out, "library") == WHOLE
    trained = (out.parent / "trained").read_text().split()
    assert trained.count("shop") == (2 if point.trains_again else 1)
    if point.lost:
        rows = {row.party: row for row in load_results(out).parties}
        assert kinds(out, "shop") == ["reserve"]
        assert rows["shop"].reason.startswith("DPM-599")
        assert "there: DPM-302, resume refused" in rows["shop"].reason  # what the party keeps is the simulation's own
        assert rows["library"].status == "finished"
    else:
        assert kinds(out, "shop") == WHOLE
        assert release_files(out / "merged") == undisturbed


def kinds(out: Path, party: str) -> list[str]:
    path = out / "parties" / party / "ledger.jsonl"
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.exists() else []


def run(federation: Federation, out: Path, mode, point: Point | None = None) -> None:
    """Run in a child: notes which parties are trained, keeps a checkpoint of every step, dies at the point."""
    trained, train = out.parent / "trained", party_module._train

    def noting_train(plan, *arguments):
        with trained.open("a") as file:
            file.write(f"{plan.party}\n")
        return train(plan, *arguments)

    party_module._train = noting_train
    party_module.CHECKPOINT_EVERY_STEPS = 1
    federation_module.collect = collect_directly
    if point is not None:
        arm(point)
    federation_module.run(federation, out, mode=mode, num_cpus=1, progress=Progress("silent"))


def arm(point: Point) -> None:
    module_name, _, path = point.target.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(f"dpmerge.{module_name}")
    for part in owners:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    def deadly(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == point.nth and not point.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == point.nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def in_child(work: Callable[[], None], out: Path) -> int:
    """Do something in a forked process; return its exit status, negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            (out.parent / "traceback").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code != 1, (out.parent / "traceback").read_text()
    return code
