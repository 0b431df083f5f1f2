"""Turns IREE's status messages into one line for humans."""

from __future__ import annotations

import re

# What IREE's bindings raise for a status; OUT_OF_RANGE for example is an IndexError.
IREE_ERRORS = (RuntimeError, ValueError, LookupError, OSError, MemoryError)

_LOCATION = re.compile(r"(?:Error [a-z ]+: )?(?:\S+\.(?:c|cc|h)|<vm>):\d+: ([A-Z_]+); ")


def one_line(error: BaseException) -> str:
    """Returns the message of an exception of IREE's, without source locations and stack."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    text = _LOCATION.sub("", lines[0]).strip().rstrip(":;")
    match = _LOCATION.search(lines[0])
    return f"{text} ({match[1]})" if match else text
