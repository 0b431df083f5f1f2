"""Which of a bundle's programs a device runs, and whether this machine can run it at all."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from halfbyte.errors import CheckpointError, DeviceError
from halfbyte.runtime import cpu_features, vulkan_features
from halfbyte.runtime.device import Device
from halfbyte.runtime.manifest import Manifest, Program


def choose_program(device: Device, manifest: Manifest) -> Program:
    """Returns the first program of the bundle that the device can run.

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
    refusals = [_refusal(device, program) for program in fitting]
    for program, refusal in zip(fitting, refusals, strict=True):
        if refusal is None:
            return program
    raise next(refusal for refusal in refusals if refusal is not None)


def compatibility_notes(program: Program, manifest: Manifest) -> tuple[str, ...]:
    """Returns what may go wrong but need not: unknown CPU features, a runtime of another version."""
    notes = []
    if program.features and not cpu_features.host_features():
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
    if program.architecture is None:
        return _vulkan_refusal(device, program) if program.target == "vulkan" else None
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


def _runtime_version() -> str | None:
    try:
        return metadata.version("iree-base-runtime")
    except metadata.PackageNotFoundError:
        return None
