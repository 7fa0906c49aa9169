"""Whether a run may write into a folder, decided before anything is written."""

import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import make_folder

MARKER = ".dpmerge"  # an empty file that says: this folder belongs to a run, finished or not; a name no one else uses
LOCK = ".lock"

LEDGERS = "parties/*/ledger.jsonl"
RUN_FILE = "run.json"
"""Holds the run's resolved configuration, with which a resumed one compares its own."""

Mode = Literal["new", "overwrite", "resume"]


def check_output(folder: Path, mode: Mode, inputs: Iterable[Path] = ()) -> None:
    """Refuse a folder that the run must not touch; changes nothing.

    Args:
        folder: Where the run is to go.
        mode: Whether it is a new run, replaces one or goes on with one.
        inputs: What the run reads, which an overwrite must not remove.

    Raises:
        DpmergeError: DPM-301 if the folder is in the way: not a folder, not empty without `overwrite` or `resume`, or
            holding something other than a run. DPM-302 if there is nothing to resume.
    """
    try:
        in_the_way = folder.is_symlink() or (folder.exists() and not folder.is_dir())
        occupied = folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())
    except OSError as problem:
        raise DpmergeError("DPM-301", f"{folder} cannot be used: {problem.strerror}", "give another --out") from None
    if in_the_way:
        raise DpmergeError("DPM-301", f"{folder} is not a folder", "give another --out")
    is_run = (folder / MARKER).is_file()
    if mode == "resume" and not is_run:
        raise DpmergeError("DPM-302", f"{folder} holds no run to resume", "leave out --resume to start one")
    if not occupied or mode == "resume":
        return
    if mode == "new":
        fix = "give another --out, or --overwrite to replace it, or --resume to go on"
        raise DpmergeError("DPM-301", f"{folder} is not empty", fix)
    if not is_run:
        fix = "give another --out; --overwrite removes nothing but runs of dpmerge"
        raise DpmergeError("DPM-301", f"{folder} is not empty and holds no run", fix)
    for path in inputs:
        if path.resolve().is_relative_to(folder.resolve()):
            raise DpmergeError("DPM-301", f"{folder} holds {path}, which this run reads", "give another --out")


def prepare_output(folder: Path, mode: Mode) -> None:
    """Make the folder ready and mark it; with `overwrite`, remove the old run first, but not what it has spent.

    Each party's ledger stays where it is, and is never touched but by an appended line. A training that was charged and
    never released is closed in it as abandoned, before anything is removed: it stays spent, and the new run is a charge
    of its own. Whatever stops this, the same command again finishes it.

    Args:
        folder: The run's folder.
        mode: "new", "overwrite" or "resume".

    Raises:
        DpmergeError: As `check_output`; DPM-301 if the folder cannot be written, or holds a link or a file where a
            party's folder was; DPM-504 if a ledger is damaged. Nothing is removed then.
    """
    from dpmerge.client.budget.ledger import (
        Ledger,  # brings torch, which whoever only asks for --help must not wait for
    )
    from dpmerge.common.release.format import remove_leftovers

    check_output(folder, mode)
    try:
        make_folder(folder)
        (folder / MARKER).touch()
        if mode == "overwrite":
            ledgers = _ledgers(folder)
            for path in ledgers:
                Ledger(path).abandon()
            (folder / RUN_FILE).unlink(missing_ok=True)  # first: what is half removed is no run to go on with
            _remove_all_but(folder, {folder / MARKER, folder / LOCK, *ledgers})
        for place in (folder, folder / "releases", *folder.glob("parties/*")):
            remove_leftovers(place)
    except OSError as problem:
        where = problem.filename or folder
        raise DpmergeError("DPM-301", f"{where} cannot be written: {problem.strerror}", "give another --out") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run's folder while the block runs: two processes that go on with one run would tread on each other.

    Raises:
        DpmergeError: DPM-301 if another process holds it.
    """
    make_folder(folder)
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout:
        fix = "wait until it ends, or stop it"
        raise DpmergeError("DPM-301", f"another process is at work in {folder}", fix) from None


def _ledgers(folder: Path) -> list[Path]:
    """Return the parties' ledgers in a run's folder; a link would have a file elsewhere written, or lost from sight."""
    found = sorted(folder.glob(LEDGERS))
    for path in found:
        if any(place.is_symlink() for place in (path, path.parent, path.parent.parent)):
            raise DpmergeError("DPM-301", f"{path} is reached through a link", "put the ledger itself in its place")
    return found


def _remove_all_but(folder: Path, kept: Collection[Path]) -> None:
    """Remove what a folder holds, except some files and the folders that lead to them; links are not followed."""
    for path in sorted(folder.iterdir()):
        if path in kept:
            continue
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        elif any(one.is_relative_to(path) for one in kept):
            _remove_all_but(path, kept)
        else:
            shutil.rmtree(path)
