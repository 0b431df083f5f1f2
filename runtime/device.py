"""The devices of this machine: what exists, and opening one by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import iree.runtime as rt
from iree.runtime import _binding

from halfbyte.errors import DeviceError
from halfbyte.runtime.caller_priority import Result, call, usable_cpus
from halfbyte.runtime.iree_messages import IREE_ERRORS, one_line
from halfbyte.runtime.polling_threads import awake, lowered

# Driver to the target whose programs it runs.
TARGETS = {"local-task": "cpu", "local-sync": "cpu", "vulkan": "vulkan", "cuda": "cuda", "hip": "hip"}


@dataclass(frozen=True)
class DeviceInfo:
    """A device that `open_device` can open.

    Attributes:
        spec: what to pass to `open_device`.
        driver: IREE's driver, e.g. ``local-task``.
        path: the driver's name of the device, empty for CPUs.
        name: the device's name for humans.
        target: programs for this target run there, e.g. ``cpu``.
    """

    spec: str
    driver: str
    path: str
    name: str
    target: str


@dataclass(frozen=True)
class Device:
    """An open device.

    Attributes:
        spec: what it was opened by.
        driver: IREE's driver.
        target: programs for this target run there.
        threads: worker threads; None where the driver decides.
        hal: IREE's device.
    """

    spec: str
    driver: str
    target: str
    threads: int | None
    hal: rt.HalDevice

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls a function that invokes a program on this device and waits for it."""
        if self.target == "cpu":
            return call(function, self.threads) if self.driver == "local-task" else function()
        with awake():
            return function()


def devices() -> list[DeviceInfo]:
    """Returns all devices of this machine, CPUs first."""
    return _survey()[0]


def unavailable_drivers() -> dict[str, str]:
    """Returns driver name to reason for the drivers IREE knows but cannot use on this machine."""
    return _survey()[1]


def open_device(spec: str, threads: int | None = None) -> Device:
    """Opens a device.

    Args:
        spec: ``cpu``, a driver (``local-task``, ``local-sync``, ``vulkan``, ``cuda``) or ``driver://path`` as
            `devices` lists them. ``cpu`` is ``local-sync`` for one thread and ``local-task`` for more.
        threads: worker threads of a CPU; None takes IREE's default, one per physical core.

    Raises:
        DeviceError: there is no such device, or the thread count makes no sense for it.
    """
    if threads is not None and threads < 1:
        raise DeviceError("thread count below one", found=str(threads))
    driver = spec.partition("://")[0]
    if driver == "cpu":
        alone = threads == 1 or (threads is None and usable_cpus() == 1)
        driver = "local-sync" if alone else "local-task"
        spec = spec.replace("cpu", driver, 1)
    if driver not in rt.query_available_drivers() or driver not in TARGETS:
        raise _unknown(spec, f"no driver {driver!r}")
    if driver != "local-task" and threads not in ((None, 1) if driver == "local-sync" else (None,)):
        raise DeviceError(
            f"{driver} has no {threads} worker threads",
            where=spec,
            advice="leave threads out or use cpu",
        )
    try:
        hal = _create(driver, spec, threads)
    except IREE_ERRORS as error:
        raise _unknown(spec, one_line(error)) from None
    return Device(spec, driver, TARGETS[driver], 1 if driver == "local-sync" else threads, hal)


@cache
def _create(driver: str, spec: str, threads: int | None) -> rt.HalDevice:
    """Made once and kept, as IREE's own `get_device` does: buffers must not outlive their device."""
    if driver == "local-task":
        return _task_driver(threads).create_device_by_uri(spec)
    return lowered(lambda: rt.get_driver(spec).create_device_by_uri(spec))


def _task_driver(threads: int | None) -> rt.HalDriver:
    """A local-task driver with its own workers.

    IREE reads the worker count from process-wide flags when a driver is made, and `get_driver` makes only one
    per process; a driver of our own per count lets one process use several.
    """
    # An exact count: the recommended --task_topology_max_group_count can only lower the default.
    rt.flags.parse_flags(f"--task_topology_group_count={threads or 0}")
    try:
        return _binding.create_hal_driver("local-task")
    finally:
        rt.flags.parse_flags("--task_topology_group_count=0")


def _survey() -> tuple[list[DeviceInfo], dict[str, str]]:
    found: list[DeviceInfo] = []
    refused: dict[str, str] = {}
    drivers = sorted(set(rt.query_available_drivers()) & TARGETS.keys(), key=list(TARGETS).index)
    for driver in drivers:
        try:
            entries = rt.get_driver(driver).query_available_devices()
        except IREE_ERRORS as error:
            refused[driver] = one_line(error)
            continue
        for entry in entries:
            path = str(entry["path"])
            spec = f"{driver}://{path}" if path else driver
            found.append(DeviceInfo(spec, driver, path, str(entry["name"]), TARGETS[driver]))
    return found, refused


def _unknown(spec: str, reason: str) -> DeviceError:
    known = ["cpu", *(device.spec for device in devices())]
    return DeviceError(
        "cannot open device", where=spec, found=reason, accepted=", ".join(known), advice="halfbyte devices"
    )
