"""A Ray of this run's own: started here, joined by nobody, gone when the run ends.

Ray looks around by default. It joins the cluster that `RAY_ADDRESS` or an earlier `ray start` names, and it shares one
folder in the temporary directory with every other user of the machine. A simulation wants none of that: its parties'
records stay in processes that it started itself.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from dpmerge.common.errors import DpmergeError

OBJECT_STORE_BYTES = 256 * 2**20
"""Ray's shared memory: only messages and releases pass through it."""

LONGEST_FOLDER = 20
"""Of the temporary folder's path: ours and Ray's own take up to 86 characters, and a socket's path has at most 107."""

_FOLDER = re.compile(r"ray-(\d+)-.+")


@contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """Start Ray on this machine alone, and stop it afterwards, whatever happened in between.

    Args:
        num_cpus: Cores that Ray may give away, at least 1.

    Raises:
        DpmergeError: DPM-304 if it does not start.
    """
    place = _short_folder()
    _remove_leftovers(Path(place))
    prefix = f"ray-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                address="local",  # whatever RAY_ADDRESS and running clusters say
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
                _temp_dir=str(Path(folder, "r")),  # Ray opens its folder to all users; the one around it is ours
            )
        except Exception as error:  # Ray fails in as many ways as there are machines
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise DpmergeError(
                "DPM-304",
                f"Ray, which runs the parties, does not start on this machine: {reason[:300]}",
                "look whether memory, processes and space in the temporary folder suffice, then run with --resume",
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


def _remove_leftovers(place: Path) -> None:
    """Remove the folders of our own that killed runs left: the process that each is named after is gone."""
    for folder in place.glob("ray-*"):
        found = _FOLDER.fullmatch(folder.name)
        if found is None or folder.is_symlink() or folder.lstat().st_uid != os.getuid():
            continue
        try:
            os.kill(int(found[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (OverflowError, PermissionError):
            continue


def _short_folder() -> str:
    """Return a temporary folder below which Ray's sockets can have names.

    Raises:
        DpmergeError: DPM-304 if there is none.
    """
    folders = [place for place in (tempfile.gettempdir(), "/tmp", "/var/tmp") if len(place) <= LONGEST_FOLDER]
    for place in folders:
        if Path(place).is_dir() and os.access(place, os.W_OK | os.X_OK):
            return place
    problem = f"no temporary folder of at most {LONGEST_FOLDER} characters can be written to, as Ray needs"
    raise DpmergeError("DPM-304", problem, "set TMPDIR to such a folder")
