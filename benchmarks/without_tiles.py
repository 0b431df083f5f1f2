"""A process without AMX: for peers whose code for tile registers fails on this CPU."""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def refuse_tiles() -> None:
    """Has Linux answer this process's requests for tile registers with "not permitted", for good."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def step(code: int, jump: int, otherwise: int, value: int) -> bytes:
        return struct.pack("HBBI", code, jump, otherwise, value)

    load, equal, answer = 0x20, 0x15, 0x06
    steps = [
        step(load, 0, 0, 0),  # the number of the call
        step(equal, 0, 3, _ARCH_PRCTL),
        step(load, 0, 0, 16),  # its first argument
        step(equal, 0, 1, _REQUEST_PERMISSION),
        step(answer, 0, 0, 0x00050001),  # EPERM
        step(answer, 0, 0, 0x7FFF0000),  # all others pass
    ]
    code = ctypes.create_string_buffer(b"".join(steps))
    filtering = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _FILTER, filtering, 0, 0):
        raise OSError(ctypes.get_errno(), "this system takes no seccomp filter")
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA, 0, 0, 0) != -1:
        raise RuntimeError("the process was granted tile registers nonetheless")
