"""What every target has: its programs' flags, the kernels it takes, and the packer of weights."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from halfbyte.errors import UnsupportedLayerError
from halfbyte.lowering import layout
from halfbyte.lowering.kernels.attention import AttentionShape
from halfbyte.lowering.kernels.fp8_kernels import FloatUnit
from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
from halfbyte.lowering.kernels.fp8_moe import Fp8Moe
from halfbyte.lowering.kernels.fp8_packing import Fp8Packing
from halfbyte.lowering.kernels.generator import Kernel
from halfbyte.lowering.kernels.isa import InstructionSet
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.kernels.moe import Moe
from halfbyte.lowering.kernels.platform import Platform
from halfbyte.lowering.parameters import NUMPY, ParameterGroup, TensorSpec
from halfbyte.passes.program import ExpertsSource, LayerSource
from halfbyte.passes.weight import Fp8Tensor, QuantTensor


class Target(abc.ABC):
    """A kind of device that programs are compiled for. All share one packed layout, so bundles have one archive.

    Attributes:
        name: ``cpu``, ``vulkan`` or ``cuda``.
        drivers: IREE drivers that can run its programs, the preferred one first.
        device_id: pattern of what programs see of such a device.
        layout: of packed weights.
    """

    name: ClassVar[str]
    drivers: ClassVar[tuple[str, ...]]
    device_id: ClassVar[str]
    layout: ClassVar[str] = layout.NAME

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """Which of its kind it is: the CPU, or the GPU's target."""

    @property
    @abc.abstractmethod
    def runs_on(self) -> dict[str, Any]:
        """The fields of the manifest's `Program` that say what it needs."""

    @property
    def demotes_f64(self) -> bool:
        """Whether f64 becomes f32: torch's scalars may, arguments and results must not (`check_signature`)."""
        return False

    @property
    def input_flags(self) -> list[str]:
        """For iree-compile, of programs that come from torch. Unless told not to, IREE 3.13 reads f64 as f32."""
        return [f"--iree-input-demote-f64-to-f32={str(self.demotes_f64).lower()}"]

    @property
    @abc.abstractmethod
    def flags(self) -> list[str]:
        """For iree-compile."""

    @property
    def host(self) -> str:
        """What flags leave to the machine that compiles."""
        return ""

    @property
    @abc.abstractmethod
    def isa(self) -> InstructionSet:
        """The body of integer GEMMs."""

    @property
    @abc.abstractmethod
    def platform(self) -> Platform:
        """What all kernels share."""

    @property
    @abc.abstractmethod
    def float_unit(self) -> FloatUnit:
        """What multiplies e4m3 weights."""

    @abc.abstractmethod
    def attention(self, shape: AttentionShape, io: str, cache: str, one_token: bool) -> Kernel:
        """The attention of queries and results of dtype io over caches of dtype cache."""

    @abc.abstractmethod
    def head_linear(
        self, inputs: int, outputs: int, kept: int, io: str, weight: str, one_token: bool
    ) -> Kernel:
        """Each head's own product, see `HeadLinear`."""

    def pack(self, name: str, linear: Linear | Fp8Linear, source: LayerSource) -> ParameterGroup:
        """The packed weight of a layer, as the kernels of ``linear`` take it."""
        specs = tuple(TensorSpec(f"{name}.{a.name}", a.shape, a.dtype) for a in linear.arguments)

        def make() -> dict[str, np.ndarray]:
            weight = source.weight()
            made = _packed(weight)
            if linear.bias:
                assert source.bias is not None
                made["bias"] = layout.pack_bias(source.bias())
            if any(argument.name == "colsum" for argument in linear.arguments):
                assert isinstance(weight, QuantTensor)
                made["colsum"] = layout.pack_column_sums(weight)
            return {spec.key: made[spec.key.rpartition(".")[2]] for spec in specs}

        return ParameterGroup(specs, make)

    def pack_experts(self, name: str, moe: Moe | Fp8Moe, source: ExpertsSource) -> ParameterGroup:
        """The packed weights of a layer of experts, as the kernels of ``moe`` take them, expert by expert."""
        sides = {
            side.kind: tuple(
                TensorSpec(f"{name}.{a.name}", a.shape, a.dtype) for a in side.arguments(moe.experts)
            )
            for side in (moe.up, moe.down)
        }

        def both(expert: int) -> dict[str, np.ndarray]:
            gate, up = _packed_source(source.gate(expert)), _packed_source(source.up(expert))
            return {part: layout.side_by_side(gate[part], up[part]) for part in gate}

        def make() -> dict[str, np.ndarray | Iterator[np.ndarray]]:
            up = _by_expert(sides["up"], source.experts, both)
            return up | _by_expert(
                sides["down"], source.experts, lambda expert: _packed_source(source.down(expert))
            )

        return ParameterGroup((*sides["up"], *sides["down"]), make)

    def fp8_linear(
        self, outputs: int, inputs: int, block: int, io: str, bias: bool, quantized: bool
    ) -> Fp8Linear:
        """The kernels of a linear with e4m3 weights."""
        packing = Fp8Packing(outputs, inputs, block)
        return Fp8Linear(packing, io, bias, quantized, self.float_unit, self.platform)


def _by_expert(
    specs: Sequence[TensorSpec], experts: int, packed: Callable[[int], dict[str, np.ndarray]]
) -> dict[str, np.ndarray | Iterator[np.ndarray]]:
    """The tensors of all experts, of which one at a time is packed: the codes in pieces, and what they leave behind.

    The others are a small part of the codes' bytes, so that the experts need not be packed once more for them.
    """
    codes, *others = specs
    kept = {spec.key: np.empty(spec.shape, NUMPY[spec.dtype]) for spec in others}

    def pieces() -> Iterator[np.ndarray]:
        for expert in range(experts):
            made = packed(expert)
            for key, whole in kept.items():
                size = len(whole) // experts
                flat = made[key.rpartition(".")[2]].reshape(size, *whole.shape[1:])
                whole[expert * size : (expert + 1) * size] = flat.view(whole.dtype)
            yield made["codes"]

    return {codes.key: pieces(), **kept}


def _packed(weight: QuantTensor | Fp8Tensor) -> dict[str, np.ndarray]:
    """The tensors of a weight in the layout of this target, without the bias."""
    if isinstance(weight, Fp8Tensor):
        scales = layout.pack_block_scales(weight.scale, weight.shape[0], weight.block_outputs)
        return {"codes": layout.pack_fp8(weight.bits), "scale": scales}
    made = {"codes": layout.pack_codes(weight), "scale": layout.pack_groups(weight.scale)}
    if weight.zero is not None:
        _check_zeros(weight.name, weight.zero, 2**weight.bits)
    for part, values in (("zero", weight.zero), ("minimum", weight.minimum)):
        if values is not None:
            made[part] = layout.pack_groups(values)
    return made


def _check_zeros(name: str, zeros: torch.Tensor, codes: int) -> None:
    """Kernels take the zeros of 4-bit codes off in bytes; GPTQ's stored z - 1 reaches one past the codes."""
    highest = int(zeros.max()) if zeros.numel() else 0
    if highest > codes:
        raise UnsupportedLayerError(
            "a zero point lies outside of the codes",
            where=name,
            found=str(highest),
            accepted=f"0 to {codes}",
            advice="quantize the layer again, or give its offset as `minimum`",
        )


def _packed_source(source: LayerSource) -> dict[str, np.ndarray]:
    """The same with its bias, in blocks of 64."""
    made = _packed(source.weight())
    if source.bias is not None:
        made["bias"] = layout.pack_bias(source.bias()).reshape(-1, 64)
    return made
