"""What comes of the checks: which defects they catch, and how often they cry wolf."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from dpmerge.common.errors import DpmergeError

from .checks import alarms, findings_of
from .defects import PLANTED, planted
from .observe import FORMS, SECURE, observe
from .queries import Loop, loop_of

_ATTEMPTS = 8


def loops(forms: Iterable[str], folder: Path) -> dict[str, Loop]:
    """Train one party in each of the forms, in new folders under `folder`."""
    return {form: loop_of(observe(FORMS[form], folder / str(number))) for number, form in enumerate(forms)}


def caught_by(defect: str, folder: Path) -> list[str]:
    """Return the names of all checks that raise an alarm over a planted defect.

    A spoilt loop sometimes stops by itself, because a first step without noise moves nothing. That says nothing of the
    checks: another training is looked at then.
    """
    with planted(defect):
        for attempt in range(_ATTEMPTS):
            try:
                seen = loops(SECURE, folder / str(attempt))
            except DpmergeError:
                continue
            return list(alarms(findings_of(seen)))
    raise RuntimeError(f"Expected a training with {defect!r} to end: {_ATTEMPTS} stopped by themselves.")


def planted_report() -> dict[str, float]:
    """Return how many defects were planted into the loop's source, how many were caught, and the time it took."""
    started, num_caught = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        for number, defect in enumerate(PLANTED):
            num_caught += bool(caught_by(defect, Path(folder) / str(number)))
    return {
        "planted_total": len(PLANTED),
        "planted_caught": num_caught,
        "planted_seconds": time.monotonic() - started,
    }


def false_alarms(num_runs: int) -> tuple[int, int]:
    """Return in how many runs of all checks on the sound loop any raised an alarm, and how many findings a run has."""
    num_alarms = num_findings = 0
    with tempfile.TemporaryDirectory() as folder:
        for run in range(num_runs):
            found = findings_of(loops(FORMS, Path(folder) / str(run)))
            num_alarms += bool(alarms(found))
            num_findings = sum(map(len, found.values()))
    return num_alarms, num_findings
