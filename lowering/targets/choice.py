"""From options, or from a program of a bundle, to targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from halfbyte.errors import UsageError
from halfbyte.lowering.options import CompileOptions
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.lowering.targets.cuda import CudaTarget
from halfbyte.lowering.targets.target import Target
from halfbyte.lowering.targets.vulkan import VulkanTarget
from halfbyte.runtime.manifest import Program

_CHOSEN: Mapping[str, Callable[[CompileOptions], tuple[Target, ...]]] = {
    "cpu": lambda options: CpuTarget.listed(options.cpu),
    "cuda": lambda options: _each(CudaTarget.named, options.cuda_arch),
    "vulkan": lambda options: _each(VulkanTarget.named, options.vulkan_target),
}
NAMES = tuple(_CHOSEN)


def chosen_targets(options: CompileOptions) -> tuple[Target, ...]:
    """The targets of a compilation, in the order of the options.

    Raises:
        UsageError: an unknown target, an unknown kind of one, or several of a kind for one file.
    """
    names = tuple(dict.fromkeys(options.target.split(",")))
    for name in names:
        if name not in _CHOSEN:
            raise UsageError(
                "unknown target", where="--target", found=name or "nothing", accepted=", ".join(NAMES)
            )
    targets = tuple(target for name in names for target in _CHOSEN[name](options))
    if options.fat and len(targets) > len(names):
        raise UsageError(
            "one file holds one program per kind of device",
            where="--fat",
            found=", ".join(f"{target.name} {target.label}" for target in targets),
            accepted="one name for each of --cpu, --vulkan-target and --cuda-arch",
            advice="leave --fat out: then every program has a file, and the best that fits is loaded",
        )
    return targets


def target_of(program: Program) -> Target:
    """The target that a program of a bundle was compiled for."""
    if program.target == "vulkan":
        return VulkanTarget(program.device or "portable")
    if program.target == "cuda":
        return CudaTarget.named(program.device or "sm_80")
    return CpuTarget.named(program.cpu or "host")


def _each(named: Callable[[str], Target], devices: str) -> tuple[Target, ...]:
    return tuple(named(device) for device in dict.fromkeys(devices.split(",")))
