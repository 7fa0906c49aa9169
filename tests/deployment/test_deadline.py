"""The deadline in a run with Flower and Ray: a party that hangs in training holds nobody up, and is gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dpmerge.common.config.federation import load_federation
from dpmerge.common.release.format import release_files
from dpmerge.simulations import federation as federation_module
from dpmerge.simulations.progress import Progress
from dpmerge.simulations.reporting.results import load_results
from tests.deployment.small_federation import collect_directly, write_small_federation
from tests.deployment.test_flower_kills import session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PATIENCE_SECONDS = 600
HANGING = """
import sys, time
from pathlib import Path
from dpmerge.server.intake.reception import Reception
from dpmerge.cli import main as cli
from dpmerge.simulations import flower

marks = Path(sys.argv.pop(1))
find = flower._site_finder

def site_finder(sites, over):
    site_of = find(sites, over)

    def patched(context):
        import dpmerge.client.party.checkpoint as checkpoint
        import dpmerge.client.party.party as party

        def save_and_hang(path, state, binding):
            checkpoint.save_checkpoint(path, state, binding)
            if path.parent.name == "library" and state.step == 10:
                (marks / "hangs").touch()
                time.sleep(1e6)

        party.save_checkpoint = save_and_hang
        return site_of(context)

    return patched

flower._site_finder = site_finder
Reception.is_over = lambda self, at: (marks / "over").exists()
cli.main()
"""
PLAIN = "from dpmerge.cli.main import main; main()"


@pytest.fixture
def start():
    """Start the command line in a session of its own, of which nothing is left when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def call(script: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, *arguments, "--num-cpus", "2"]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield call
    for process in started:
        for number in session(process.pid):
            os.kill(number, signal.SIGKILL)
        process.communicate()


def test_a_party_that_hangs_is_not_waited_for_and_is_trained_to_the_end_later(start, tmp_path):
    path = write_small_federation(tmp_path)
    intake = "[intake]\ndeadline_minutes = 60.0\n[merge]"
    path.write_text(path.read_text().replace("num_steps = 3", "num_steps = 12").replace("[merge]", intake))
    out, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    process = start(HANGING, str(marks), "simulate", str(path), "--out", str(out))
    until(lambda: (marks / "hangs").exists() and (out / "receipts" / "shop.json").exists(), process)
    (marks / "over").touch()
    told, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "library late: no release by the deadline" in told
    assert {row.party: row.status for row in load_results(out).parties} == {"shop": "finished", "library": "late"}
    assert kinds(out, "library") == ["reserve"]
    assert (out / "parties" / "library" / "checkpoint.safetensors").exists()
    assert session(process.pid) == []

    (out / "keys" / "founded").write_text((datetime.now(UTC) - timedelta(hours=2)).isoformat())
    process = start(PLAIN, "simulate", str(path), "--out", str(out), "--resume")
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert kinds(out, "library") == ["reserve", "released", "receipt"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(federation_module, "collect", collect_directly)
        undisturbed, federation = tmp_path / "undisturbed", load_federation(path)
        federation_module.run(federation, undisturbed, mode="new", num_cpus=1, progress=Progress("silent"))
    assert release_files(out / "merged") == release_files(undisturbed / "merged")


def until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)


def kinds(out: Path, party: str) -> list[str]:
    return [json.loads(line)["kind"] for line in (out / "parties" / party / "ledger.jsonl").read_text().splitlines()]
