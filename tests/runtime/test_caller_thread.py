"""Calls that wait for as many workers as there are cores are made from a thread that gives way."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from halfbyte.runtime.caller_thread import call, usable_cpus
from halfbyte.runtime.device import open_device

linux = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")


def where() -> tuple[int, int]:
    return threading.get_ident(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
@pytest.mark.parametrize("workers", [None, usable_cpus(), usable_cpus() + 3])
def test_a_caller_without_a_core_gives_way(workers: int | None) -> None:
    thread, nice = call(where, workers)
    assert thread != threading.get_ident()
    assert nice > where()[1] or nice == 19
    assert call(where, workers) == (thread, nice), "one thread serves all calls"
    assert where()[1] == os.getpriority(os.PRIO_PROCESS, 0), "the caller's own priority stays"


def test_a_caller_with_a_core_of_its_own_stays() -> None:
    if usable_cpus() > 1:
        assert call(where, usable_cpus() - 1)[0] == threading.get_ident()
    assert open_device("local-sync").call(where)[0] == threading.get_ident()


def test_errors_come_back() -> None:
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        call(fail, None)
    assert call(lambda: 7, None) == 7
