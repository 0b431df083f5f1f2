"""Threads that never sleep have a low priority but for the time of a call."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator

import pytest
from vulkan_device import no_vulkan

from halfbyte.runtime import polling_threads
from halfbyte.runtime.caller_priority import may_raise_priority
from halfbyte.runtime.device import open_device
from halfbyte.runtime.polling_threads import awake, lowered

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
LOWEST = 19


def priority(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


class Threads:
    """One thread that computes all the time, without Python's lock, and one that sleeps."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.started = [threading.Thread(target=target) for target in (self._compute, self.stop.wait)]
        for thread in self.started:
            thread.start()
        self.busy, self.asleep = (int(thread.native_id or 0) for thread in self.started)

    def _compute(self) -> None:
        while not self.stop.is_set():
            hashlib.sha256(bytes(10**7))

    def end(self) -> None:
        self.stop.set()
        for thread in self.started:
            thread.join()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    monkeypatch.setattr(polling_threads, "_usual", {})
    made = lowered(Threads)
    yield made
    made.end()


def test_they_rise_while_something_waits(threads: Threads) -> None:
    if not may_raise_priority():
        pytest.skip("this user may not raise a priority again")
    usual = priority(0)
    assert usual < LOWEST and priority(threads.asleep) == usual
    assert priority(threads.busy) == LOWEST
    with awake():
        assert priority(threads.busy) == usual
        with pytest.raises(KeyError), awake():
            raise KeyError
        assert priority(threads.busy) == usual, "another call still waits"
    assert priority(threads.busy) == LOWEST
    threads.end()
    with awake():
        pass


def test_they_stay_as_they_are_where_they_could_not_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling_threads, "may_raise_priority", lambda: False)
    made = lowered(Threads)
    try:
        assert priority(made.busy) == priority(0)
    finally:
        made.end()


def test_an_open_device_leaves_the_cores_to_others() -> None:
    if no_vulkan():
        pytest.skip(no_vulkan())
    if not may_raise_priority():
        pytest.skip("this user may not raise a priority again")
    device = open_device("vulkan")
    assert all(priority(thread) == LOWEST for thread in polling_threads._usual)
    assert device.call(lambda: [priority(t) for t in polling_threads._usual]) == [
        *polling_threads._usual.values()
    ]
