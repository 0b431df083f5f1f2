"""Calls that wait for as many workers as there are cores give way to them."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from halfbyte.runtime import caller_priority
from halfbyte.runtime.caller_priority import call, may_raise_priority, usable_cpus
from halfbyte.runtime.device import open_device

linux = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
no_core_left = pytest.mark.parametrize("workers", [None, usable_cpus(), usable_cpus() + 3])


def where() -> tuple[int, int]:
    return threading.get_ident(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
@no_core_left
def test_a_caller_that_may_rise_again_gives_way_itself(workers: int | None) -> None:
    if not may_raise_priority():
        pytest.skip("this user may not raise a priority again")
    before = where()
    thread, nice = call(where, workers)
    assert thread == threading.get_ident()
    assert nice > before[1] or nice >= 15
    assert where() == before
    with pytest.raises(KeyError):
        call(lambda: {}["lost"], workers)
    assert where() == before, "also after an error"


@linux
@no_core_left
def test_a_caller_that_may_not_is_served_by_a_low_thread(
    workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_priority, "may_raise_priority", lambda: False)
    before = where()
    thread, nice = call(where, workers)
    assert thread != threading.get_ident()
    assert nice > before[1] or nice >= 15
    assert call(where, workers) == (thread, nice), "one thread serves all calls"
    assert where() == before


@linux
def test_priorities_are_asked_for_on_a_thread_that_ends() -> None:
    before = where()
    may_raise_priority.cache_clear()
    may_raise_priority()
    assert where() == before


def test_a_caller_with_a_core_of_its_own_stays() -> None:
    if usable_cpus() > 1:
        assert call(where, usable_cpus() - 1) == where()
    assert open_device("local-sync").call(where) == where()


@pytest.mark.parametrize("rises", [True, False])
def test_errors_come_back(rises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("lost")

    if not rises:
        monkeypatch.setattr(caller_priority, "may_raise_priority", lambda: False)
    with pytest.raises(KeyError, match="lost"):
        call(fail, None)
    assert call(lambda: 7, None) == 7
