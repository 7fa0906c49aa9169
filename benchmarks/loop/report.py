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


def false_alarms(num_runs: int) -> dict[str, float]:
    """Return in how many runs of all checks on the sound loop, with fresh keys, any raised an alarm.

    `checks_run` is the number of statements that were tested in all of them, `checks_with_chance` how many of them
    can fail by chance.
    """
    num_alarms = num_findings = num_chances = 0
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory() as folder:
            found = findings_of(loops(FORMS, Path(folder)))
        num_alarms += bool(alarms(found))
        num_findings += sum(map(len, found.values()))
        num_chances += sum(not one.is_exact for some in found.values() for one in some)
    return {"false_alarms": num_alarms, "checks_run": num_findings, "checks_with_chance": num_chances}
