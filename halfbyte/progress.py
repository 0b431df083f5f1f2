"""Who is told how long work goes on."""

from __future__ import annotations


class Progress:
    """Called as a compilation or a verification goes on; this one says nothing."""

    def phase(self, name: str) -> None:
        """A phase begins: of a compilation one of `compile_phases.PHASES`, of `verify` one of its own."""

    def advance(self, done: int, total: int) -> None:
        """How far the phase is: of writing in bytes of the archive, of verifying in layers."""
