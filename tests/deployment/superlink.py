"""A federation on loopback with Flower's own processes: a SuperLink on a database file and a SuperNode per party.

    federation.toml, *.csv     the agreement, and the parties' records
    keys/                      as a simulation founds it
    parties/<party>/           a site: checkpoint, outbox, ledger
    spool/, receipts/          the server's
    superlink.db               Flower's
    home/<process>/, logs/     Flower's settings and installed bundles, apart for each; what the processes say

The SuperLink starts a process for each run's ServerApp, each SuperNode one for each message to its ClientApp.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dpmerge.simulations.keys import create_federation
from tests.deployment.small_federation import NAMES, write_small_federation

T = TypeVar("T")

APP = Path(__file__).parent / "flower_app"
PROGRAMS = Path(sys.executable).parent
SUPERLINK = "superlink"
ARMED = "armed"
PATIENCE_SECONDS = 900
POLL_SECONDS = 2.0
"""Between two looks: a call of Flower's command line takes a second of a core that the parties need."""
SETTINGS = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Deployment:
    """One federation and the processes that serve it. Leave it as a context: then nothing runs any more.

    Args:
        folder: Empty; everything lies below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_small_federation(folder)
        create_federation(folder, NAMES)
        for name in ("pids", "logs", "home/operator"):
            (folder / name).mkdir(parents=True)
        ports = free_ports(1 + len(NAMES))
        self._superlink = f"127.0.0.1:{ports[0]}"
        (folder / "home/operator/config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{self._superlink}"\ninsecure = true\n'
        )
        self._commands: dict[str, tuple[str, ...]] = {
            SUPERLINK: ("flower-superlink", "--database", str(folder / "superlink.db"), *listen(ports[0]))
        }
        for port, party in zip(ports[1:], NAMES, strict=True):
            node = f'party="{party}" folder="{folder}"'
            where = ("--superlink", self._superlink, "--node-config", node)
            self._commands[f"supernode-{party}"] = ("flower-supernode", *where, *listen(port))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._num_supernodes_started = 0

    def __enter__(self) -> "Deployment":
        try:
            for name in self._commands:
                self.start(name)
            self.wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all that was started from here, also what has left its parent's session: its environment names us."""
        while found := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._owns(pid)]:
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.1)
        for process in self._processes.values():
            process.wait()

    def start(self, name: str) -> None:
        """Start a process, or start it again, as a supervisor does."""
        with (self.folder / "logs" / name).open("ab") as log:
            command = self._commands[name]
            self._processes[name] = subprocess.Popen(
                [PROGRAMS / command[0], *command[1:]],
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        (self.folder / "pids" / name).write_text(str(self._processes[name].pid))
        self._num_supernodes_started += name != SUPERLINK

    def arm(self, point: str, victim: str) -> None:
        """Let a process die once, when the point is reached: see flower_app/points.py."""
        (self.folder / ARMED).write_text(f"{point} {victim}")

    def wait_for_kill(self, run: int, victim: str) -> None:
        """Wait until the armed point is reached, and start the victim again if it is a process that we have started."""
        armed = self.folder / ARMED
        self.wait_until(lambda: not armed.exists() or self.end_of(run))
        assert not armed.exists(), self.told()
        if victim in self._processes:
            assert self._processes[victim].wait(PATIENCE_SECONDS) == -signal.SIGKILL
            self.start(victim)

    def wait_for_nodes(self) -> None:
        """Wait until the SuperLink knows every SuperNode that was started, and takes only those that run for online.

        A SuperNode without a key of its own gets a new name each time, and the dead one is believed in for a minute.
        """

        def settled() -> bool:
            nodes = self.flwr("supernode", "list").get("nodes", ())  # none as long as the SuperLink does not listen
            num_online = sum(node["status"] == "online" for node in nodes)
            return len(nodes) == self._num_supernodes_started and num_online == len(NAMES)

        self.wait_until(settled)

    def submit(self) -> int:
        """Start a run and return Flower's id for it."""
        return int(self.flwr("run", APP, "--run-config", f'folder="{self.folder}"')["run-id"])

    def wait_for_end(self, run: int) -> str:
        """Wait until a run is over; return how it ended, in Flower's words."""
        return self.wait_until(lambda: self.end_of(run))

    def end_of(self, run: int) -> str:
        """Return how a run ended, "" as long as that is not known: it goes on, or the SuperLink does not listen."""
        runs = self.flwr("list", "--run-id", run).get("runs", ())
        return next((entry["status"] for entry in runs if entry["status"].startswith("finished")), "")

    def wait_until(self, look: Callable[[], T]) -> T:
        """Look until there is something to see, and return it; give up if SuperLink or SuperNodes have ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            ended = [name for name, process in self._processes.items() if process.poll() is not None]
            if seen := look():
                return seen
            assert not ended, f"{ended}\n{self.told()}"
            assert time.monotonic() < deadline, self.told()
            time.sleep(POLL_SECONDS)

    def told(self) -> str:
        """Return what Flower's processes and the parties have said last."""
        files = [*self.folder.glob("logs/*"), *self.folder.glob("parties/*/party.log")]
        return "\n".join(f"{file}:\n{file.read_text()[-2000:]}" for file in files)

    def flwr(self, *arguments: object) -> Any:
        """Call Flower's command line and return what it answers, be it an error."""
        command = [str(PROGRAMS / "flwr"), *map(str, arguments), "--format", "json"]
        environment = self._environment("operator")
        done = subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
        return json.loads(done.stdout)

    def _environment(self, name: str) -> dict[str, str]:
        path = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "")])  # they start each other by name
        return {**os.environ, **SETTINGS, "PATH": path, "FLWR_HOME": str(self.folder / "home" / name)}

    def _owns(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        return state != "Z" and f"FLWR_HOME={self.folder}/".encode() in environment


def listen(port: int) -> tuple[str, ...]:
    return ("--insecure", "--host", "127.0.0.1", "--port", str(port))


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
