"""SIGKILL at named points of a run over a SuperLink and SuperNodes, a restart, and a second run.

A supervisor starts the killed process again, an operator waits until Flower has given the first run up and starts
another. Flower remembers nothing that helps: what was done is found in the outboxes and in the spool. Every file that a
killed process can leave is test_kills.py's matter; here it is what Flower's processes and their restarts do about it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from dpmerge.common.config.federation import load_federation
from dpmerge.common.release.format import release_files, to_files
from dpmerge.server.intake.spool import open_spool
from dpmerge.server.merging.adapters.deltas import adapter_from_files
from dpmerge.server.merging.merge import as_release, merge
from dpmerge.server.merging.spec.federation import spec_of_settings
from tests.deployment.small_federation import NAMES
from tests.deployment.superlink import Deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

WHOLE = ["reserve", "released", "receipt"]
FIRST, AGAIN = "0", "2"


@dataclass(frozen=True)
class Death:
    """Who dies when the party "shop" or the server on its behalf reaches a point (flower_app names them).

    Attributes:
        point: Where.
        victim: Who: "self" is the process of the ClientApp or ServerApp that reaches the point.
        end: How Flower says that the first run ended; "completed" where only a party was lost.
        entries: What the party's ledger says then.
        trained: The steps from which the party's trainings of both runs started.
        spooled: Whether the server has the party's release then.
    """

    point: str
    victim: str
    end: str
    entries: int
    trained: tuple[str, ...] = (FIRST,)
    spooled: bool = False


DEATHS = {
    "SuperNode in training": Death("shop:step-2", "supernode-shop", "completed", 1, (FIRST, AGAIN)),
    "SuperNode before the upload": Death("shop:upload", "supernode-shop", "completed", 2),
    "ClientApp in training": Death("shop:step-2", "self", "completed", 1, (FIRST, AGAIN)),
    "ClientApp with the release in the outbox": Death("shop:outbox", "self", "completed", 1),
    "ServerApp before the spool": Death("shop:spool", "self", "failed", 2),
    "ServerApp after the spool, before the receipt": Death("shop:receipt", "self", "failed", 2, spooled=True),
    "SuperLink in training": Death("shop:step-2", "superlink", "failed", 2),  # SuperNode and ClientApp live, and go on
    "SuperLink before the receipt arrives": Death("shop:verdict", "superlink", "failed", 2, spooled=True),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, bytes]:
    """The merged model of a run that nothing happened to."""
    with Deployment(tmp_path_factory.mktemp("undisturbed")) as deployment:
        assert deployment.wait_for_end(deployment.submit()) == "finished:completed"
        assert all(kinds(deployment.folder, party) == WHOLE for party in NAMES)
        return merged(deployment.folder)


@pytest.mark.parametrize("name", DEATHS)
def test_a_second_run_finds_what_the_killed_one_left(name, undisturbed, tmp_path):
    death = DEATHS[name]
    with Deployment(tmp_path) as deployment:
        deployment.arm(death.point, death.victim)
        first = deployment.submit()
        deployment.wait_for_kill(first, death.victim)
        assert deployment.wait_for_end(first) == f"finished:{death.end}"
        deployment.wait_for_nodes()
        deployment.wait_until(lambda: len(kinds(tmp_path, "shop")) == death.entries)
        assert ("shop" in open_spool(tmp_path / "spool").hashes()) == death.spooled
        left = outbox(tmp_path, "shop")
        assert deployment.wait_for_end(deployment.submit()) == "finished:completed"
    assert {party: kinds(tmp_path, party) for party in NAMES} == dict.fromkeys(NAMES, WHOLE)
    assert trainings(tmp_path) == sorted([("library", FIRST), *(("shop", step) for step in death.trained)])
    assert left in ({}, outbox(tmp_path, "shop"))
    assert open_spool(tmp_path / "spool").releases() == {party: outbox(tmp_path, party) for party in sorted(NAMES)}
    assert merged(tmp_path) == undisturbed


def kinds(folder: Path, party: str) -> list[str]:
    path = folder / "parties" / party / "ledger.jsonl"
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.exists() else []


def outbox(folder: Path, party: str) -> dict[str, bytes]:
    release = folder / "parties" / party / "release"
    return release_files(release) if release.exists() else {}


def trainings(folder: Path) -> list[tuple[str, str]]:
    """Return party and first step of every training."""
    return sorted((party, step) for party, step in map(str.split, (folder / "trained").read_text().splitlines()))


def merged(folder: Path) -> dict[str, bytes]:
    """Merge what the spool holds, as the federation's file says."""
    federation = load_federation(folder / "federation.toml")
    releases = open_spool(folder / "spool").releases()
    adapters = [adapter_from_files(files, party) for party, files in releases.items()]
    return to_files(as_release(merge(adapters, spec_of_settings(federation.merge, seed=federation.run.seed)), adapters))
