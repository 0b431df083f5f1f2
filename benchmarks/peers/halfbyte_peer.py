"""halfbyte: the product's kernels, compiled for this machine or another CPU, weights in the runtime's own memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import iree.runtime as rt
import numpy as np
import torch

from halfbyte.lowering.archive import write_archive
from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.layer_program import ArchivedLayer, layer_program
from halfbyte.lowering.layout import Packing
from halfbyte.lowering.parameters import Parameters
from halfbyte.lowering.splice import SCOPE
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.passes.program import LayerSource
from halfbyte.passes.scheme import Activations, Zero
from halfbyte.passes.weight import QuantTensor
from halfbyte.runtime.device import open_device
from halfbyte.runtime.device_array import DeviceArray, as_float32
from halfbyte.runtime.manifest import ParameterArchive, ParameterTensor
from halfbyte.runtime.parameters import load_archive
from peers import Problem


class Halfbyte:
    """``halfbyte::linear`` with f16 scales. Where the weights are int8, 16 times the codes stand for them."""

    def __init__(self, activations: str, io: str, bits: int) -> None:
        self.activations, self.io, self.bits = Activations(activations), io, bits

    def build(self, problem: Problem) -> None:
        target = CpuTarget.named(problem.cpu)
        packing = Packing(problem.outputs, problem.inputs, problem.group, self.bits)
        digits = 3 if self.io == "f32" else 2
        linear = Linear(
            target.isa,
            packing,
            self.io,
            "f16",
            Zero.SYMMETRIC,
            False,
            self.activations,
            digits,
            0,
            target.soft_f16,
        )
        layers, parameters = [], Parameters()
        for index, (codes, scale) in enumerate(zip(problem.codes, problem.scales, strict=True)):
            name = f"copy{index}"
            wide = self.bits == 8  # (16 u - 128) / 16 = u - 8
            values = torch.from_numpy(codes) * (16 if wide else 1)
            factors = torch.from_numpy(scale).half() / (16 if wide else 1)
            weight = QuantTensor(name, values, factors, problem.group, bits=self.bits)
            parameters.add(name, target.pack(name, linear, LayerSource(lambda w=weight: w, None, (name,))))
            layers.append(ArchivedLayer(name, linear))
        program, _ = compile_module(layer_program(layers), target.flags, cache=False)
        device = open_device("cpu", problem.threads)
        instance = rt.VmInstance()
        self.keep: list[Any] = [device, instance]
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
            rt.create_hal_module(instance, device.hal),
            rt.create_io_parameters_module(instance, provider),
            module,
        ]
        self.context = rt.VmContext(instance, modules)
        self.functions = [module.lookup_function(layer.function) for layer in layers]
        self.device = device.hal

    def calls(self, x: np.ndarray[Any, Any]) -> list[Callable[[], Any]]:
        carrier = x
        if self.io == "bf16":
            carrier = torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()
        array = DeviceArray.from_numpy(self.device, carrier, self.io)
        view = array.view
        arguments = rt.VmVariantList(1)
        arguments.push_ref(view)
        self.keep.append((array, arguments))

        def call(function: Any) -> Any:
            results = rt.VmVariantList(1)
            self.context.invoke(function, arguments, results)
            return results

        return [lambda f=function: call(f) for function in self.functions]

    def result(self, returned: Any) -> np.ndarray[Any, Any]:
        view = returned.get_as_object(0, rt.HalBufferView)
        raw = DeviceArray(self.device, view, self.io).numpy()
        return as_float32(raw, self.io)
