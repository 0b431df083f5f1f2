"""Bundles for CPUs that this machine is not: called through an emulator, where the environment names one.

``HALFBYTE_AARCH64`` is the command that runs an aarch64 ``iree-run-module``: an emulator with its options, then the
tool out of IREE's wheel for aarch64 (``make test-aarch64`` fetches and names it). On a machine that is one it is not
needed: there everything runs as usual.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy_twin import Array

from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.lowering.targets.target import Target
from halfbyte.runtime import Bundle, load
from halfbyte.runtime.cpu_features import architecture, host_features
from halfbyte.runtime.element_types import ELEMENT_TYPES
from halfbyte.runtime.manifest import EntryPoint, Manifest


def emulator(target: CpuTarget) -> tuple[str, ...]:
    """What runs programs of a target that this machine cannot: a command without arguments, or nothing."""
    if target.architecture == architecture():
        return ()
    return tuple(shlex.split(os.environ.get(f"HALFBYTE_{target.architecture.upper()}", "")))


def obstacle(target: CpuTarget) -> str:
    """Why programs of a target can be run neither by this machine nor by an emulator; empty where they can."""
    if target.architecture != architecture():
        named = (
            f"this is no {target.architecture}, and HALFBYTE_{target.architecture.upper()} names no emulator"
        )
        return "" if emulator(target) else named
    lacking = target.features - host_features()
    return f"this CPU lacks {', '.join(sorted(lacking))}" if lacking else ""


class ForeignBundle:
    """`Bundle.call` by an emulator. Every call starts anew: arrays that it is given stay as they are, caches too."""

    def __init__(self, folder: Path, command: tuple[str, ...]) -> None:
        self.folder, self._command = folder, command
        self.manifest = Manifest.load(folder)

    @property
    def entry_points(self) -> Mapping[str, EntryPoint]:
        return self.manifest.entry_points

    def call(self, name: str, *inputs: Array) -> list[Array]:
        """As `Bundle.call`, for entry points whose results vary with one size at most."""
        entry = self.entry_points[name]
        [program] = self.manifest.programs
        with tempfile.TemporaryDirectory() as place:
            arguments = [
                f"--module={self.folder / program.file}",
                f"--function={name}",
                "--device=local-sync",
            ]
            for archive in self.manifest.parameters:
                arguments.append(f"--parameters={archive.scope}={self.folder / archive.file}")
            sizes = {}
            for i, (array, tensor) in enumerate(zip(inputs, entry.inputs, strict=True)):
                sizes |= {size: n for size, n in zip(tensor.shape, array.shape, strict=True)}
                (Path(place) / f"{i}.bin").write_bytes(np.ascontiguousarray(array).tobytes())
                shape = "x".join(map(str, (*array.shape, tensor.dtype)))
                arguments.append(f"--input={shape}=@{place}/{i}.bin")
            files = [Path(place) / f"out{i}.bin" for i in range(len(entry.outputs))]
            arguments += [f"--output=@{path}" for path in files]
            made = subprocess.run([*self._command, *arguments], capture_output=True, text=True)
            assert made.returncode == 0, made.stderr
            return [
                np.frombuffer(path.read_bytes(), ELEMENT_TYPES[tensor.dtype].carrier).reshape(
                    [sizes.get(size, size) for size in tensor.shape]
                )
                for path, tensor in zip(files, entry.outputs, strict=True)
            ]


AnyBundle = Bundle | ForeignBundle


def opened(folder: Path, target: Target, device: str = "cpu") -> AnyBundle:
    """A bundle for a target without an `obstacle`."""
    command = emulator(target) if isinstance(target, CpuTarget) else ()
    return ForeignBundle(folder, command) if command else load(folder, device=device)
