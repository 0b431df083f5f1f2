"""The Vulkan target: IREE's description of the device, flags, and what a device must have."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from halfbyte.errors import UsageError
from halfbyte.lowering.kernels.isa import THREADS, InstructionSet
from halfbyte.lowering.kernels.platform import VULKAN, VULKAN_WITHOUT_DOT, Platform
from halfbyte.lowering.targets.gpu import GpuTarget

# Nothing depends on the size of a subgroup; the limits are those that every device of Vulkan 1.3 has.
_PORTABLE = (
    '#hal.device.target<"vulkan", [#hal.executable.target<"vulkan-spirv", "vulkan-spirv-fb", '
    '{{iree_codegen.target_info = #iree_gpu.target<arch = "portable", features = "spirv:v1.6,cap:Shader", '
    "wgp = <compute = fp32|fp16|int64|int32|int16|int8, storage = b64|b32|b16|b8, subgroup = none, "
    "dot = {dot}, mma = [], subgroup_size_choices = [32], max_workgroup_sizes = [1024, 1024, 64], "
    "max_thread_count_per_workgroup = 256, max_workgroup_memory_bytes = 16384, "
    "max_workgroup_counts = [65535, 65535, 65535]>>}}>]>"
)
_DESCRIPTION = '#hal.device.target<"vulkan"'
_DOT = "shaderIntegerDotProduct"
# IREE's own code takes these as it likes.
_ALWAYS = ("vulkan-1.3", "storageBuffer8BitAccess", "storageBuffer16BitAccess", "shaderInt8", "shaderFloat16")
# Sizes of subgroups that IREE's own code counts on, by kinds of devices. vp_android_baseline_2022 (IREE's default) and
# videocore_vii are left out: bytes in memory come out wrong there (IREE 3.13), without a word.
_SUBGROUPS: Mapping[str, tuple[int, ...]] = {
    r"rdna[1-4]|gfx1[012]\d\d|rx\d{4}(xtx?)?|r9700|[vw]7\d\d\d?|phoenix|strix-(point|halo)": (32, 64),
    r"cdna[1-4]|gfx9\w\w|mi\d{3}[ax]?": (64,),
    r"pascal|volta|turing|ampere|ada|sm_(6[012]|7[025]|8[0679]|12[01])|a100|rtx[34]0\d0(ti)?": (32,),
    r"valhall[1-4]?|arm5gen|mali-g\d+": (16,),
    r"adreno": (64,),
    r"llvmpipe": (8,),
}
_PORTABLES = ("portable", "portable-nodot")


@dataclass(frozen=True)
class VulkanTarget(GpuTarget):
    """One kind of Vulkan device.

    Attributes:
        device: ``portable``, ``portable-nodot``, a name of ``--iree-vulkan-target``, or IREE's description of one.
    """

    device: str = "portable"

    name: ClassVar[str] = "vulkan"
    drivers: ClassVar[tuple[str, ...]] = ("vulkan",)
    device_id: ClassVar[str] = "vulkan"

    @classmethod
    def named(cls, device: str = "portable") -> VulkanTarget:
        """The target of a ``--vulkan-target`` option.

        Args:
            device: ``portable``, ``portable-nodot``, a name of ``--iree-vulkan-target``, or a file that holds IREE's
                description of a device.

        Raises:
            UsageError: another name, or a file that holds something else.
        """
        if device in _PORTABLES or _subgroups(device):
            return cls(device)
        if not os.path.isfile(device):
            raise UsageError(
                "unknown kind of Vulkan device",
                where="--vulkan-target",
                found=device,
                accepted=f"{', '.join(_PORTABLES)}, rdna3, ampere, ada, valhall4, adreno and others of iree-compile's "
                "--iree-vulkan-target, or a file with IREE's description of a device",
                advice="portable runs on all devices of Vulkan 1.3 with integer dot products",
            )
        return cls(_attribute(Path(device)))

    @property
    def label(self) -> str:
        return "described" if self._is_description else self.device

    @property
    def runs_on(self) -> dict[str, Any]:
        return {"device": self.device, "features": tuple(sorted(self.features))}

    @property
    def features(self) -> frozenset[str]:
        """What a device must have, as iree-run-module --dump_devices=vulkan spells it."""
        counted = _described_subgroups if self._is_description else _subgroups
        sizes = {f"subgroupSize{size}" for size in counted(self.device)}
        return frozenset(_ALWAYS) | sizes | ({_DOT} if self.platform is VULKAN else set())

    @property
    def _is_description(self) -> bool:
        return self.device.startswith(_DESCRIPTION)

    @property
    def isa(self) -> InstructionSet:
        return THREADS

    @property
    def demotes_f64(self) -> bool:
        """Few devices compute f64."""
        return True

    @property
    def platform(self) -> Platform:
        return VULKAN_WITHOUT_DOT if self.device == "portable-nodot" else VULKAN

    @property
    def _device_flags(self) -> list[str]:
        if self.device in _PORTABLES:
            dot = "none" if self.device == "portable-nodot" else "dp4xi8toi32"
            return [f"--iree-hal-target-device={_PORTABLE.format(dot=dot)}"]
        if self._is_description:
            return [f"--iree-hal-target-device={self.device}"]
        return ["--iree-hal-target-device=vulkan", f"--iree-vulkan-target={self.device}"]


def _subgroups(name: str) -> tuple[int, ...]:
    return next((sizes for names, sizes in _SUBGROUPS.items() if re.fullmatch(names, name)), ())


def _described_subgroups(device: str) -> tuple[int, ...]:
    sizes = re.search(r"\bsubgroup_size_choices = \[([\d, ]*)\]", device)
    if sizes is None or re.search(r"\bsubgroup = none\b", device):
        return ()
    return tuple(int(size) for size in re.findall(r"\d+", sizes[1]))


def _attribute(file: Path) -> str:
    text = file.read_bytes().decode("utf-8", "replace").strip().removesuffix(": !hal.device").strip()
    if not text.startswith(_DESCRIPTION):
        raise UsageError(
            "not the description of a device",
            where=str(file),
            found=text[:60] or "nothing",
            accepted=f"{_DESCRIPTION}, ...>",
            advice="use portable, or a name of iree-compile's --iree-vulkan-target",
        )
    return text
