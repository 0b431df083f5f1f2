"""Progress of long work, on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any

from halfbyte.progress import Progress


class ShownProgress(Progress):
    """A live line on a terminal, a line per phase elsewhere."""

    def __init__(self) -> None:
        self.live: Any = None
        self.bar: Any = None
        self.task: Any = None
        self.started: float = 0.0
        self.current = ""

    def __enter__(self) -> ShownProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=False)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()
        if self.bar is not None:
            self.bar.stop()

    def phase(self, name: str) -> None:
        if name == self.current:
            return
        self._finish()
        self.current, self.started = name, time.perf_counter()
        if self.bar is not None:
            self.task = self.bar.add_task(name, total=None)

    def advance(self, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)

    def _finish(self) -> None:
        if not self.current:
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=1, total=1)
        else:
            print(f"{self.current}: {time.perf_counter() - self.started:.1f} s", file=sys.stderr, flush=True)
        self.current = ""
