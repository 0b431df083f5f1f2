"""What IREE's CUDA driver prints of a device, and which of a bundle's programs such a device takes."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.errors import DeviceError
from halfbyte.runtime import cuda_features
from halfbyte.runtime.cuda_features import CudaFeatures, Version, needed, parse_device_info
from halfbyte.runtime.device import Device
from halfbyte.runtime.manifest import Manifest, Model, Program
from halfbyte.runtime.program import choose_program

INFO = """
- gpu-compute-capability: {}
- driver-max-cuda-version: {}

- launch-max-block-dims: (1024, 1024, 64)
- block-max-thread-count: 1024
- memory-l2-cache-size: 50 MB
"""
# As the compiler writes them.
CUDA = {"sm_80": "11.6", "sm_89": "12.4", "sm_90": "12.0", "sm_120": "12.8"}


def test_reads_capability_and_cuda() -> None:
    assert parse_device_info(INFO.format("9.0", "12.4")) == CudaFeatures(Version(9, 0), Version(12, 4))
    assert str(parse_device_info(INFO.format("12.0", "13.0"))) == "compute capability 12.0, CUDA 13.0"
    assert parse_device_info("name: none of these") == CudaFeatures(None, None)
    assert cuda_features.device_features("GPU-none") == CudaFeatures(None, None)


def test_architectures_are_capabilities() -> None:
    assert needed("sm_80", ["cuda-11.6"]) == CudaFeatures(Version(8, 0), Version(11, 6))
    assert needed("sm_121", ()) == CudaFeatures(Version(12, 1), None)
    for other in ("", "sm_8", "sm_90a", "ampere", "xsm_80"):
        assert needed(other, ["vulkan-1.3"]) == CudaFeatures(None, None)
    assert needed("sm_120", ()).capability > needed("sm_90", ()).capability  # type: ignore[operator]


def chosen(monkeypatch: pytest.MonkeyPatch, info: str, *devices: str | None) -> str | None:
    """The architecture of the program that a device of this description takes from a bundle."""
    programs = tuple(
        Program(
            *("cuda", f"model.cuda-{device}.vmfb", "0" * 64, ("cuda",)),
            features=(f"cuda-{CUDA[device]}",) if device in CUDA else (),
            device=device,
        )
        for device in devices
    )
    cpu = Program("cpu", "model.cpu.vmfb", "0" * 64, ("local-task",))
    monkeypatch.setattr(cuda_features, "device_info", lambda driver, path: info)
    hal: Any = None  # no program is loaded
    device = Device("cuda", "cuda", "cuda", None, hal)
    return choose_program(device, Manifest(Model("graph", "f32"), (cpu, *programs), (), {})).device


@pytest.mark.parametrize(
    ("capability", "cuda", "taken"),
    [
        ("8.0", "12.4", "sm_80"),
        ("8.7", "12.4", "sm_80"),
        ("9.0", "12.4", "sm_90"),
        ("10.0", "12.8", "sm_90"),
        ("12.1", "13.0", "sm_120"),
        ("12.0", "12.4", "sm_90"),  # the driver takes no text as new as that for sm_120
        ("8.9", "12.2", "sm_80"),
        ("8.9", "12.4", "sm_89"),
    ],
)
def test_takes_the_highest_that_the_device_runs(
    monkeypatch: pytest.MonkeyPatch, capability: str, cuda: str, taken: str
) -> None:
    for order in (("sm_80", "sm_120", "sm_90", "sm_89"), ("sm_120", "sm_90", "sm_89", "sm_80")):
        assert chosen(monkeypatch, INFO.format(capability, cuda), *order) == taken


def test_refuses_programs_for_newer_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DeviceError,
        match=r"too old for sm_90(.|\n)*found: compute capability 8\.6\n(.|\n)*at least compute capability 9\.0"
        r"(.|\n)*--cuda-arch sm_80",
    ):
        chosen(monkeypatch, INFO.format("8.6", "12.4"), "sm_120", "sm_90")
    with pytest.raises(DeviceError, match=r"too old for sm_80(.|\n)*7\.5(.|\n)*--target vulkan"):
        chosen(monkeypatch, INFO.format("7.5", "12.4"), "sm_80", "sm_120")
    with pytest.raises(DeviceError, match=r"too old for sm_90(.|\n)*7\.5(.|\n)*--target vulkan"):
        chosen(monkeypatch, INFO.format("7.5", "12.4"), "sm_90")
    with pytest.raises(DeviceError, match=r"found: CUDA version of the driver 11\.4\n(.|\n)*update"):
        chosen(monkeypatch, INFO.format("8.0", "11.4"), "sm_80")


@pytest.mark.parametrize("device", [None, "ampere"])
def test_refuses_programs_that_do_not_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    with pytest.raises(DeviceError, match="does not say which GPUs"):
        chosen(monkeypatch, INFO.format("9.0", "12.4"), device)


def test_leaves_to_the_driver_what_it_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, "", "sm_80") == "sm_80"
