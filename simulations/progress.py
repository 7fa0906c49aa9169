"""Progress of long work on stderr: bars on a terminal, plain lines in a log, nothing beside JSON.

>>> with Progress("silent") as progress:
...     progress.stage("train/shop", "shop: training", total=40)
...     progress.update("train/shop", 10)
...     progress.done("train/shop")
"""

import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

Style = Literal["bars", "lines", "silent"]
LINE_EVERY_SECONDS = 10.0


@dataclass
class _Stage:
    description: str
    total: float | None
    started: float
    last_line: float
    bar: TaskID | None = None


class Progress:
    """Named stages that run side by side; safe to call from several threads.

    Args:
        style: None picks bars on a terminal and lines elsewhere.
    """

    def __init__(self, style: Style | None = None) -> None:
        self._style: Style = style or ("bars" if sys.stderr.isatty() else "lines")
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._stages: dict[str, _Stage] = {}
        self._lock = threading.Lock()
        self._bars: Bars | None = None
        if self._style == "bars":
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
            self._bars = Bars(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=self.console)

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def note(self, line: str) -> None:
        """Say one thing that belongs to no stage."""
        if self._style != "silent":
            self.console.print(line, markup=False)

    def stage(self, key: str, description: str, total: float | None = None) -> None:
        """Begin the stage `key`; a stage of that name starts over. `total` is None where the end is unknown.

        Args:
            key: Name by which it is updated.
            description: What is shown.
            total: Steps in it, or None where that is not known.
        """
        now = time.monotonic()
        with self._lock:
            stage = _Stage(description, total, now, now)
            old = self._stages.get(key)
            if self._bars:
                if old and old.bar is not None:
                    self._bars.remove_task(old.bar)
                stage.bar = self._bars.add_task(description, total=total)
            self._stages[key] = stage
        if self._style == "lines":
            self.note(description)

    def update(self, key: str, completed: float) -> None:
        """Set how much is done, in the unit of the total; a stage that is over is ignored: messages may be late.

        Args:
            key: The stage.
            completed: Steps that are done.
        """
        with self._lock:
            stage = self._stages.get(key)
            if stage is None:
                return
            if self._bars and stage.bar is not None:
                self._bars.update(stage.bar, completed=completed)
            now = time.monotonic()
            due = self._style == "lines" and now - stage.last_line >= LINE_EVERY_SECONDS
            if due:
                stage.last_line = now
        if due:
            self.note(f"{stage.description} {completed:g}" + ("" if stage.total is None else f"/{stage.total:g}"))

    def done(self, key: str) -> None:
        """End the stage; ending it twice, or one that never began, changes nothing."""
        with self._lock:
            stage = self._stages.pop(key, None)
            if stage is None:
                return
            if self._bars and stage.bar is not None:
                total = stage.total if stage.total is not None else 1
                self._bars.update(stage.bar, total=total, completed=total)
                self._bars.stop_task(stage.bar)
        if self._style == "lines":
            self.note(f"{stage.description}: done in {time.monotonic() - stage.started:.1f} s")
