"""What a CUDA device can do, as IREE's driver tells it, to compare with what a program needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from halfbyte.runtime.device_info import device_info


class Version(NamedTuple):
    """A compute capability, or a version of CUDA; both are ordered."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class CudaFeatures(NamedTuple):
    """What a device can do, or what a program needs; None where that is not known.

    Attributes:
        capability: compute capability; a GPU runs programs of its own and of lower ones.
        cuda: the version of CUDA whose programs the driver translates, with all lower ones.
    """

    capability: Version | None
    cuda: Version | None

    def lacks(self, needed: CudaFeatures) -> tuple[str, ...]:
        """Says what a device of these features is known to lack."""
        names = ("compute capability", "CUDA version of the driver")
        pairs = zip(names, self, needed, strict=True)
        return tuple(f"{name} {have}" for name, have, need in pairs if have and need and have < need)

    def __str__(self) -> str:
        names = ("compute capability", "CUDA")
        return ", ".join(f"{name} {value}" for name, value in zip(names, self, strict=True) if value)


def parse_device_info(text: str) -> CudaFeatures:
    """Returns the features of a device.

    Args:
        text: as ``iree-run-module --dump_devices=cuda`` prints it for one device.
    """
    return CudaFeatures(
        _version(r"- gpu-compute-capability: (\d+)\.(\d+)", text),
        _version(r"- driver-max-cuda-version: (\d+)\.(\d+)", text),
    )


def needed(device: str, features: Iterable[str]) -> CudaFeatures:
    """Returns what a program needs.

    Args:
        device: the architecture it was compiled for: ``sm_80``, ``sm_120`` and so on.
        features: ``cuda-11.6`` and so on.
    """
    return CudaFeatures(
        _version(r"sm_(\d{1,3})(\d)", device), _version(r"cuda-(\d+)\.(\d+)", "\n".join(features))
    )


def device_features(path: str) -> CudaFeatures:
    """Returns the features of a CUDA device of this machine.

    Args:
        path: the driver's name of the device; empty for the one that IREE takes, the first.
    """
    return parse_device_info(device_info("cuda", path))


def _version(pattern: str, text: str) -> Version | None:
    """From a line of its own."""
    found = re.search(f"^{pattern}$", text, re.MULTILINE)
    return None if found is None else Version(int(found[1]), int(found[2]))
