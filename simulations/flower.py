"""Parties as Flower nodes on Ray: terms down, a release up, its receipt down; nothing left running afterwards.

Flower's in-process simulation runtime is used (docs/decisions/0005): the user never meets a daemon, and stopping is
ours to do.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from dpmerge.client.app import Participant, participant_app
from dpmerge.common.config.federation import PartyPlan
from dpmerge.common.files import append_file, naming
from dpmerge.common.release.signing import PublicKey
from dpmerge.common.release.wire import Terms
from dpmerge.server.app import Collection, server_app
from dpmerge.server.intake.reception import Reception
from dpmerge.simulations.keys import SimulatedFederation
from dpmerge.simulations.local_ray import local_ray
from dpmerge.simulations.progress import Progress

PROGRESS_EVERY_SECONDS = 0.5
END_WITHIN_SECONDS = 0.5
PARTIES = "parties"
ENDING = "ending"
"""Thread that ends a worker's process at the deadline."""


def collect(
    plans: Sequence[PartyPlan],
    terms: Terms,
    reception: Reception,
    simulated: SimulatedFederation,
    out: Path,
    *,
    num_cpus: int | None,
    progress: Progress,
) -> Collection:
    """Run every party once and return what the server accepted and refused.

    Args:
        plans: One per party; node i of the federation is party i.
        terms: What all share, sent down.
        reception: Where releases are checked, spooled and receipted.
        simulated: The federation's keys.
        out: The run's folder; each party gets `parties/NAME` below it, and Flower's and Ray's own messages go to
            `log.txt`.
        num_cpus: Cores to share among the parties; None for all.
        progress: Shows each party's stage.
    """
    cores = num_cpus or os.cpu_count() or 1
    sites = sites_of(plans, simulated, out, num_threads=_cores_of_each(cores, len(plans)))
    collection, stop = Collection(), threading.Event()
    with _quiet(out / "log.txt"), _watched(sites, progress), tempfile.TemporaryDirectory() as folder:
        over = Path(folder, "over")
        app = server_app(
            terms,
            reception,
            collection,
            num_parties=len(plans),
            stop=stop,
            on_reply=progress.done,
            on_late=over.touch,
            num_nodes=len(plans),
        )
        _simulate(app, participant_app(_site_finder(sites, over)), len(plans), cores, stop)
    return collection


def _simulate(server: ServerApp, client: ClientApp, num_nodes: int, cores: int, stop: threading.Event) -> None:
    """Let Flower run both apps in Ray; the server's, which has a thread of its own, stops however that ends."""
    try:
        with local_ray(cores):
            run_simulation(
                server_app=server,
                client_app=client,
                num_supernodes=num_nodes,
                backend_name="ray",
                backend_config={
                    "client_resources": {"num_cpus": _cores_of_each(cores, num_nodes), "num_gpus": 0.0},
                },
            )
    finally:
        stop.set()


def _cores_of_each(cores: int, num_parties: int) -> int:
    """Return how many cores a party gets, of which all train at once if there is a core for each."""
    return cores // min(cores, num_parties)


@dataclass(frozen=True, kw_only=True)
class SimulatedSite(Participant):
    """A role on one machine: no policy, an uncapped ledger in the run's folder, and the agreement's server believed."""

    @property
    def rules(self) -> None:
        """None."""

    @property
    def receipt_keys(self) -> tuple[PublicKey, ...]:
        """The server's, by the agreement."""
        return self.server_keys


def sites_of(
    plans: Sequence[PartyPlan], simulated: SimulatedFederation, out: Path, *, num_threads: int
) -> list[SimulatedSite]:
    """Return what each party has at its own place, which in a simulation lies below the run's folder.

    Args:
        plans: One per party.
        simulated: The federation's keys.
        out: The run's folder.
        num_threads: Cores of each party.
    """
    return [
        SimulatedSite(
            plan=plan,
            folder=(out / PARTIES / plan.party).resolve(),
            num_threads=num_threads,
            federation=simulated.id,
            key_file=simulated.key_file(plan.party),
            server_keys=(simulated.server_key.public,),
        )
        for plan in plans
    ]


def _site_finder(sites: Sequence[SimulatedSite], over: Path) -> Callable[[Context], SimulatedSite]:
    """Return what a worker needs to find its site: a closure over plain data, pickled to Ray's own processes only."""

    def site_of(context: Context) -> SimulatedSite:
        _end_with_the_run(over)
        return sites[int(context.node_config["partition-id"])]

    return site_of


def _end_with_the_run(over: Path) -> None:
    """End this worker's process, whatever it is at, once the file appears: Flower's runtime waits for all workers.

    To a party it is a kill, which it survives at any point.
    """

    def watch() -> None:
        while not over.exists():
            time.sleep(END_WITHIN_SECONDS)
        os._exit(1)

    if ENDING not in {thread.name for thread in threading.enumerate()}:
        threading.Thread(target=watch, name=ENDING, daemon=True).start()


@contextmanager
def _quiet(log_file: Path) -> Iterator[None]:
    """Send Flower's and Ray's log lines to the run's log, switch telemetry off, and leave the environment as it was."""
    settings = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    before = {name: os.environ.get(name) for name in (*settings, "PYTHONPATH")}
    os.environ.update(settings)
    append_file(log_file, "")  # refuses a link; the handler would follow it
    handler = logging.FileHandler(log_file)
    raises, logging.raiseExceptions = logging.raiseExceptions, False  # a full disk is said once, by the run
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("flwr", "ray")]
    handlers = [(logger, list(logger.handlers), logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, own, propagate in handlers:
            logger.handlers, logger.propagate = own, propagate
        logging.raiseExceptions = raises
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        with naming(log_file):
            handler.close()


@contextmanager
def _watched(sites: Sequence[SimulatedSite], progress: Progress) -> Iterator[None]:
    """Show every party's progress file while the block runs."""
    finished = threading.Event()
    shown: dict[str, str] = {}

    def watch() -> None:
        while not finished.wait(PROGRESS_EVERY_SECONDS):
            for site in sites:
                _show(site, shown, progress)

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _show(site: SimulatedSite, shown: dict[str, str], progress: Progress) -> None:
    try:
        now = json.loads((site.folder / "progress.json").read_text())
    except FileNotFoundError:
        return
    party, stage = site.plan.party, now["stage"]
    if shown.get(party) != stage:
        shown[party] = stage
        progress.stage(party, f"{party}: {stage}", now["total"])
    progress.update(party, now["done"])
