"""Devices by name, and their threads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from halfbyte.errors import DeviceError
from halfbyte.runtime.device import devices, open_device, unavailable_drivers


def test_lists_the_cpu() -> None:
    found = {device.spec: device for device in devices()}
    assert found["local-task"].target == found["local-sync"].target == "cpu"
    assert found.keys().isdisjoint(unavailable_drivers())


def test_one_thread_is_the_caller_s() -> None:
    assert open_device("cpu", 1).driver == "local-sync"
    assert open_device("local-sync").threads == 1
    assert open_device("local-task", 1).driver == "local-task"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by /proc")
def test_makes_as_many_workers_as_asked_for() -> None:
    def workers() -> int:
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        return sum(name.startswith("iree-worker") for name in names)

    def settled() -> int:
        """A thread names itself once it runs, those of earlier tests included: the count that lasts."""
        count, since, deadline = workers(), time.monotonic(), time.monotonic() + 20
        while time.monotonic() - since < 0.5 and time.monotonic() < deadline:
            time.sleep(0.01)
            if (now := workers()) != count:
                count, since = now, time.monotonic()
        return count

    opened = []
    for threads in (3, 5):  # counts no other test uses, for devices are kept
        before = settled()
        opened.append(open_device("cpu", threads))
        assert settled() - before == threads
        assert opened[-1].threads == threads
    assert open_device("cpu", 3).hal is opened[0].hal


@pytest.mark.parametrize("spec", ["gpu", "local-task://7", "local-sync://x", "", "hip"])
def test_unknown_devices_are_named_with_what_exists(spec: str) -> None:
    if spec in {device.driver for device in devices()}:
        pytest.skip("this machine has one")
    with pytest.raises(DeviceError, match=r"cannot open device(.|\n)*accepted: cpu, local-task"):
        open_device(spec)


def test_refuses_thread_counts_that_make_no_sense() -> None:
    with pytest.raises(DeviceError, match="below one"):
        open_device("cpu", 0)
    with pytest.raises(DeviceError, match="local-sync has no 2 worker threads"):
        open_device("local-sync", 2)
