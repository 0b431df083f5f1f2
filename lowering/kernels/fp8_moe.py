"""``halfbyte::fp8_block_moe``: which kernels a layer of experts with e4m3 weights takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.lowering.kernels.fp8_kernels import FloatUnit, Fp8Gemm, Fp8Values
from halfbyte.lowering.kernels.fp8_packing import Fp8Packing
from halfbyte.lowering.kernels.linear import Argument
from halfbyte.lowering.kernels.routed import RoutedExperts, RoutedLinear


@dataclass(frozen=True)
class Fp8ExpertLinear(RoutedLinear[Fp8Packing]):
    """One linear of the experts."""

    def _weight(self, blocks: int) -> tuple[Argument, ...]:
        return (
            Argument(f"{self.kind}.codes", (blocks, *self.packing.codes_shape[1:]), "i8"),
            Argument(f"{self.kind}.scale", (blocks, *self.packing.scale_shape[1:]), "f32"),
        )


@dataclass(frozen=True, kw_only=True)
class Fp8Moe(RoutedExperts[Fp8ExpertLinear]):
    """One shape of routed experts with e4m3 weights.

    Attributes:
        unit: what the CPU multiplies floats by.
        quantized: activations become e4m3.
    """

    unit: FloatUnit
    quantized: bool

    sides: ClassVar[str] = "fp8_moe_sides.mlir.j2"

    def _planes(self, linear: Fp8ExpertLinear) -> int:
        return self.unit.planes(self.io if linear.kind == "up" else "f32", self.quantized)

    def before(self, linear: Fp8ExpertLinear) -> Fp8Values:
        first = linear.kind == "up"
        io = self.io if first else "f32"
        return Fp8Values(io, self.quantized, self._planes(linear), self.platform, slots=first)

    def gemm(self, linear: Fp8ExpertLinear) -> Fp8Gemm:
        glu = self.glu if linear.kind == "up" else None
        return Fp8Gemm(self.unit, self._planes(linear), "f32", linear.bias, self.platform, linear.kind, glu)

    @property
    def symbol(self) -> str:
        sides = []
        for side in (self.up, self.down):
            packing = side.packing
            size = f"{packing.outputs}x{packing.inputs}_b{packing.block_inputs}"
            sides.append(f"{size}{'_bias' if side.bias else ''}")
        mode = f"{'wfp8_afp8' if self.quantized else 'wfp8_a16'}_{self.glu}"
        return f"halfbyte_moe_{mode}_e{self.experts}_k{self.slots}_{'_'.join(sides)}_{self.io}"

    def _of_side(self, linear: Fp8ExpertLinear) -> dict[str, object]:
        return {"planes": self._planes(linear)}
