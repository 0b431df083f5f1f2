"""``halfbyte::moe``: which kernels a layer of experts with integer weights takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.lowering.kernels.codes import Codes
from halfbyte.lowering.kernels.generator import Gemm, Quantize, weight_kind
from halfbyte.lowering.kernels.isa import InstructionSet
from halfbyte.lowering.kernels.linear import Argument
from halfbyte.lowering.kernels.routed import RoutedExperts, RoutedLinear
from halfbyte.lowering.layout import Packing
from halfbyte.passes.scheme import Activations, Zero


@dataclass(frozen=True)
class ExpertLinear(RoutedLinear[Packing]):
    """One linear of the experts.

    Attributes:
        scale: dtype of the weight scales.
        zero: how zero points are given.
    """

    scale: str
    zero: Zero

    def _weight(self, blocks: int) -> tuple[Argument, ...]:
        group = (blocks, *self.packing.group_shape[1:])
        out = [
            Argument(f"{self.kind}.codes", (blocks, *self.packing.codes_shape[1:]), "i8"),
            Argument(f"{self.kind}.scale", group, self.scale),
        ]
        if self.zero is Zero.INTEGER:
            out.append(Argument(f"{self.kind}.zero", group, "i8"))
        if self.zero is Zero.MINIMUM:
            out.append(Argument(f"{self.kind}.minimum", group, self.scale))
        return tuple(out)


@dataclass(frozen=True, kw_only=True)
class Moe(RoutedExperts[ExpertLinear]):
    """One shape of routed experts with integer weights.

    Attributes:
        isa: the GEMMs' body.
        activations: int8, fp8 or none (float).
        digits: digit planes of float activations.
    """

    isa: InstructionSet
    activations: Activations
    digits: int

    sides: ClassVar[str] = "moe_sides.mlir.j2"

    @property
    def codes(self) -> Codes:
        """What activations become."""
        return Codes.of(self.activations, self.digits)

    def before(self, linear: ExpertLinear) -> Quantize:
        first = linear.kind == "up"
        return Quantize(self.io if first else "f32", self.codes, self.platform, slots=first)

    def gemm(self, linear: ExpertLinear) -> Gemm:
        return Gemm(
            self.isa,
            "f32",
            self.codes,
            linear.packing.bits,
            linear.scale,
            linear.zero,
            linear.bias,
            self.platform,
            linear.kind,
            self.glu if linear.kind == "up" else None,
            levels=linear.packing.levels,
        )

    @property
    def symbol(self) -> str:
        sides = []
        for side in (self.up, self.down):
            packing = side.packing
            zero = f"{side.scale}_{side.zero.value}{'_bias' if side.bias else ''}"
            sides.append(f"{packing.outputs}x{packing.inputs}_g{packing.group_size}_{zero}")
        mode = f"{weight_kind(self.up.packing.bits, self.up.packing.levels)}_{self.codes}_{self.glu}"
        return f"halfbyte_moe_{mode}_e{self.experts}_k{self.slots}_{'_'.join(sides)}_{self.io}"

    def more(self) -> dict[str, object]:
        return {"codes": self.codes}

    def _of_side(self, linear: ExpertLinear) -> dict[str, object]:
        return {"block": linear.packing.block(self.codes.mode)}
