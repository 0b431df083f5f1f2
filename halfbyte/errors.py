"""The exceptions of halfbyte, one class per exit code of the command line.

A message says where, what was found, what would be accepted and what to do, one line each.
"""

from __future__ import annotations


class HalfbyteError(Exception):
    """Base of all errors a user can cause or mend.

    Args:
        what: one sentence that says what is wrong.
        where: the layer, tensor, file or argument concerned.
        found: what was found there.
        accepted: what would be accepted.
        advice: what to do about it.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        found: str | None = None,
        accepted: str | None = None,
        advice: str | None = None,
    ) -> None:
        self.what, self.where, self.found, self.accepted, self.advice = what, where, found, accepted, advice
        head = f"{where}: {what}" if where else what
        rest = (("found", found), ("accepted", accepted), ("do", advice))
        super().__init__("\n".join([head, *(f"  {label}: {text}" for label, text in rest if text)]))


class ComparisonError(HalfbyteError):
    """A result differs from its reference by more than allowed."""

    exit_code = 1


class UsageError(HalfbyteError):
    """An argument or option makes no sense."""

    exit_code = 2


class CheckpointError(HalfbyteError):
    """A checkpoint (or a bundle's files) is unreadable, malformed or of an unknown kind."""

    exit_code = 3


class UnsupportedLayerError(HalfbyteError):
    """At least one layer cannot be compiled as asked."""

    exit_code = 4


class CompilerError(HalfbyteError):
    """The importer or iree-compile failed."""

    exit_code = 5


class DeviceError(HalfbyteError):
    """A device, driver or call at run time failed, or the machine lacks what a program needs."""

    exit_code = 6
