"""The phases of a compilation, how long each takes, and who is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("load", "head", "rewrite", "export", "import", "compile", "write")


class Progress:
    """Called as the compilation goes on; this one says nothing."""

    def phase(self, name: str) -> None:
        """A phase of `PHASES` begins."""

    def advance(self, done: int, total: int) -> None:
        """Bytes of the archive written so far, and in all."""


class Watch:
    """Times the phases: `seconds` by their names."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.seconds = progress, dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.progress.phase(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start
