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
from halfbyte.passes.levels import Levels
from halfbyte.passes.program import LayerSource
from halfbyte.passes.scheme import Activations, Zero
from halfbyte.passes.weight import Fp8Tensor, QuantTensor
from halfbyte.runtime.device_array import DeviceArray, as_float32
from peers import Problem
from peers.halfbyte_program import LoadedProgram

# The fp4 codes of the values u - 8, for u in 0..15 that have one.
_FP4_CODES = np.array([0, 0, 15, 0, 14, 13, 12, 10, 0, 2, 4, 5, 6, 0, 7, 0], np.uint8)


class Halfbyte:
    """``halfbyte::linear`` with f16 scales, those of MXFP4 in bf16, or ``fp8_block_linear``."""

    def __init__(self, activations: str, io: str, weights: str) -> None:
        self.activations, self.io, self.weights = Activations(activations), io, weights

    @property
    def _levels(self) -> Levels:
        return Levels.E2M1 if self.weights == "e2m1" else Levels.INTEGERS

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
        bits, levels = 8 if self.weights == "int8" else 4, self._levels
        packing = Packing(problem.outputs, problem.inputs, problem.group, bits, levels)
        digits = 3 if self.io == "f32" else 2
        scale = "bf16" if self._levels is Levels.E2M1 else "f16"
        arguments = (self.io, scale, Zero.SYMMETRIC, False, self.activations, digits, 0, target.platform)
        return Linear(target.isa, packing, *arguments)

    def _weight(
        self, name: str, codes: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], group: int
    ) -> QuantTensor | Fp8Tensor:
        """The problem's values in any form: e4m3 holds -8..7, e2m1 some, and (16 u - 128) / 16 = u - 8."""
        if self.weights == "e4m3":
            bits = (torch.from_numpy(codes).float() - 8).to(torch.float8_e4m3fn).view(torch.uint8)
            return Fp8Tensor(name, bits, torch.from_numpy(scale), 1, group)
        if self._levels is Levels.E2M1:
            values = torch.from_numpy(_FP4_CODES[codes])
            return QuantTensor(
                name, values, torch.from_numpy(scale).bfloat16() / 2, group, levels=Levels.E2M1
            )
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
