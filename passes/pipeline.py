"""Runs passes over a program, with a hook between them that times, prints or verifies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from halfbyte.passes.program import Program


class Pass(Protocol):
    """A rewrite of a program: a small frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str: ...

    def run(self, program: Program) -> int:
        """Rewrites the program in place; returns how many places it changed."""
        ...


Hook = Callable[[Pass, Program], None]


def run_passes(program: Program, passes: Sequence[Pass], hooks: Sequence[Hook] = ()) -> None:
    """Runs the passes in order; after each, every graph is linted and every hook is called with the pass.

    Each pass leaves a row in ``program.report.passes``: its name, seconds and how many places it changed.
    """
    for step in passes:
        start = time.perf_counter()
        changed = step.run(program)
        for entry in program.entries.values():
            entry.graph.lint()
            entry.graph_module.recompile()
        seconds = round(time.perf_counter() - start, 3)
        program.report.passes.append({"name": step.name, "seconds": seconds, "changed": changed})
        for hook in hooks:
            hook(step, program)
