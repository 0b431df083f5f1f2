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
from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.layer_program import ArchivedLayer, layer_program
from halfbyte.lowering.layout import Packing
from halfbyte.lowering.parameters import Parameters
from halfbyte.lowering.splice import SCOPE
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.passes.program import LayerSource
from halfbyte.passes.scheme import Activations, Zero
from halfbyte.passes.weight import Fp8Tensor, QuantTensor
from halfbyte.runtime.device import open_device
from halfbyte.runtime.device_array import DeviceArray, as_float32
from halfbyte.runtime.manifest import ParameterArchive, ParameterTensor
from halfbyte.runtime.parameters import load_archive
from peers import Problem


class Halfbyte:
    """``halfbyte::linear`` with f16 scales, or ``fp8_block_linear``."""

    def __init__(self, activations: str, io: str, weights: str) -> None:
        self.activations, self.io, self.weights = Activations(activations), io, weights

    def build(self, problem: Problem) -> None:
        target = CpuTarget.named(problem.cpu)
        linear = self._linear(target, problem)
        layers, parameters = [], Parameters()
        for index, (codes, scale) in enumerate(zip(problem.codes, problem.scales, strict=True)):
            name = f"copy{index}"
            weight = self._weight(name, codes, scale, problem.group)
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
        self.opened, self.device = device, device.hal

    def _linear(self, target: CpuTarget, problem: Problem) -> Linear | Fp8Linear:
        if self.weights == "e4m3":
            quantized = self.activations is Activations.FP8
            return target.fp8_linear(
                problem.outputs, problem.inputs, problem.group, self.io, False, quantized
            )
        packing = Packing(problem.outputs, problem.inputs, problem.group, 8 if self.weights == "int8" else 4)
        digits = 3 if self.io == "f32" else 2
        arguments = (self.io, "f16", Zero.SYMMETRIC, False, self.activations, digits, 0, target.soft_f16)
        return Linear(target.isa, packing, *arguments)

    def _weight(
        self, name: str, codes: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], group: int
    ) -> QuantTensor | Fp8Tensor:
        """The problem's values in any form: e4m3 holds -8..7, and (16 u - 128) / 16 = u - 8."""
        if self.weights == "e4m3":
            bits = (torch.from_numpy(codes).float() - 8).to(torch.float8_e4m3fn).view(torch.uint8)
            return Fp8Tensor(name, bits, torch.from_numpy(scale), 1, group)
        times = 16 if self.weights == "int8" else 1
        values, factors = torch.from_numpy(codes) * times, torch.from_numpy(scale).half() / times
        return QuantTensor(name, values, factors, group, bits=8 if self.weights == "int8" else 4)

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
            self.opened.call(lambda: self.context.invoke(function, arguments, results))
            return results

        return [lambda f=function: call(f) for function in self.functions]

    def result(self, returned: Any) -> np.ndarray[Any, Any]:
        view = returned.get_as_object(0, rt.HalBufferView)
        raw = DeviceArray(self.device, view, self.io).numpy()
        return as_float32(raw, self.io)
