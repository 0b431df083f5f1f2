"""With what priority calls are made when a CPU's workers leave no core to the one who waits for them.

IREE's caller waits at times in a loop that does not sleep. With as many workers as cores the scheduler takes a core
from a worker for it, in the middle of that worker's share, and everyone waits for that share. At a low priority the
same loop takes next to nothing: a decoder on all cores makes a fifth more tokens. Anyone may lower the priority of a
thread, but only some may raise it again: the caller lowers its own for the time of the call where it may, and else a
thread kept low makes the call, which costs some 100 us more.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")
_NICENESS = 15


def call(function: Callable[[], Result], workers: int | None) -> Result:
    """Calls a function that waits for this many workers; None is IREE's default, one per core.

    What it raises is raised here.
    """
    if sys.platform != "linux" or (workers is not None and workers < usable_cpus()):
        return function()
    if may_raise_priority():
        with _lowered():
            return function()
    return _low_thread().submit(function).result()


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def may_raise_priority() -> bool:
    """Whether a thread of this process gets back the priority that it had: tried on a thread that ends then."""

    def lower_and_raise() -> bool:
        try:
            with _lowered():
                return True
        except OSError:
            return False

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lower_and_raise).result()


@contextlib.contextmanager
def _lowered() -> Iterator[None]:
    thread = threading.get_native_id()
    usual = os.getpriority(os.PRIO_PROCESS, thread)
    _lower()
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, thread, usual)


def _lower() -> None:
    # Linux keeps a priority per thread, whatever the calls' name for it says.
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS))


@cache
def _low_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "halfbyte-caller", initializer=_lower)
