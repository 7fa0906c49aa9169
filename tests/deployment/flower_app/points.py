"""Named points of a run, at one of which a test lets a process die, once."""

import os
import signal
import time
from pathlib import Path

ARMED = "armed"
SELF = "self"
SECONDS_TO_LIVE = 120
MOMENT_SECONDS = 0.2
"""Flower's thread that misses the parent process signals to itself: the main thread hears of it when it wakes up."""


def reach(folder: Path, point: str, host: str) -> None:
    """Kill the victim with SIGKILL if this is the armed point; it is disarmed before, so that nobody dies twice.

    Args:
        folder: The deployment's; `armed` in it holds a point and a victim, `pids/<victim>` the victim's process.
        point: What is being done, by whom.
        host: The process that this one is a part of. With it this one ends too, by Flower's own means, and does
            nothing more until then; whatever happens to others, it goes on.
    """
    try:
        armed, victim = (folder / ARMED).read_text().split()
    except FileNotFoundError:
        return
    if armed != point:
        return
    pid = os.getpid() if victim == SELF else int((folder / "pids" / victim).read_text())
    (folder / ARMED).unlink()
    os.kill(pid, signal.SIGKILL)
    if victim == host:
        end = time.monotonic() + SECONDS_TO_LIVE
        while time.monotonic() < end:
            time.sleep(MOMENT_SECONDS)
