"""Which of a bundle's programs a device runs, and whether this machine can run it at all."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from halfbyte.errors import CheckpointError, DeviceError
from halfbyte.runtime import cpu_features, cuda_features, vulkan_features
from halfbyte.runtime.device import Device
from halfbyte.runtime.manifest import Manifest, Program

# Of what --cuda-arch takes the one that most devices run, and what it needs of a driver.
_OLDEST_CUDA, _OLDEST_DRIVER = "sm_80", "cuda-11.6"


def choose_program(device: Device, manifest: Manifest) -> Program:
    """Returns the first program of the bundle that the device can run; of those for CUDA, the most advanced.

    Features are compared here, before the program is loaded: a missing instruction would kill the process, and a
    GPU without what the program was compiled for may compute wrong numbers.

    Raises:
        DeviceError: there is none; names what the device lacks and how to compile for it.
    """
    fitting = [program for program in manifest.programs if device.driver in program.drivers]
    if not fitting:
        raise DeviceError(
            "the bundle has no program for this device",
            where=device.spec,
            found=", ".join(program.target for program in manifest.programs),
            advice=f"compile for it: halfbyte compile --target {device.target} ...",
        )
    refusals = []
    for program in sorted(fitting, key=_rank, reverse=True):
        refusal = _refusal(device, program)
        if refusal is None:
            return program
        refusals.append(refusal)
    raise refusals[-1]  # of the program that asks for least


def compatibility_notes(program: Program, manifest: Manifest) -> tuple[str, ...]:
    """Returns what may go wrong but need not: unknown CPU features, a runtime of another version."""
    notes = []
    if program.architecture and program.features and not cpu_features.host_features():
        notes.append("this system does not tell its CPU features; the program may need some it lacks")
    compiler, runtime = manifest.versions.get("iree-base-compiler"), _runtime_version()
    if compiler is not None and runtime is not None and compiler.split(".")[:2] != runtime.split(".")[:2]:
        notes.append(f"compiled by iree-base-compiler {compiler}, running on iree-base-runtime {runtime}")
    return tuple(notes)


def read_program(folder: Path, program: Program) -> bytes:
    """Returns the program's file.

    Raises:
        CheckpointError: it is missing, or not the one the manifest was written for.
    """
    path = folder / program.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError("missing program", where=str(path), found=str(error)) from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != program.sha256:
        raise CheckpointError(
            "the program is not the one the manifest names",
            where=str(path),
            found=f"sha256 {digest}",
            accepted=f"sha256 {program.sha256}",
            advice="copy the bundle again, or compile it again",
        )
    return content


def _refusal(device: Device, program: Program) -> DeviceError | None:
    if program.target == "vulkan":
        return _vulkan_refusal(device, program)
    if program.target == "cuda":
        return _cuda_refusal(device, program)
    if program.architecture is None:
        return None
    here = cpu_features.architecture()
    if program.architecture != here:
        return DeviceError(
            "the program is for another architecture",
            where=program.file,
            found=here,
            accepted=program.architecture,
            advice="compile on or for this machine: halfbyte compile --cpu host",
        )
    missing = cpu_features.compare(program.features, cpu_features.host_features(), here).missing
    if missing:
        return DeviceError(
            f"this CPU lacks instructions of {program.cpu or program.architecture}",
            where=program.file,
            found=f"no {', '.join(missing)}",
            advice="compile for this machine: halfbyte compile --cpu host (--cpu x86-64-v3 runs on most)",
        )
    return None


def _vulkan_refusal(device: Device, program: Program) -> DeviceError | None:
    """A driver runs code that its device has no features for, and returns wrong numbers."""
    have = vulkan_features.device_features(device.spec.partition("://")[2])
    missing = sorted(set(program.features) - have)
    if not missing or not have:
        return None
    kind = "portable-nodot" if missing == ["shaderIntegerDotProduct"] else "portable"
    return DeviceError(
        f"this Vulkan device lacks features of {program.device or 'the program'}",
        where=f"{device.spec}, {program.file}",
        found=f"no {', '.join(missing)}",
        accepted=", ".join(program.features),
        advice=f"compile for it: halfbyte compile --target vulkan --vulkan-target {kind}",
    )


def _cuda_refusal(device: Device, program: Program) -> DeviceError | None:
    """A driver translates a program for newer GPUs than its own, never for older ones."""
    have = cuda_features.device_features(device.spec.partition("://")[2])
    need, where = _needed_of_cuda(program), f"{device.spec}, {program.file}"
    if need.capability is None:
        return DeviceError(
            "the program does not say which GPUs run it",
            where=where,
            found=program.device or "no device in the manifest",
            accepted="sm_80, sm_90 and so on",
            advice=f"compile it again: halfbyte compile --target cuda --cuda-arch {_OLDEST_CUDA}",
        )
    lacking = have.lacks(need)
    if not lacking:
        return None
    never = have.lacks(cuda_features.needed(_OLDEST_CUDA, (_OLDEST_DRIVER,)))
    return DeviceError(
        f"this CUDA device is too old for {program.device}",
        where=where,
        found=", ".join(lacking),
        accepted=f"at least {need}",
        advice="update the GPU's driver, or compile for it: halfbyte compile --target vulkan"
        if never
        else f"compile for it: halfbyte compile --target cuda --cuda-arch {_OLDEST_CUDA}",
    )


def _needed_of_cuda(program: Program) -> cuda_features.CudaFeatures:
    return cuda_features.needed(program.device or "", program.features)


def _rank(program: Program) -> tuple[int, int]:
    """The most advanced program for CUDA comes first; others stay in the bundle's order."""
    return (program.target == "cuda" and _needed_of_cuda(program).capability) or (0, 0)


def _runtime_version() -> str | None:
    try:
        return metadata.version("iree-base-runtime")
    except metadata.PackageNotFoundError:
        return None
