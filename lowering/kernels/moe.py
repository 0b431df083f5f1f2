"""``halfbyte::moe`` on the CPU: which kernels a layer of experts takes and the function that strings them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.lowering.kernels.generator import (
    E4M3,
    INT8,
    Codes,
    Combine,
    Gemm,
    Glu,
    Kernel,
    Quantize,
    Route,
)
from halfbyte.lowering.kernels.isa import InstructionSet
from halfbyte.lowering.kernels.linear import Argument
from halfbyte.lowering.kernels.routed import data_types, routed_text
from halfbyte.lowering.layout import Packing
from halfbyte.passes.scheme import Activations, Zero


@dataclass(frozen=True)
class ExpertLinear:
    """One linear of the experts.

    Attributes:
        kind: ``up`` holds gate and up, whose blocks of 64 columns take turns; or ``down``.
        packing: of one expert's linear; of gate and of up alike.
        scale: dtype of the weight scales.
        zero: how zero points are given.
        bias: whether a bias is added.
    """

    kind: Literal["up", "down"]
    packing: Packing
    scale: str
    zero: Zero
    bias: bool

    @property
    def blocks_per_expert(self) -> int:
        """Blocks of 64 columns."""
        return self.packing.column_blocks * (2 if self.kind == "up" else 1)

    def arguments(self, experts: int) -> tuple[Argument, ...]:
        """The tensors of all experts, as the dense linear has them for their columns side by side."""
        blocks = experts * self.blocks_per_expert
        group = (blocks, *self.packing.group_shape[1:])
        out = [
            Argument(f"{self.kind}.codes", (blocks, *self.packing.codes_shape[1:]), "i8"),
            Argument(f"{self.kind}.scale", group, self.scale),
        ]
        if self.zero is Zero.INTEGER:
            out.append(Argument(f"{self.kind}.zero", group, "i8"))
        if self.zero is Zero.MINIMUM:
            out.append(Argument(f"{self.kind}.minimum", group, self.scale))
        if self.bias:
            out.append(Argument(f"{self.kind}.bias", (64 * blocks,), "f32"))
        return tuple(out)


@dataclass(frozen=True)
class Moe:
    """One shape of routed experts.

    Attributes:
        isa: the GEMMs' body.
        experts: their number.
        slots: experts of a token.
        up, down: their linears.
        io: dtype of x and y.
        activations: int8, fp8 or none (float).
        digits: digit planes of float activations.
        glu: the product of gate and up.
        soft_f16: the CPU has no instruction that casts f16.
    """

    isa: InstructionSet
    experts: int
    slots: int
    up: ExpertLinear
    down: ExpertLinear
    io: str
    activations: Activations
    digits: int
    glu: Glu
    soft_f16: bool = False

    @property
    def codes(self) -> Codes:
        """What activations become."""
        known = {Activations.INT8: INT8, Activations.FP8: E4M3}
        return known.get(self.activations, Codes("planes", self.digits))

    def _quantize(self, linear: ExpertLinear) -> Quantize:
        if linear.kind == "up":
            return Quantize(self.io, self.codes, self.soft_f16, slots=True)
        return Quantize("f32", self.codes, self.soft_f16)

    def _gemm(self, linear: ExpertLinear) -> Gemm:
        return Gemm(
            self.isa,
            "f32",
            self.codes,
            linear.packing.bits,
            linear.scale,
            linear.zero,
            linear.bias,
            self.soft_f16,
            linear.kind,
            self.glu if linear.kind == "up" else None,
        )

    @property
    def _combine(self) -> Combine:
        return Combine(self.io, self.soft_f16)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        linears = (self.up, self.down)
        pairs = [kernel for linear in linears for kernel in (self._quantize(linear), self._gemm(linear))]
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
            zero = f"{side.scale}_{side.zero.value}{'_bias' if side.bias else ''}"
            sides.append(f"{packing.outputs}x{packing.inputs}_g{packing.group_size}_{zero}")
        mode = f"w{self.up.packing.bits}_{self.codes}_{self.glu}"
        return f"halfbyte_moe_{mode}_e{self.experts}_k{self.slots}_{'_'.join(sides)}_{self.io}"

    @property
    def inputs(self) -> int:
        return self.up.packing.inputs

    @property
    def outputs(self) -> int:
        return self.inputs

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
        sides = (self._side(self.up), self._side(self.down))
        return routed_text(self, "moe_sides.mlir.j2", *sides, codes=self.codes)

    def _side(self, linear: ExpertLinear) -> dict[str, Any]:
        return {
            "packing": linear.packing,
            "block": linear.packing.block(self.codes.mode),
            "blocks_per_expert": linear.blocks_per_expert,
            "arguments": linear.arguments(self.experts),
            "quantize": self._quantize(linear).symbol,
            "gemm": self._gemm(linear).symbol,
        }
