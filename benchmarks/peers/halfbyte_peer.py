"""halfbyte: the product's kernels, compiled for this machine or another CPU, weights in the runtime's own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import iree.runtime as rt
import numpy as np
import torch

from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.layout import Packing
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.passes.program import LayerSource
from halfbyte.passes.scheme import Activations, Zero
from halfbyte.passes.weight import Fp8Tensor, QuantTensor
from halfbyte.runtime.device_array import DeviceArray, as_float32
from peers import Problem
from peers.halfbyte_program import LoadedProgram


class Halfbyte:
    """``halfbyte::linear`` with f16 scales, or ``fp8_block_linear``."""

    def __init__(self, activations: str, io: str, weights: str) -> None:
        self.activations, self.io, self.weights = Activations(activations), io, weights

    def build(self, problem: Problem) -> None:
        target = CpuTarget.named(problem.cpu)
        linear = self._linear(target, problem)
        made = []
        for index, (codes, scale) in enumerate(zip(problem.codes, problem.scales, strict=True)):
            name = f"copy{index}"
            weight = self._weight(name, codes, scale, problem.group)
            source = LayerSource(lambda w=weight: w, None, (name,))
            made.append((name, linear, target.pack(name, linear, source)))
        self.program = LoadedProgram(target, problem.threads, made)
        self.copies = len(made)

    def _linear(self, target: CpuTarget, problem: Problem) -> Linear | Fp8Linear:
        if self.weights == "e4m3":
            quantized = self.activations is Activations.FP8
            return target.fp8_linear(
                problem.outputs, problem.inputs, problem.group, self.io, False, quantized
            )
        packing = Packing(problem.outputs, problem.inputs, problem.group, 8 if self.weights == "int8" else 4)
        digits = 3 if self.io == "f32" else 2
        arguments = (self.io, "f16", Zero.SYMMETRIC, False, self.activations, digits, 0, target.platform)
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
        program = self.program
        array = DeviceArray.from_numpy(program.device.hal, carrier, self.io)
        arguments = rt.VmVariantList(1)
        arguments.push_ref(array.view)
        program.keep.append((array, arguments))
        return [lambda i=index: program.invoke(i, arguments) for index in range(self.copies)]

    def result(self, returned: Any) -> np.ndarray[Any, Any]:
        view = returned.get_as_object(0, rt.HalBufferView)
        raw = DeviceArray(self.program.device.hal, view, self.io).numpy()
        return as_float32(raw, self.io)
