"""Layers compiled into one program and loaded with their weights in the runtime's own memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import iree.runtime as rt

from halfbyte.lowering.archive import write_archive
from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.kernels.moe import Moe
from halfbyte.lowering.layer_program import ArchivedLayer, layer_program
from halfbyte.lowering.parameters import ParameterGroup, Parameters
from halfbyte.lowering.splice import SCOPE
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.runtime.device import open_device
from halfbyte.runtime.manifest import ParameterArchive, ParameterTensor
from halfbyte.runtime.parameters import load_archive


class LoadedProgram:
    """One function per (name, kernels, packed weight), in order."""

    def __init__(
        self,
        target: CpuTarget,
        threads: int,
        made: Iterable[tuple[str, Linear | Fp8Linear | Moe, ParameterGroup]],
    ) -> None:
        parameters, layers = Parameters(), []
        for name, kernels, group in made:
            parameters.add(name, group)
            layers.append(ArchivedLayer(name, kernels))
        program, _ = compile_module(layer_program(layers), target.flags, cache=False)
        self.device = open_device("cpu", threads)
        instance = rt.VmInstance()
        self.keep: list[Any] = [instance]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights.irpa"
            digest = write_archive(path, parameters)
            tensors = {t.key: ParameterTensor(t.bytes) for t in parameters.tensors}
            size = path.stat().st_size
            archive = ParameterArchive(SCOPE, path.name, digest, target.layout, size, ("cpu",), tensors)
            loaded = load_archive(Path(folder), archive, "huge")
        self.keep.append(loaded)
        module = rt.VmModule.copy_buffer(instance, program)
        provider = loaded.index.create_provider(scope=SCOPE)
        modules = [
            rt.create_hal_module(instance, self.device.hal),
            rt.create_io_parameters_module(instance, provider),
            module,
        ]
        self.context = rt.VmContext(instance, modules)
        self.functions = [module.lookup_function(layer.function) for layer in layers]

    def invoke(self, index: int, arguments: rt.VmVariantList) -> rt.VmVariantList:
        """Runs a function and waits, as the runtime does."""
        results, function = rt.VmVariantList(1), self.functions[index]
        self.device.call(lambda: self.context.invoke(function, arguments, results))
        return results
