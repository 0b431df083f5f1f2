"""The CUDA target: which architectures, flags and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halfbyte.errors import UsageError
from halfbyte.lowering.kernels.isa import TENSOR_CORES, InstructionSet
from halfbyte.lowering.kernels.platform import CUDA, Platform
from halfbyte.lowering.targets.gpu import GpuTarget

# IREE 3.13 has no usable sm_90 of its own, so that it is described here; an empty text stands for IREE's.
_SM_90 = (
    '#hal.device.target<"cuda", [#hal.executable.target<"cuda", "cuda-nvptx-fb", {iree_codegen.target_info = '
    '#iree_gpu.target<arch = "sm_90", features = "+ptx80", wgp = <compute = fp64|fp32|fp16|int64|int32|int16|int8, '
    "storage = b64|b32|b16|b8, subgroup = shuffle|arithmetic, dot = dp4xi8toi32, mma = [<NV_MMA_SYNC_F32_16x8x16_F16>, "
    "<NV_MMA_SYNC_F16_16x8x16_F16>, <NV_MMA_SYNC_F32_16x8x16_BF16>], subgroup_size_choices = [32], "
    "max_workgroup_sizes = [1024, 1024, 1024], max_thread_count_per_workgroup = 1024, "
    "max_workgroup_memory_bytes = 166912, max_workgroup_counts = [2147483647, 65535, 65535]>>}>]>"
)
_ARCHITECTURES: Mapping[str, str] = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_89"), ""),
    "sm_90": _SM_90,
    **dict.fromkeys(("sm_120", "sm_121"), ""),
}
# The CUDA that brought the version of PTX in which IREE writes programs for each: older drivers do not take them.
_CUDA = {
    "sm_80": "11.6",
    "sm_86": "11.6",
    "sm_89": "12.4",
    "sm_90": "12.0",
    "sm_120": "12.8",
    "sm_121": "12.9",
}


@dataclass(frozen=True)
class CudaTarget(GpuTarget):
    """One architecture of NVIDIA's GPUs; drivers translate its PTX for newer ones.

    Attributes:
        architecture: ``sm_80`` and so on.
    """

    architecture: str = "sm_80"

    name: ClassVar[str] = "cuda"
    drivers: ClassVar[tuple[str, ...]] = ("cuda",)
    device_id: ClassVar[str] = "cuda"

    @classmethod
    def named(cls, architecture: str = "sm_80") -> CudaTarget:
        """The target of a ``--cuda-arch`` option.

        Raises:
            UsageError: naming the known architectures.
        """
        if architecture not in _ARCHITECTURES:
            raise UsageError(
                "unknown CUDA architecture",
                where="--cuda-arch",
                found=architecture,
                accepted=", ".join(_ARCHITECTURES),
                advice="programs for sm_80 run on all newer GPUs too",
            )
        return cls(architecture)

    @property
    def label(self) -> str:
        return self.architecture

    @property
    def runs_on(self) -> dict[str, Any]:
        return {"device": self.architecture, "features": (f"cuda-{_CUDA[self.architecture]}",)}

    @property
    def isa(self) -> InstructionSet:
        return TENSOR_CORES

    @property
    def platform(self) -> Platform:
        return CUDA

    @property
    def _device_flags(self) -> list[str]:
        if described := _ARCHITECTURES[self.architecture]:
            return [f"--iree-hal-target-device={described}"]
        return ["--iree-hal-target-device=cuda", f"--iree-cuda-target={self.architecture}"]
