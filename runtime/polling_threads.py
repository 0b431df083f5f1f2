"""Threads of a driver that wait in loops that never sleep: at a low priority while nobody waits for them.

IREE's Vulkan driver has a thread per queue that waits for either of two semaphores. Mesa's software driver knows no
such wait and asks for both in turn, from the opening of the device to the end of the process (seen with Mesa 22.3 and
IREE 3.13: two threads, two cores gone). They cannot be told to sleep, but at a low priority they take what nobody
wants. Calls need them, so that for the time of a call they get their own priority back; where this process may not
raise a priority they are left as they are.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from halfbyte.runtime.caller_priority import may_raise_priority

Result = TypeVar("Result")
_LOWEST = 19
_TASKS = Path("/proc/self/task")
_lock = threading.Lock()
_usual: dict[int, int] = {}  # the priority of every polling thread
_waiting = 0


def lowered(create: Callable[[], Result]) -> Result:
    """What ``create`` returns; threads that it starts, and that never sleep, are lowered from now on."""
    if sys.platform != "linux" or not may_raise_priority():
        return create()
    before = _running()
    out = create()
    polling = _running().keys() - before.keys()
    for _ in range(3):
        time.sleep(0.01)
        polling &= {thread for thread, runs in _running().items() if runs}
    with _lock:
        for thread in polling:
            _usual[thread] = os.getpriority(os.PRIO_PROCESS, thread)
        if not _waiting:
            _lower()
    return out


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """For the time that something waits for a device: its threads have their own priority."""
    if not _usual:
        yield
        return
    global _waiting
    with _lock:
        _waiting += 1
        if _waiting == 1:
            _give(_usual)
    try:
        yield
    finally:
        with _lock:
            _waiting -= 1
            if not _waiting:
                _lower()


def _lower() -> None:
    _give(dict.fromkeys(_usual, _LOWEST))


def _give(priorities: dict[int, int]) -> None:
    for thread, priority in list(priorities.items()):
        try:
            os.setpriority(os.PRIO_PROCESS, thread, priority)
        except ProcessLookupError:  # its device is gone
            del _usual[thread]


def _running() -> dict[int, bool]:
    """Every thread of this process, and whether it runs or would if it got a core."""
    out = {}
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            out[int(task.name)] = (task / "stat").read_text().rpartition(") ")[2].startswith("R")
    return out
