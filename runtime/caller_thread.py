"""Where calls are made from when a CPU's workers leave no core to the one who waits for them.

IREE's caller waits in a loop that never sleeps. With as many workers as cores the scheduler takes a core from a worker
for it every few milliseconds, in the middle of that worker's share, and everyone waits for that share. From a thread
of low priority the same loop takes next to nothing. A priority may be lowered by anyone, but raised again only by a
privileged user, so the thread is one of its own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
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
    return _thread().submit(function).result()


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "halfbyte-caller", initializer=_give_way)


def _give_way() -> None:
    # Linux keeps a priority per thread, whatever getpriority's name for it says.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
