"""``halfbyte::fp8_block_moe`` on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.lowering.kernels.fp8_kernels import FloatUnit, Fp8Gemm, Fp8Values
from halfbyte.lowering.kernels.fp8_packing import Fp8Packing
from halfbyte.lowering.kernels.generator import Combine, Glu, Kernel, Route
from halfbyte.lowering.kernels.linear import Argument
from halfbyte.lowering.kernels.routed import data_types, routed_text


@dataclass(frozen=True)
class Fp8ExpertLinear:
    """One linear of the experts.

    Attributes:
        kind: ``up`` holds gate and up, whose blocks of 64 columns take turns; or ``down``.
        packing: of one expert's linear; of gate and of up alike.
        bias: whether a bias is added.
    """

    kind: Literal["up", "down"]
    packing: Fp8Packing
    bias: bool

    @property
    def blocks_per_expert(self) -> int:
        """Blocks of 64 columns."""
        return self.packing.column_blocks * (2 if self.kind == "up" else 1)

    def arguments(self, experts: int) -> tuple[Argument, ...]:
        """The tensors of all experts, as the dense linear has them for their columns side by side."""
        blocks, packing = experts * self.blocks_per_expert, self.packing
        out = [
            Argument(f"{self.kind}.codes", (blocks, *packing.codes_shape[1:]), "i8"),
            Argument(f"{self.kind}.scale", (blocks, *packing.scale_shape[1:]), "f32"),
        ]
        return (*out, Argument(f"{self.kind}.bias", (64 * blocks,), "f32")) if self.bias else tuple(out)


@dataclass(frozen=True)
class Fp8Moe:
    """One shape of routed experts with e4m3 weights.

    Attributes:
        unit: what the CPU multiplies floats by.
        experts: their number.
        slots: experts of a token.
        up, down: their linears.
        io: dtype of x and y.
        quantized: activations become e4m3.
        glu: the product of gate and up.
        soft_f16: the CPU has no instruction that casts f16.
    """

    unit: FloatUnit
    experts: int
    slots: int
    up: Fp8ExpertLinear
    down: Fp8ExpertLinear
    io: str
    quantized: bool
    glu: Glu
    soft_f16: bool = False

    @property
    def inputs(self) -> int:
        return self.up.packing.inputs

    @property
    def outputs(self) -> int:
        return self.inputs

    def _planes(self, linear: Fp8ExpertLinear) -> int:
        return self.unit.planes(self.io if linear.kind == "up" else "f32", self.quantized)

    def _values(self, linear: Fp8ExpertLinear) -> Fp8Values:
        first = linear.kind == "up"
        io = self.io if first else "f32"
        return Fp8Values(io, self.quantized, self._planes(linear), self.soft_f16, slots=first)

    def _gemm(self, linear: Fp8ExpertLinear) -> Fp8Gemm:
        glu = self.glu if linear.kind == "up" else None
        return Fp8Gemm(self.unit, self._planes(linear), "f32", linear.bias, self.soft_f16, linear.kind, glu)

    @property
    def _combine(self) -> Combine:
        return Combine(self.io, self.soft_f16)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        linears = (self.up, self.down)
        pairs = [kernel for linear in linears for kernel in (self._values(linear), self._gemm(linear))]
        return (Route(), *pairs, self._combine)

    @property
    def label(self) -> str:
        """The GEMMs of the layer, for reports."""
        return " / ".join(self._gemm(linear).symbol for linear in (self.up, self.down))

    @property
    def symbol(self) -> str:
        sides = []
        for side in (self.up, self.down):
            packing = side.packing
            size = f"{packing.outputs}x{packing.inputs}_b{packing.block_inputs}"
            sides.append(f"{size}{'_bias' if side.bias else ''}")
        mode = f"{'wfp8_afp8' if self.quantized else 'wfp8_a16'}_{self.glu}"
        return f"halfbyte_moe_{mode}_e{self.experts}_k{self.slots}_{'_'.join(sides)}_{self.io}"

    @property
    def data(self) -> tuple[str, ...]:
        """Types of what the function takes before the experts' tensors: x, ids, weights."""
        return data_types(self.inputs, self.slots, self.io)

    @property
    def result(self) -> str:
        """Type of what it gives."""
        return self.data[0]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The packed experts' tensors, in order."""
        return (*self.up.arguments(self.experts), *self.down.arguments(self.experts))

    def text(self) -> str:
        """The ``util.func`` of this shape; the kernels it dispatches are separate (`kernels`)."""
        return routed_text(self, "fp8_moe_sides.mlir.j2", self._side(self.up), self._side(self.down))

    def _side(self, linear: Fp8ExpertLinear) -> dict[str, Any]:
        return {
            "packing": linear.packing,
            "planes": self._planes(linear),
            "blocks_per_expert": linear.blocks_per_expert,
            "arguments": linear.arguments(self.experts),
            "quantize": self._values(linear).symbol,
            "gemm": self._gemm(linear).symbol,
        }
