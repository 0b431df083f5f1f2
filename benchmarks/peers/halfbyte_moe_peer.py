"""halfbyte: ``halfbyte::moe`` and ``fp8_block_moe`` after routing, experts in the runtime's own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import iree.runtime as rt
import numpy as np
import torch

from halfbyte.lowering.kernels.fp8_moe import Fp8ExpertLinear, Fp8Moe
from halfbyte.lowering.kernels.fp8_packing import Fp8Packing
from halfbyte.lowering.kernels.generator import Glu
from halfbyte.lowering.kernels.moe import ExpertLinear, Moe
from halfbyte.lowering.layout import Packing
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.passes.program import ExpertsSource, LayerSource
from halfbyte.passes.scheme import Activations, Zero
from halfbyte.passes.weight import Fp8Tensor, QuantTensor
from halfbyte.runtime.device_array import DeviceArray
from peers.halfbyte_program import LoadedProgram
from peers.moe_problem import Array, MoeProblem


class HalfbyteMoe:
    """float32 in and out; the intermediate is quantized like the input."""

    def __init__(self, activations: str) -> None:
        self.activations = Activations(activations)

    def build(self, problem: MoeProblem) -> None:
        target = CpuTarget.named(problem.cpu)
        up = Packing(problem.inner, problem.hidden, problem.group)
        down = Packing(problem.hidden, problem.inner, problem.group)
        moe = Moe(
            isa=target.isa,
            experts=problem.experts,
            slots=problem.slots,
            up=ExpertLinear("up", up, False, "f16", Zero.SYMMETRIC),
            down=ExpertLinear("down", down, False, "f16", Zero.SYMMETRIC),
            io="f32",
            activations=self.activations,
            digits=3,
            glu=Glu("silu"),
            platform=target.platform,
        )

        def source(part: str) -> Callable[[int], LayerSource]:
            def weight(expert: int) -> QuantTensor:
                codes, scale = problem.weight(expert, part)
                return QuantTensor(
                    part, torch.from_numpy(codes), torch.from_numpy(scale).half(), problem.group
                )

            return lambda expert: LayerSource(lambda: weight(expert), None, (part,))

        self._load(target, moe, problem, source)

    def _load(
        self,
        target: CpuTarget,
        moe: Moe | Fp8Moe,
        problem: MoeProblem,
        source: Callable[[str], Callable[[int], LayerSource]],
    ) -> None:
        experts = ExpertsSource(problem.experts, source("gate"), source("up"), source("down"))
        group = target.pack_experts("moe", moe, experts)
        self.program = LoadedProgram(target, problem.threads, [("moe", moe, group)])

    def call(self, x: Array, logits: Array, ids: Array, factors: Array) -> Callable[[], Any]:
        program, arguments = self.program, rt.VmVariantList(3)
        for value, dtype in ((x, "f32"), (ids, "i64"), (factors, "f32")):
            array = DeviceArray.from_numpy(program.device.hal, np.ascontiguousarray(value), dtype)
            program.keep.append(array)
            arguments.push_ref(array.view)
        program.keep.append(arguments)
        return lambda: program.invoke(0, arguments)

    def result(self, returned: Any) -> Array:
        view = returned.get_as_object(0, rt.HalBufferView)
        return np.asarray(DeviceArray(self.program.device.hal, view, "f32").numpy())


class HalfbyteFp8Moe(HalfbyteMoe):
    """The same with the weights in e4m3, which holds their codes exactly: twice the bytes."""

    def build(self, problem: MoeProblem) -> None:
        target = CpuTarget.named(problem.cpu)
        moe = Fp8Moe(
            unit=target.float_unit,
            experts=problem.experts,
            slots=problem.slots,
            up=Fp8ExpertLinear("up", Fp8Packing(problem.inner, problem.hidden, problem.group), False),
            down=Fp8ExpertLinear("down", Fp8Packing(problem.hidden, problem.inner, problem.group), False),
            io="f32",
            quantized=self.activations is Activations.FP8,
            glu=Glu("silu"),
            platform=target.platform,
        )

        def source(part: str) -> Callable[[int], LayerSource]:
            def weight(expert: int) -> Fp8Tensor:
                codes, scale = problem.weight(expert, part)
                values = torch.from_numpy(codes.astype(np.float32) - 8).to(torch.float8_e4m3fn)
                return Fp8Tensor(part, values.view(torch.uint8), torch.from_numpy(scale), 1, problem.group)

            return lambda expert: LayerSource(lambda: weight(expert), None, (part,))

        self._load(target, moe, problem, source)
