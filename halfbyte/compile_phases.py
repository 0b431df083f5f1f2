"""The phases of a compilation, and how long each takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from halfbyte.progress import Progress

PHASES = ("load", "head", "rewrite", "export", "import", "compile", "write")


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
