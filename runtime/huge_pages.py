"""Memory on 2 MiB pages (Linux transparent huge pages)."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

_MADV_HUGEPAGE, _MAP_FIXED, _MAP_NORESERVE = 14, 0x10, 0x4000
_RESERVE = 256 << 20  # bytes of memory to leave to everybody else


class HugePages:
    """Memory advised to be huge pages before anything touched it, in the place of a mapping.

    It has no memory of its own: whoever made the mapping unmaps it. For memory lent to IREE that must be IREE. Its
    workers let go of it after the call that used it has returned, and do not hold the interpreter's lock: a
    Python object that they release at that moment breaks the interpreter.

    Args:
        mapped: all of a private mapping that nobody reads or writes meanwhile. Pages that hold less than 2 MiB of it
            stay small.

    Attributes:
        array: uint8 of its size, zero at first, writable; valid as long as the mapping.

    Raises:
        MemoryError: the system gives no such memory; the mapping must not be used any more.
    """

    def __init__(self, mapped: memoryview | mmap.mmap) -> None:
        mapping: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(mapped, np.uint8)
        self._first, size = mapping.ctypes.data, mapping.size
        self._last = self._first + size
        # MAP_SHARED memory never becomes huge. Reserving swap space could fail when the old mapping is gone.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mmap.restype = ctypes.c_void_p
        if libc.mmap(self._first, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != self._first:
            raise MemoryError(f"no {size >> 20} MiB of memory: {os.strerror(ctypes.get_errno())}")
        # Advice only: where it fails the pages are small, and huge_bytes tells.
        libc.madvise(ctypes.c_void_p(self._first), ctypes.c_size_t(size), _MADV_HUGEPAGE)
        memory = memoryview((ctypes.c_uint8 * size).from_address(self._first))
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(memory, np.uint8)

    def huge_bytes(self) -> int:
        """Returns how many bytes of the block the kernel backs with huge pages now."""
        huge, inside = 0, False
        for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
            head, _, rest = line.partition(" ")
            if "-" in head and not head.endswith(":"):
                first, last = (int(part, 16) for part in head.split("-"))
                inside = first < self._last and last > self._first
            elif inside and head == "AnonHugePages:":
                huge += int(rest.split()[0]) << 10
        return min(huge, self._last - self._first)


def obstacle(size: int) -> str:
    """Returns why ``size`` bytes cannot live on huge pages here, or an empty string if they can."""
    if sys.platform != "linux":
        return "no transparent huge pages on this system"
    try:
        enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return "this kernel has no transparent huge pages"
    if "[never]" in enabled:
        return "transparent huge pages are switched off (/sys/kernel/mm/transparent_hugepage/enabled)"
    available = _available_memory()
    if available is not None and size + _RESERVE > available:
        return f"too little memory: {size >> 20} MiB needed, {available >> 20} MiB available"
    return ""


def _available_memory() -> int | None:
    """Bytes that can be had without swapping, or None where the system does not tell."""
    free = _number("/proc/meminfo", "MemAvailable:")
    # A container's limit is invisible in /proc/meminfo. Its cached files can be dropped.
    limit, used = _number("/sys/fs/cgroup/memory.max", ""), _number("/sys/fs/cgroup/memory.current", "")
    cached = _number("/sys/fs/cgroup/memory.stat", "inactive_file")
    bounds = [free << 10] if free is not None else []
    if limit is not None and used is not None:
        bounds.append(limit - used + (cached or 0))
    return min(bounds, default=None)


def _number(path: str, label: str) -> int | None:
    """The number after ``label`` at the start of a line, or None where there is none."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(rf"^{re.escape(label)}\s*(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None
