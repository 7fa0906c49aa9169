"""Whether a run may write into a folder, decided before anything is written."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from dpmerge.common.errors import DpmergeError
from dpmerge.common.files import replace_file

MARKER = ".dpmerge"  # an empty file that says: this folder belongs to a run, finished or not; a name no one else uses

LEDGERS = "parties/*/ledger.jsonl"

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
        occupied = folder.is_dir() and any(folder.iterdir())
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

    Each party's ledger is kept. A training that was charged and never released is closed in it as abandoned: it stays
    spent, and the new run is a charge of its own.

    Raises:
        DpmergeError: As `check_output`, and DPM-301 if the folder cannot be written.
    """
    from dpmerge.client.ledger import Ledger  # brings torch, which whoever only asks for --help must not wait for

    check_output(folder, mode)
    try:
        ledgers = {path.relative_to(folder): path.read_bytes() for path in folder.glob(LEDGERS)}
        if mode == "overwrite" and folder.is_dir():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
        for path, content in ledgers.items() if mode == "overwrite" else ():
            (folder / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(folder / path, content, mode=0o600, durable=True)
            Ledger(folder / path).abandon()
    except OSError as problem:
        raise DpmergeError("DPM-301", f"{folder} cannot be written: {problem.strerror}", "give another --out") from None
