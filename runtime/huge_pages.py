"""Anonymous memory on 2 MiB pages (Linux transparent huge pages)."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

_HUGE = 2 << 20  # bytes; the page size of x86-64 and of aarch64 with 4 KiB base pages
_MADV_HUGEPAGE = 14
_RESERVE = 256 << 20  # bytes of memory to leave to everybody else


class HugePages:
    """A block of memory, 2 MiB-aligned and advised to be huge pages before anything touched it.

    Attributes:
        array: uint8 [size], zero at first. It (and any view of it) keeps the memory alive.

    Raises:
        MemoryError: the system gives no such block.
    """

    def __init__(self, size: int) -> None:
        # Whole pages, so that the tail is huge too. MAP_SHARED, Python's default, never becomes huge.
        length = max(-(-size // _HUGE), 1) * _HUGE
        try:
            block = mmap.mmap(-1, length + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {length >> 20} MiB of address space: {error}") from None
        whole: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(block, np.uint8)
        start = -whole.ctypes.data % _HUGE
        self._first = whole.ctypes.data + start
        self._last = self._first + length
        # Advice only: where it fails the pages are small, and huge_bytes tells.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(self._first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
        self.array = whole[start : start + size]

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
