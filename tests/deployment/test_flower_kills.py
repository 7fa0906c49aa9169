"""SIGKILL for a real run, with Flower and Ray in it: the whole of it at once, or one party's process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpmerge.common.release.format import release_files
from tests.deployment.small_federation import NAMES, write_small_federation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COMMAND = (sys.executable, "-c", "from dpmerge.cli.main import main; main()", "simulate")
PATIENCE_SECONDS = 600


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A federation whose training lasts long enough to be interrupted."""
    path = write_small_federation(tmp_path_factory.mktemp("data"))
    path.write_text(path.read_text().replace("num_steps = 3", "num_steps = 60"))
    return path


@pytest.fixture(scope="module")
def undisturbed(path, tmp_path_factory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert start(path, out).wait(PATIENCE_SECONDS) == 0
    return release_files(out / "merged")


@pytest.mark.parametrize("victim", ["everything", "a party's process"])
def test_a_killed_run_is_resumed_to_the_same_bytes(victim, path, undisturbed, tmp_path):
    out = tmp_path / "run"
    process = start(path, out)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list(out.glob("parties/*/checkpoint.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if victim == "everything":
        for number in session(process.pid):
            os.kill(number, signal.SIGKILL)
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    else:
        os.kill(next(number for number in session(process.pid, "ClientAppActor")), signal.SIGKILL)
        assert process.wait(PATIENCE_SECONDS) == 1  # the others went on
    assert start(path, out, "--resume").wait(PATIENCE_SECONDS) == 0
    assert release_files(out / "merged") == undisturbed
    for name in NAMES:
        ledger = (out / "parties" / name / "ledger.jsonl").read_text().splitlines()
        assert [json.loads(line)["kind"] for line in ledger] == ["reserve", "released", "receipt"]


def start(path: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [*COMMAND, str(path), "--out", str(out), "--num-cpus", "2", "--format", "json", *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def session(leader: int, named: str = "") -> list[int]:
    """Return the processes of a session, the leader first, whose command line holds a word."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z" and named in command:
            found.append(int(stat.parent.name))
    return sorted(found, key=lambda number: number != leader)
