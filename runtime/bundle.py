"""A bundle loaded onto a device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import iree.runtime as rt
import numpy as np

from halfbyte.errors import DeviceError, UsageError
from halfbyte.runtime.device import Device, open_device
from halfbyte.runtime.device_array import DeviceArray
from halfbyte.runtime.element_types import ELEMENT_TYPES
from halfbyte.runtime.invoke import Function
from halfbyte.runtime.iree_messages import IREE_ERRORS, one_line
from halfbyte.runtime.manifest import EntryPoint, Manifest
from halfbyte.runtime.parameters import Residence, check_mode, load_archive
from halfbyte.runtime.polling_threads import awake
from halfbyte.runtime.program import choose_program, compatibility_notes, read_program
from halfbyte.runtime.signature import check_inputs
from halfbyte.runtime.tokens import check_fed


class Bundle:
    """A program and its parameters, loaded; made by `load`.

    It holds no state of its own between calls: one bundle serves any number of conversations, one call at a
    time.

    Attributes:
        folder: where it was loaded from.
        manifest: what it says about itself.
        device: where it runs.
        residences: where each parameter archive lives in memory.
        notes: what a user should know, e.g. that versions differ; may be empty.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        device: Device,
        residences: tuple[Residence, ...],
        functions: Mapping[str, Function],
        notes: tuple[str, ...],
    ) -> None:
        self.folder, self.manifest, self.device = folder, manifest, device
        self.residences, self.notes = residences, notes
        self._functions, self._caches = functions, frozenset(manifest.caches)

    @property
    def entry_points(self) -> Mapping[str, EntryPoint]:
        """Name to signature of everything `call` can call."""
        return self.manifest.entry_points

    def call(self, name: str, *inputs: np.ndarray[Any, Any] | DeviceArray) -> list[np.ndarray[Any, Any]]:
        """Calls an entry point.

        Args:
            name: of the entry point.
            inputs: in its order, of its shapes and dtypes (see `Manifest`). Caches must be device arrays.

        Returns:
            The outputs, as numpy arrays of their own; bf16 and 8-bit floats as raw bits.

        Raises:
            UsageError: no such entry point, inputs that do not fit it, tokens outside the vocabulary, or more than
                the caches hold.
            DeviceError: the device failed.
        """
        return [output.numpy() for output in self.call_on_device(name, *inputs)]

    def call_on_device(self, name: str, *inputs: np.ndarray[Any, Any] | DeviceArray) -> list[DeviceArray]:
        """Does what `call` does and leaves the outputs on the device."""
        if name not in self._functions:
            raise UsageError("no such entry point", found=repr(name), accepted=", ".join(self._functions))
        function = self._functions[name]
        checked = check_inputs(name, function.entry, inputs, self._caches)
        check_fed(self.manifest.model, function.entry, checked)
        return function(checked)

    def to_device(self, array: np.ndarray[Any, Any], dtype: str) -> DeviceArray:
        """Copies a numpy array (of the carrier dtype of ``dtype``) to the bundle's device."""
        return DeviceArray.from_numpy(self.device.hal, array, dtype)

    def new_caches(self) -> list[DeviceArray]:
        """Returns the caches of an empty conversation: zeros, in the order of the calls."""
        arrays = []
        for cache in self.manifest.caches:
            shape = [int(size) for size in cache.shape]
            zeros = np.zeros(shape, ELEMENT_TYPES[cache.dtype].carrier)
            arrays.append(self.to_device(zeros, cache.dtype))
        return arrays

    def describe(self) -> str:
        """Returns a few lines for humans: model, device, parameters, entry points, notes."""
        model, device = self.manifest.model, self.device
        threads = "" if device.threads is None else f", {device.threads} thread{'s' * (device.threads != 1)}"
        lines = [
            f"{self.folder.resolve().name}: {model.architecture}, {model.dtype}",
            f"  device: {device.spec}{threads}",
            *(f"  parameters: {residence}" for residence in self.residences),
        ]
        for name, entry in self.entry_points.items():
            inputs = [str(item) for item in entry.inputs if item not in self.manifest.caches]
            caches = len(entry.inputs) - len(inputs)
            inputs += [f"{caches} caches"] * bool(caches)
            lines.append(f"  {name}({', '.join(inputs)}) -> {', '.join(map(str, entry.outputs))}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    threads: int | None = None,
    parameters: str = "huge",
    checksums: bool = False,
) -> Bundle:
    """Loads a bundle.

    Args:
        path: folder written by `halfbyte compile`.
        device: see `open_device`.
        threads: worker threads of a CPU; None for IREE's default. One thread runs on the caller's.
        parameters: ``huge`` reads them into memory on huge pages where the system has them, ``mmap`` maps the
            file.
        checksums: compare the SHA-256 of the archives too, about a second per GB. Sizes of all tensors, and
            the SHA-256 of the program, are always compared.

    Raises:
        CheckpointError: files of the bundle are missing, damaged or of another bundle.
        DeviceError: there is no such device, the bundle has no program for it, or this CPU lacks
            instructions.
        UsageError: unknown parameter mode.
    """
    check_mode(parameters)
    folder = Path(path)
    manifest = Manifest.load(folder)
    opened = open_device(device, threads)
    program = choose_program(opened, manifest)
    archives = [
        # What goes to a GPU is copied there once; huge pages would only cost memory.
        load_archive(folder, archive, parameters if opened.target == "cpu" else "mmap", checksum=checksums)
        for archive in manifest.parameters
        if program.target in archive.targets
    ]
    instance = _instance()
    modules = [rt.create_hal_module(instance, opened.hal)]
    if archives:
        providers = [archive.index.create_provider(scope=archive.scope) for archive in archives]
        modules.append(rt.create_io_parameters_module(instance, *providers))
    content = read_program(folder, program)
    try:
        module = rt.VmModule.copy_buffer(instance, content)
        with awake():
            context = rt.VmContext(instance, [*modules, module])
    except IREE_ERRORS as error:
        raise DeviceError(
            "the program cannot be loaded", where=str(folder / program.file), found=one_line(error)
        ) from None
    functions = {
        name: Function(context, module, opened, name, entry) for name, entry in manifest.entry_points.items()
    }
    residences = tuple(archive.residence for archive in archives)
    return Bundle(folder, manifest, opened, residences, functions, compatibility_notes(program, manifest))


@lru_cache(maxsize=1)
def _instance() -> rt.VmInstance:
    return rt.VmInstance()
