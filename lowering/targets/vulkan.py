"""The Vulkan target: IREE's description of the device, flags, and what a device must have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from halfbyte.errors import UsageError
from halfbyte.lowering.kernels.attention import AttentionOfThreads, AttentionShape
from halfbyte.lowering.kernels.fp8_kernels import FloatUnit
from halfbyte.lowering.kernels.isa import THREADS, InstructionSet
from halfbyte.lowering.kernels.platform import VULKAN, VULKAN_WITHOUT_DOT, Platform
from halfbyte.lowering.targets.target import Target

# Nothing depends on the size of a subgroup; the limits are those that every device of Vulkan 1.3 has.
_PORTABLE = (
    '#hal.device.target<"vulkan", [#hal.executable.target<"vulkan-spirv", "vulkan-spirv-fb", '
    '{{iree_codegen.target_info = #iree_gpu.target<arch = "portable", features = "spirv:v1.6,cap:Shader", '
    "wgp = <compute = fp32|fp16|int64|int32|int16|int8, storage = b64|b32|b16|b8, subgroup = none, "
    "dot = {dot}, mma = [], subgroup_size_choices = [32], max_workgroup_sizes = [1024, 1024, 64], "
    "max_thread_count_per_workgroup = 256, max_workgroup_memory_bytes = 16384, "
    "max_workgroup_counts = [65535, 65535, 65535]>>}}>]>"
)
_DOT = "shaderIntegerDotProduct"
# IREE's own code takes these as it likes.
_ALWAYS = (
    *("storageBuffer8BitAccess", "storageBuffer16BitAccess", "shaderInt8", "shaderFloat16"),
    *("subgroupSizeControl",),
)
_PORTABLES = ("portable", "portable-nodot")


@dataclass(frozen=True)
class VulkanTarget(Target):
    """One kind of Vulkan device.

    Attributes:
        device: ``portable``, ``portable-nodot``, a name of ``--iree-vulkan-target``, or the file of an attribute.
    """

    device: str = "portable"

    name: ClassVar[str] = "vulkan"
    drivers: ClassVar[tuple[str, ...]] = ("vulkan",)

    @property
    def label(self) -> str:
        return Path(self.device).name

    @property
    def features(self) -> frozenset[str]:
        """What a device must have, in the spelling of iree-run-module --dump_devices=vulkan."""
        return frozenset(_ALWAYS) | ({_DOT} if self.platform is VULKAN else set())

    @property
    def isa(self) -> InstructionSet:
        return THREADS

    @property
    def platform(self) -> Platform:
        return VULKAN_WITHOUT_DOT if self.device == "portable-nodot" else VULKAN

    @property
    def float_unit(self) -> FloatUnit:
        return FloatUnit.NARROW

    def attention(self, shape: AttentionShape, io: str, cache: str, one_token: bool) -> AttentionOfThreads:
        return AttentionOfThreads(shape, io, io, cache, self.platform)

    @property
    def flags(self) -> list[str]:
        """For iree-compile.

        Buffers bound as one at several offsets do not compile in kernels that are written by hand (IREE 3.13).
        """
        flags = ["--iree-scheduling-optimize-bindings=false"]
        if self.device in _PORTABLES:
            dot = "none" if self.device == "portable-nodot" else "dp4xi8toi32"
            return [*flags, f"--iree-hal-target-device={_PORTABLE.format(dot=dot)}"]
        if (file := Path(self.device)).is_file():
            return [*flags, f"--iree-hal-target-device={_attribute(file)}"]
        return [*flags, "--iree-hal-target-device=vulkan", f"--iree-vulkan-target={self.device}"]


def _attribute(file: Path) -> str:
    text = file.read_text(encoding="utf-8").strip().removesuffix(": !hal.device").strip()
    if not text.startswith("#hal.device.target<"):
        raise UsageError(
            "not the description of a device",
            where=str(file),
            found=text[:60],
            accepted='#hal.device.target<"vulkan", ...>',
            advice="use portable, or a name of iree-compile's --iree-vulkan-target",
        )
    return text
